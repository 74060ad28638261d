"""Hashes for the order of samples and for draws that must not depend on who makes them.

A library's random generator may change between versions and hangs on how often it was called. A
hash of the words that matter (seed, epoch, sample id) gives every worker the same draw, at any
time and in any order. The hash is SplitMix64's finaliser, a bijection of 64-bit integers.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Domain(IntEnum):
    """What a key is for: the second word of every key, so that no two uses share draws."""

    ROW_GROUPS = 1
    """Order of a data set's row groups in one epoch."""
    WINDOW = 2
    """Order of the rows in one window."""
    SPAN = 3
    """Order of a lane's spans where lanes keep their row groups over epochs."""
    AUGMENT = 4
    """Draws of the user's transform for one sample."""
    DROPOUT = 5
    """Torch's generators in a training step."""
    WEIGHTS = 6
    """Torch's generators while the model is built."""


def mix(word: int) -> int:
    """Return ``word`` hashed to 64 bits; distinct words give distinct hashes."""
    z = (word + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def key(*words: int) -> int:
    """Return one 64-bit key for a sequence of words. Order matters; words are taken mod 2^64."""
    hashed = 0
    for word in words:
        hashed = mix(hashed ^ (word & _MASK))
    return hashed


def mix_array(words: UInt64s) -> UInt64s:
    """Return :func:`mix` of each element; shape as given."""
    z = words + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def permutation(count: int, order_key: int) -> Int64s:
    """Return the numbers below ``count`` in the order that ``order_key`` names, shape (count,).

    The sort keys are distinct because ``mix`` is a bijection: any correct sort gives this order.
    """
    return np.argsort(mix_array(np.arange(count, dtype=np.uint64) ^ np.uint64(order_key)))


def sample_keys(ids: Int64s, *, seed: int, epoch: int, stream: int = 0) -> UInt64s:
    """Return the augmentation key of each sample id, shape as ``ids``."""
    return mix_array(ids.astype(np.uint64) ^ np.uint64(key(seed, Domain.AUGMENT, stream, epoch)))


def uniforms(keys: UInt64s, draw: int) -> npt.NDArray[np.float64]:
    """Return draw number ``draw`` of each key, uniform in [0, 1); shape as ``keys``."""
    bits = mix_array(keys ^ np.uint64(mix(draw))) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
