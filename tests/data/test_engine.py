import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayway.data.columns import Rows
from rayway.data.engine import local_engine
from rayway.data.index import build_index
from rayway.data.plan import plan_order
from rayway.data.shards import Reader
from rayway.data.stages import Stages
from rayway.data.stream import Unit

UNITS = [Unit(0, 0, 0, i, 1, ((i, 0, 1),), None) for i in range(60)]


def rows_of(unit: Unit) -> Rows:
    return Rows({"i": np.array([unit.first])})


def number(rows: Rows) -> int:
    return int(rows.columns["i"][0])


def until(fact: object, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not fact() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.005)


@settings(deadline=None, max_examples=25)
@given(
    budget=st.integers(0, 40),
    unit=st.integers(0, 5),
    slow=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    given_units=st.integers(0, 60),
    with_stages=st.booleans(),
)
def test_rows_come_in_the_order_of_the_units(
    budget: int, unit: int, slow: list[int], given_units: int, with_stages: bool
) -> None:
    def read(unit: Unit) -> Rows:
        time.sleep(slow[unit.first % len(slow)] / 2000)  # later units are often ready first
        return rows_of(unit)

    stages = Stages() if with_stages else None
    engine = local_engine(read, budget_bytes=budget, unit_bytes=unit, stages=stages)
    assert [number(rows) for rows in engine(iter(UNITS[:given_units]))] == list(range(given_units))


@pytest.mark.parametrize(("budget", "most"), [(1000, 10), (499, 4), (250, 2), (100, 1), (7, 1)])
def test_read_ahead_begins_at_two_and_grows_by_one_a_wait_within_the_budget(
    budget: int, most: int
) -> None:
    taken, slow, one_at_a_time = 0, True, threading.Lock()

    def units() -> Iterator[Unit]:
        nonlocal taken
        for unit in UNITS:
            taken += 1
            yield unit

    def read(unit: Unit) -> Rows:
        with one_at_a_time:  # whoever asks at once has to wait
            time.sleep(0.01 if slow else 0)
        return rows_of(unit)

    tables = local_engine(read, budget_bytes=budget, unit_bytes=100)(units())
    next(tables)  # nobody has it before it is asked for
    assert taken - 1 == min(3, most)
    before = taken
    for given_units in range(2, 20):
        next(tables)
        assert 1 <= taken - before <= 2
        before = taken
        assert taken - given_units <= most
    assert taken - 19 == most
    slow = False
    for given_units in range(20, 50):
        next(tables)
        assert taken - given_units <= most
    tables.close()


def test_read_ahead_does_not_grow_while_nobody_waits() -> None:
    done: list[int] = []

    def read(unit: Unit) -> Rows:
        if unit.first == 0:
            time.sleep(0.05)
        done.append(unit.first)
        return rows_of(unit)

    tables = local_engine(read, budget_bytes=1 << 20, unit_bytes=1)(iter(UNITS))
    next(tables)
    for given_units in range(2, 30):
        until(lambda: len(done) == given_units + 2)  # noqa: B023 - called at once
        time.sleep(0.002)
        next(tables)
    tables.close()
    assert len(done) <= 29 + 3


def test_threads_are_added_for_latency_and_not_where_they_would_jam() -> None:
    def most_at_once(seconds: float, compute: bool) -> int:
        stages, inside, most, lock = Stages(), 0, 0, threading.Lock()

        def read(unit: Unit) -> Rows:
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            if compute:
                with stages.transforming():
                    begin = time.thread_time()
                    while time.thread_time() - begin < seconds:
                        pass
            else:
                with stages.reading():
                    time.sleep(seconds)
            with lock:
                inside -= 1
            return rows_of(unit)

        engine = local_engine(read, budget_bytes=100, unit_bytes=1, stages=stages)
        for _ in engine(iter(UNITS)):
            pass
        return most

    assert most_at_once(0.02, compute=False) > 8
    assert most_at_once(0.02, compute=True) <= 4


def test_an_error_comes_in_its_units_place_and_ends_the_threads() -> None:
    def read(unit: Unit) -> Rows:
        if unit.first >= 3:
            raise OSError(f"gone {unit.first}")
        time.sleep(0.02)
        return rows_of(unit)

    before = set(threading.enumerate())
    tables = local_engine(read, budget_bytes=8, unit_bytes=1)(iter(UNITS))
    assert [number(next(tables)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="gone 3"):
        next(tables)
    until(lambda: set(threading.enumerate()) <= before)
    assert set(threading.enumerate()) <= before


def test_closing_ends_the_threads_without_waiting_for_a_read() -> None:
    started, go_on, one_at_a_time = list[int](), threading.Event(), threading.Lock()

    def read(unit: Unit) -> Rows:
        started.append(unit.first)
        with one_at_a_time:
            time.sleep(0.01)
        if unit.first >= 20:
            go_on.wait(10)
        return rows_of(unit)

    before = set(threading.enumerate())
    few_threads = Stages()  # no time is counted here, so none is added
    engine = local_engine(read, budget_bytes=50, unit_bytes=1, stages=few_threads)
    tables = engine(iter(UNITS))
    for _ in range(20):  # reads ever further ahead
        next(tables)
    until(lambda: len(started) > 20)
    time.sleep(0.05)
    begun = len(started)
    begin = time.monotonic()
    tables.close()
    assert time.monotonic() - begin < 1
    go_on.set()
    until(lambda: set(threading.enumerate()) <= before)
    assert set(threading.enumerate()) <= before
    assert len(started) == begun < 40, "units that nobody waits for are not begun"


def test_an_engine_can_be_asked_twice_at_once_and_left_unasked() -> None:
    before = set(threading.enumerate())
    engine = local_engine(rows_of, budget_bytes=8, unit_bytes=1)
    first, second, third = (engine(iter(UNITS)) for _ in range(3))
    assert [(number(a), number(b)) for a, b in zip(first, second, strict=True)] == [
        (i, i) for i in range(60)
    ]
    third.close()
    assert list(third) == []
    until(lambda: set(threading.enumerate()) <= before)
    assert set(threading.enumerate()) <= before


def test_many_threads_read_a_sticky_plans_groups_once_in_all_epochs(uneven: Path) -> None:
    index, reads = build_index(str(uneven)), list[tuple[int, int]]()
    plan = plan_order(index, global_batch=16, seed=0, lanes=4, bands=4, window=1, shuffle="sticky")
    reader = Reader([index], on_read=lambda *group: reads.append(group))
    units = list(plan.units(stop=4 * plan.steps_per_epoch))
    engine = local_engine(reader, budget_bytes=1 << 20, unit_bytes=1 << 10)
    for unit, rows in zip(units, engine(iter(units)), strict=True):
        assert rows.columns["id"].tolist() == unit.stored_ids(index).tolist()
    assert len(units) > 2 * len(index.rows)
    assert sorted(reads) == sorted({(0, g) for unit in units for g, _, _ in unit.spans})
