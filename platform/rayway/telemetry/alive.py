"""Signs of life: how another process, on this host or not, knows whether a run still has one.

A run's driver puts a small record into the run folder every few seconds. It names the host and
the process, so that a reader on the same host sees a death at once, and carries the time, so that
a reader elsewhere sees it once the record is old. Clocks differ between hosts: a record from the
future is taken as fresh, and the verdict says so.
"""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psutil

from rayway.errors import StorageError
from rayway.units import format_duration

SILENCE_S = 30.0
"""A driver that gave no sign for this long is taken for dead, in seconds."""

BEAT_S = 5.0
"""Seconds between two signs of life."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A process, told apart from all others."""

    host: str
    """The host's name."""

    pid_space: str
    """Process ids mean something only within one such space; a container has its own."""

    pid: int
    """The process id."""

    pid_since: float
    """When the process started, unix seconds: ids are used again."""


def this_place() -> Place:
    """Return where this code runs."""
    pid = os.getpid()
    return Place(
        host=socket.gethostname(),
        pid_space=_pid_space(),
        pid=pid,
        pid_since=psutil.Process(pid).create_time(),
    )


def _pid_space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: one space per host
        return ""


def sign_of_life(t: float | None = None) -> dict[str, Any]:
    """Return the record a driver puts into its run folder. ``t``: unix seconds, now if None."""
    place = this_place()
    return {
        "host": place.host,
        "pid_space": place.pid_space,
        "pid": place.pid,
        "pid_since": place.pid_since,
        "t": time.time() if t is None else t,
    }


def process_started_at(pid: int) -> float | None:
    """Return when a process of this host started, unix seconds; None if there is no such process.

    NaN, which differs from nothing, if the system does not tell.
    """
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a driver lives, and why we think so."""

    alive: bool
    """Whether it is taken to be alive."""

    because: str
    """The evidence, for people."""


def judge_life(
    sign: Mapping[str, Any],
    *,
    now: float,
    here: Place,
    started_at: Callable[[int], float | None] = process_started_at,
) -> Verdict:
    """Return whether the driver that left ``sign`` is alive.

    Args:
        sign: A record made by :func:`sign_of_life`; what it lacks counts as unknown.
        now: Unix seconds, by this host's clock.
        here: Where the reader runs; see :func:`this_place`.
        started_at: Tells when a process of this host started; see :func:`process_started_at`.
    """
    host, pid, t = sign.get("host", "an unknown host"), sign.get("pid"), sign.get("t")
    same_space = (host, sign.get("pid_space")) == (here.host, here.pid_space)
    if same_space and isinstance(pid, int):
        since = started_at(pid)
        known = sign.get("pid_since")
        if since is None or (isinstance(known, float) and abs(since - known) > 2.0):
            return Verdict(alive=False, because=f"its process {pid} on this host is gone")
    if not isinstance(t, int | float):
        return Verdict(alive=False, because="it never gave a sign of life")
    who, age_s = f"process {pid} on {host}", now - t
    if age_s > SILENCE_S:
        silence = format_duration(age_s)
        return Verdict(alive=False, because=f"no sign of life from {who} for {silence}")
    if age_s < -SILENCE_S:
        ahead = format_duration(-age_s)
        return Verdict(
            alive=True,
            because=f"{who} gave a sign of life, when is not known: its clock is {ahead} ahead",
        )
    return Verdict(alive=True, because=f"{who} gave a sign of life")


class Heartbeat:
    """Gives a sign of life every few seconds until closed.

    Args:
        put: Replaces the record in the run folder. Its failures are ignored: the reader sees
            silence, which is the truth.
        every_s: Seconds between two signs.
    """

    def __init__(self, put: Callable[[bytes], None], *, every_s: float = BEAT_S) -> None:
        self._put = put
        self._every_s = every_s
        self._closing = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._beat_on, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. The last sign stays in the folder."""
        self._closing.set()
        self._thread.join(timeout=10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _beat_on(self) -> None:
        while not self._closing.wait(self._every_s):
            self._beat()

    def _beat(self) -> None:
        try:
            self._put(json.dumps(sign_of_life()).encode())
        except (StorageError, OSError):
            return
