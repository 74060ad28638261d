import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.checkpoint.policy import Keep, save_due, to_delete


class Every:
    def __init__(self, every_steps: int | None) -> None:
        self.every_steps = every_steps


def test_a_save_is_due_at_every_interval_and_at_the_end() -> None:
    assert [step for step in range(13) if save_due(step, 12, Every(5))] == [5, 10, 12]
    assert [step for step in range(11) if save_due(step, 10, Every(5))] == [5, 10]
    assert [step for step in range(8) if save_due(step, 7, Every(None))] == [7]


TABLE = [
    # steps, keep_last, keep_every_steps, in_use, to delete
    ([], 2, None, None, []),
    ([5], 1, None, None, []),
    ([5, 10], 2, None, None, []),
    ([10, 5], 1, None, None, [5]),
    ([9, 10, 99, 100, 1000], 2, None, None, [9, 10, 99]),
    ([1, 2, 3, 4], 2, None, 1, [2]),
    ([1, 2, 3, 4], 2, None, 4, [1, 2]),
    ([5, 10, 15, 20, 25], 1, 10, None, [5, 15]),
    ([5, 10, 15, 20, 25], 1, 10, 5, [15]),
    ([5, 5, 10], 1, None, None, [5]),
    ([99999999, 100000000], 1, None, None, [99999999]),
]


@pytest.mark.parametrize(("steps", "keep_last", "every", "in_use", "gone"), TABLE)
def test_retention_goes_by_the_table(
    steps: list[int], keep_last: int, every: int | None, in_use: int | None, gone: list[int]
) -> None:
    assert to_delete(steps, Keep(keep_last=keep_last, keep_every_steps=every), in_use) == gone


@given(
    st.sets(st.integers(0, 10**9), min_size=1),
    st.integers(-1, 5),
    st.none() | st.integers(1, 50),
    st.none() | st.integers(0, 10**9),
)
def test_the_newest_and_the_one_in_use_always_stay(
    steps: set[int], keep_last: int, every: int | None, in_use: int | None
) -> None:
    gone = to_delete(steps, Keep(keep_last=keep_last, keep_every_steps=every), in_use)
    assert max(steps) not in gone
    assert in_use not in gone
    assert len(steps - set(gone)) >= min(keep_last, len(steps))
