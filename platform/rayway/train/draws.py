"""Random draws as a function of where in the run they happen, not of what ran before.

Before each forward pass every generator that user code may draw from is seeded by (seed, step,
first slot of the micro-batch). A resumed run draws what the undisturbed one drew, and nothing has
to be stored. Dropout masks differ between micro-batches, and so between ranks.
"""

import random

import numpy as np
import torch

from rayway.data.keys import Domain, key

_TRAIN, _EVALUATE = range(2)


def seed_build(seed: int) -> None:
    """Seed the draws that initialise a model: the same on every rank."""
    _seed_all(key(seed, Domain.WEIGHTS))


def seed_forward(seed: int, *, step: int, first_slot: int) -> None:
    """Seed the draws of one training micro-batch.

    Args:
        seed: The job's seed.
        step: Finished steps before this one.
        first_slot: The micro-batch's first place in the global batch.
    """
    _seed_all(key(seed, Domain.DROPOUT, _TRAIN, step, first_slot))


def seed_evaluation(seed: int, *, step: int, first_slot: int) -> None:
    """Seed the draws of one evaluation micro-batch, for models that draw in eval mode too."""
    _seed_all(key(seed, Domain.DROPOUT, _EVALUATE, step, first_slot))


def _seed_all(word: int) -> None:
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)  # user code may use the old global generator
    # torch.manual_seed costs 100 us, as it looks for every kind of device; this costs 1 us
    torch.default_generator.manual_seed(word & 0x7FFFFFFFFFFFFFFF)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch
        torch.cuda.manual_seed(word & 0x7FFFFFFFFFFFFFFF)
