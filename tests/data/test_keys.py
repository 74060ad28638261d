import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayway.data.keys import Domain, key, mix, mix_array, permutation, sample_keys, uniforms

WORDS = st.integers(0, 2**64 - 1)


def test_mix_is_splitmix64() -> None:
    # the published first outputs of SplitMix64 from state 0 and 1234567
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(1234567) == 6457827717110365317


@given(WORDS)
def test_mix_of_arrays_is_mix(word: int) -> None:
    assert int(mix_array(np.array([word], np.uint64))[0]) == mix(word)


def test_a_key_depends_on_each_word_and_on_their_order() -> None:
    assert len({key(1, 2, 3), key(3, 2, 1), key(1, 2), key(1, 2, 4), key(0, 2, 3)}) == 5
    assert key(-1) == key(2**64 - 1)
    assert key(1, 1) != key(2, 0)


@given(st.integers(0, 300), WORDS)
def test_a_permutation_holds_each_number_once(count: int, order_key: int) -> None:
    assert sorted(permutation(count, order_key)) == list(range(count))


def test_permutations_of_two_keys_differ() -> None:
    assert permutation(100, 1).tolist() != permutation(100, 2).tolist()
    assert permutation(100, 1).tolist() != list(range(100))


def test_domains_keep_their_numbers() -> None:
    # they are part of every order and every draw: a change is a new ORDER_VERSION
    assert [(d.name, int(d)) for d in Domain] == [
        ("ROW_GROUPS", 1),
        ("WINDOW", 2),
        ("SPAN", 3),
        ("AUGMENT", 4),
        ("DROPOUT", 5),
        ("WEIGHTS", 6),
    ]


def test_draws_are_uniform_and_epochs_and_draws_are_independent() -> None:
    ids = np.arange(100_000)
    first = sample_keys(ids, seed=1, epoch=0)
    u = uniforms(first, 0)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(u.std() - 12**-0.5) < 0.005
    others = [
        uniforms(first, 1),
        uniforms(sample_keys(ids, seed=1, epoch=1), 0),
        uniforms(sample_keys(ids, seed=2, epoch=0), 0),
    ]
    assert all(abs(np.corrcoef(u, other)[0, 1]) < 0.01 for other in others)


def test_a_samples_draw_depends_on_its_id_alone() -> None:
    ids = np.array([7, 3, 500, 3])
    u = uniforms(sample_keys(ids, seed=5, epoch=2), 4)
    assert u[1] == u[3]
    assert u[2] == uniforms(sample_keys(np.array([500]), seed=5, epoch=2), 4)[0]


def test_golden_draws() -> None:
    # a change here is a change of every job with a transform
    draws = uniforms(sample_keys(np.array([0, 41]), seed=1, epoch=2), 3)
    assert draws.tolist() == [0.003014373873747478, 0.23632695981975704]
    same = [sample_keys(np.array([5]), seed=s, epoch=e)[0] for s, e in [(1, 1), (2, 0), (0, 2)]]
    assert len(set(same)) == 3
