import threading
import time
from collections.abc import Callable

import pytest

from rayway.storage.background import check_time, in_order, start, within


def test_a_call_in_time_gives_its_answer_or_its_error() -> None:
    assert within(5, lambda: "answer") == "answer"
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0)


def test_a_late_call_is_not_waited_for() -> None:
    release = threading.Event()
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        within(0.1, lambda: release.wait(10))
    assert time.monotonic() - begun < 2
    release.set()


def test_a_time_out_of_the_calls_own_is_told_as_it_is() -> None:
    def call() -> None:
        raise TimeoutError("the socket's")

    with pytest.raises(TimeoutError, match="the socket's"):
        within(5, call)


def test_a_late_call_ends_at_its_next_look_at_the_time() -> None:
    ended = threading.Event()

    def call() -> None:
        try:
            while True:
                check_time()
                time.sleep(0.01)
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        within(0.05, call)
    assert ended.wait(5)
    check_time()  # this thread has no limit


def test_no_thread_holds_up_the_end_of_the_process() -> None:
    release = threading.Event()
    future = start(release.wait)
    assert all(each.daemon for each in threading.enumerate() if each.name == "storage")
    release.set()
    assert future.result(5)


def test_answers_come_in_order_and_no_more_calls_than_allowed_are_under_way() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def call(n: int) -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.002 * (n % 3))
        with lock:
            now -= 1
        return n

    def calls() -> list[Callable[[], int]]:
        return [lambda n=n: call(n) for n in range(30)]  # type: ignore[misc]

    assert list(in_order(calls(), at_once=4)) == list(range(30))
    assert 2 <= most <= 4
    assert list(in_order([], at_once=4)) == []


def test_the_first_error_is_told_when_its_turn_comes() -> None:
    answers = in_order([lambda: 1, lambda: 1 // 0, lambda: 3], at_once=3)
    assert next(answers) == 1
    with pytest.raises(ZeroDivisionError):
        next(answers)
