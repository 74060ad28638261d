import threading
import time
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.data.cache import Cache


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=60))
def test_it_keeps_what_was_used_last_within_its_bytes(
    most: int, asked: list[tuple[int, int]]
) -> None:
    cache = Cache[int, int](most, lambda size: size)
    kept: OrderedDict[int, int] = OrderedDict()
    for key, size in asked:
        reads: list[int] = []
        value = cache.get(key, lambda size=size, reads=reads: reads.append(size) or size)  # type: ignore[misc]
        assert (not reads) == (key in kept)
        if key in kept:
            assert value == kept[key]
            kept.move_to_end(key)
        elif size <= most:
            kept[key] = size
            while sum(kept.values()) > most:
                kept.popitem(last=False)
        assert cache.bytes == sum(kept.values()) <= most


def test_threads_that_ask_at_the_same_time_share_one_read() -> None:
    cache, reads, got = Cache[str, int](100, lambda _: 1), [], []
    together = threading.Barrier(5)

    def read() -> int:
        reads.append(1)
        time.sleep(0.05)
        return 7

    def ask() -> None:
        together.wait()
        got.append(cache.get("a", read))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert reads == [1]
    assert got == [7] * 5


def test_another_key_is_not_kept_waiting() -> None:
    cache, inside = Cache[str, str](100, len), []

    def outer() -> str:
        inside.append(cache.get("b", lambda: "b"))
        return "a"

    assert cache.get("a", outer) == "a"
    assert inside == ["b"]


def test_an_error_reaches_all_who_wait_and_the_next_try_reads_again() -> None:
    cache, started, go_on = Cache[str, int](100, lambda _: 1), threading.Event(), threading.Event()
    raised: list[str] = []

    def fail() -> int:
        started.set()
        go_on.wait(5)
        raise OSError("gone")

    def ask() -> None:
        try:
            cache.get("a", fail)
        except OSError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    started.wait(5)
    threads[1].start()
    time.sleep(0.05)
    go_on.set()
    for thread in threads:
        thread.join(5)
    assert raised == ["gone"] * 2
    assert cache.get("a", lambda: 3) == 3
    with pytest.raises(OSError, match="gone"):
        cache.get("b", fail)
