import numpy as np
import pytest

from shuffle_quality import Data, full, measure, orders, ours, stored

DATA = Data(groups=64, group_rows=64, batch=64)


@pytest.mark.parametrize("name", orders(DATA, quick=True))
def test_every_order_holds_each_row_once_in_an_epoch(name: str) -> None:
    order = orders(DATA, quick=True)[name]
    for epoch in (0, 1):
        assert sorted(order(3, epoch)) == list(range(DATA.rows))
    again = order(3, 1)
    assert np.array_equal(again, order(3, 1))


def test_the_measures_tell_no_shuffle_from_a_full_one() -> None:
    none, all_of_it = measure(DATA, stored(DATA), 2), measure(DATA, full(DATA), 2)
    assert none["vif"] == pytest.approx(64)
    assert none["neighbours"] == pytest.approx(1)
    assert none["resident_rows"] == 64
    assert none["groups"] < 0.1
    assert all_of_it["vif"] == pytest.approx(1, abs=0.2)
    assert all_of_it["displacement"] == pytest.approx(1 / 3, abs=0.02)
    for name in ("groups", "micro", "repeat"):
        assert all_of_it[name] == pytest.approx(1, abs=0.1)


def test_lanes_mix_better_than_a_window_of_as_many_row_groups() -> None:
    lanes, window = measure(DATA, ours(DATA, 16, 1), 4), measure(DATA, ours(DATA, 1, 16), 4)
    assert lanes["resident_rows"] < 1.1 * window["resident_rows"]
    assert lanes["vif"] < 0.9 * window["vif"]
