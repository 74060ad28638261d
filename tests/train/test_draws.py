"""Draws are a function of (seed, step, slot), for every generator that a user may have used."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayway.train.draws import seed_build, seed_evaluation, seed_forward

Draw = Callable[[], float]
GENERATORS: dict[str, Draw] = {
    "python": random.random,
    "numpy": np.random.random,
    "torch": lambda: torch.rand(()).item(),
}
SEEDS, STEPS, SLOTS = st.integers(0, 2**63 - 1), st.integers(0, 10**12), st.integers(0, 10**9)


@pytest.mark.parametrize("draw", GENERATORS.values(), ids=GENERATORS)
@given(seed=SEEDS, step=STEPS, slot=SLOTS, drawn_before=st.integers(0, 3))
def test_draws_do_not_depend_on_what_was_drawn_before(
    draw: Draw, seed: int, step: int, slot: int, drawn_before: int
) -> None:
    seed_forward(seed, step=step, first_slot=slot)
    undisturbed = [draw() for _ in range(3)]
    for _ in range(drawn_before):
        draw()
    seed_forward(seed, step=step, first_slot=slot)
    assert [draw() for _ in range(3)] == undisturbed


@pytest.mark.parametrize("draw", GENERATORS.values(), ids=GENERATORS)
def test_draws_differ_between_seeds_steps_slots_and_uses(draw: Draw) -> None:
    drawn = []
    for seed in range(4):
        seed_build(seed)
        drawn.append(draw())
        for step in range(8):
            for slot in range(8):
                for reseed in (seed_forward, seed_evaluation):
                    reseed(seed, step=step, first_slot=slot)
                    drawn.append(draw())
    assert len(drawn) == 4 + 4 * 8 * 8 * 2
    assert len(set(drawn)) >= len(drawn) - 1  # torch's have 24 bits: one pair may meet


@given(seed=SEEDS)
def test_a_model_is_built_with_the_same_draws_every_time(seed: int) -> None:
    seed_build(seed)
    first = torch.rand(4)
    seed_build(seed)
    assert torch.equal(torch.rand(4), first)
