"""Signs of life: seen from this host, from another, and with clocks that disagree."""

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from rayway.errors import StorageError
from rayway.telemetry.alive import (
    Heartbeat,
    Place,
    judge_life,
    process_started_at,
    sign_of_life,
    this_place,
)

NOW = 1_000_000.0
HERE = Place(host="here", pid_space="pid:[1]", pid=1, pid_since=0.0)
SIGN: dict[str, Any] = {
    "host": "here",
    "pid_space": "pid:[1]",
    "pid": 42,
    "pid_since": 500.0,
    "t": NOW - 5,
}


def there(pid: int) -> float | None:
    return 500.0


def gone(pid: int) -> float | None:
    return None


def reused(pid: int) -> float | None:
    return 900.0


def another_users(pid: int) -> float | None:
    return math.nan


@pytest.mark.parametrize(
    ("changes", "started_at", "alive", "because"),
    [
        ({}, there, True, "gave a sign of life"),
        ({}, another_users, True, "gave a sign of life"),
        ({}, gone, False, "process 42 on this host is gone"),
        ({}, reused, False, "process 42 on this host is gone"),
        ({"t": NOW - 31}, there, False, "no sign of life from process 42 on here for 31 s"),
        ({"t": NOW - 29}, there, True, "gave a sign of life"),
        # Another host, or another container on this one: its processes are not ours to look at.
        ({"host": "far"}, gone, True, "process 42 on far gave a sign of life"),
        ({"pid_space": "pid:[2]"}, gone, True, "gave a sign of life"),
        ({"host": "far", "t": NOW - 7200}, gone, False, "process 42 on far for 2 h 00 min"),
        ({"host": "far", "t": NOW + 20}, gone, True, "gave a sign of life"),
        ({"host": "far", "t": NOW + 3600}, gone, True, "its clock is 1 h 00 min ahead"),
        ({"t": None}, there, False, "never gave a sign"),
        ({"pid": None}, gone, True, "gave a sign of life"),
    ],
)
def test_life_is_judged(
    changes: dict[str, Any], started_at: Callable[[int], float | None], alive: bool, because: str
) -> None:
    verdict = judge_life({**SIGN, **changes}, now=NOW, here=HERE, started_at=started_at)
    assert (verdict.alive, because in verdict.because) == (alive, True), verdict


def test_an_empty_record_is_no_sign_of_life() -> None:
    assert not judge_life({}, now=NOW, here=HERE).alive


def test_this_process_is_alive_and_a_killed_one_is_not() -> None:
    assert judge_life(sign_of_life(), now=sign_of_life()["t"], here=this_place()).alive

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    since = psutil.Process(child.pid).create_time()
    sign = {**sign_of_life(), "pid": child.pid, "pid_since": since}
    assert judge_life(sign, now=sign["t"], here=this_place()).alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie
    assert not judge_life(sign, now=sign["t"], here=this_place()).alive
    child.communicate()
    assert process_started_at(child.pid) is None


def test_the_heart_beats_until_closed_and_survives_storage_trouble() -> None:
    signs: list[dict[str, Any]] = []
    enough = threading.Event()

    def put(data: bytes) -> None:
        signs.append(json.loads(data))
        if len(signs) == 2:
            raise StorageError("no answer")
        if len(signs) == 4:
            enough.set()

    with Heartbeat(put, every_s=0.01):
        assert len(signs) >= 1  # the first one is there before anything else happens
        assert enough.wait(10)
    assert signs[-1]["pid"] == os.getpid()
    assert signs[-1]["t"] > signs[0]["t"]


def test_a_closed_heart_stands_still() -> None:
    signs: list[bytes] = []
    heart = Heartbeat(signs.append, every_s=0.001)
    heart.close()
    count = len(signs)
    assert not threading.Event().wait(0.05)
    assert len(signs) == count
