import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rayway.data.columns import Columns
from rayway.data.engine import local_engine
from rayway.data.plan import Unit

UNITS = [Unit(0, 0, i, 1, ((i, 0, 1),), None) for i in range(30)]


def read(unit: Unit) -> Columns:
    time.sleep(unit.first % 3 / 1000)  # later units are often ready first
    return {"i": np.array([unit.first])}


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("ahead", [None, 0, 1, 40])
def test_tables_come_in_the_order_of_the_units(threads: int, ahead: int | None) -> None:
    tables = local_engine(read, threads=threads, ahead=ahead)(iter(UNITS))
    assert [int(table["i"][0]) for table in tables] == list(range(30))


@pytest.mark.parametrize(("ahead", "most"), [(None, 4), (0, 0), (3, 3)])
def test_read_ahead_is_bounded(ahead: int | None, most: int) -> None:
    taken = 0

    def units() -> Iterator[Unit]:
        nonlocal taken
        for unit in UNITS:
            taken += 1
            yield unit

    tables = local_engine(read, threads=2, ahead=ahead)(units())
    for given in range(1, 20):
        next(tables)
        assert taken == given + most
    tables.close()


def test_threads_read_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=10)

    def read(unit: Unit) -> Columns:
        together.wait()
        return {}

    assert len(list(local_engine(read, threads=3)(iter(UNITS)))) == 30


def test_an_error_comes_in_its_units_place() -> None:
    def read(unit: Unit) -> Columns:
        if unit.first == 3:
            raise OSError("gone")
        return {"i": np.array([unit.first])}

    tables = local_engine(read, threads=4)(iter(UNITS))
    assert [int(next(tables)["i"][0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="gone"):
        next(tables)


def test_closing_ends_the_threads_without_waiting_for_a_read() -> None:
    started, go_on = [], threading.Event()

    def read(unit: Unit) -> Columns:
        started.append(unit.first)
        if unit.first:
            go_on.wait(10)
        return {}

    before = set(threading.enumerate())
    tables = local_engine(read, threads=2, ahead=20)(iter(UNITS))
    next(tables)
    begin = time.monotonic()
    tables.close()
    assert time.monotonic() - begin < 5
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before
    assert len(started) <= 4, "units that nobody waits for are not begun"
