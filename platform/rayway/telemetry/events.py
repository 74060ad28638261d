"""Event records as JSON lines, and the log that writes them beside the training loop.

A record is a flat dict with a ``type``; the log adds ``t``, unix seconds. The types are

    start       attempt, world_size, from_step, steps, device, ...
    step        step, loss, lr, grad_norm, rows, ids (when traced)
    evaluate    step, metrics {name: float}, rows
    checkpoint  step, bytes, seconds, committed_at, weights_sha256; training stood still for
                stall_s in all: behind_s for the save before it, update_waited_s for the copy
    save_failed step, reason, in_a_row
    warning     message
    end         state, reason, step, clock {name_s: seconds}, weights_sha256

JSON has no NaN and no infinity. Such a number is written as null, with its text beside it under
the key ``<name>_hex``; reading puts the number back. ``loss_hex`` is always written: the exact
bits, to compare two runs with.

Call ``EventLog.flush`` before a checkpoint is committed. A run that is killed right after goes on
from that checkpoint, and its log would otherwise lack the steps just before.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

from rayway.errors import StorageError

Record: TypeAlias = dict[str, Any]
"""One event: JSON values by name, with ``type`` and ``t``."""


def _to_plain(value: object) -> Any:
    """Turn an array or a tensor, of any library, into numbers; the sync happens here."""
    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(f"{type(value).__name__} is not a JSON value")
    return to_list()


_strict = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_to_plain).encode


def encode(record: Mapping[str, Any], *, t: float) -> bytes:
    """Return one log line, with its newline.

    Args:
        record: Values are JSON values, or arrays and tensors, which are written as numbers.
        t: When it happened, unix seconds. A ``t`` in the record wins.

    Raises:
        TypeError: A value is of no JSON type. ``ValueError`` if it holds itself.
    """
    line: Record = {"type": record["type"], "t": round(t, 4), **record}
    if line["type"] == "step":
        line["loss"] = loss = float(line["loss"])
        line["loss_hex"] = loss.hex()
    try:
        text = _strict(line)
    except ValueError:  # as good as always a NaN or an infinity, and they are rare
        text = _strict(_without_non_finite(line))
    return text.encode("ascii") + b"\n"


def _without_non_finite(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        plain = {}
        for name, part in value.items():
            part = _without_non_finite(part)  # noqa: PLW2901 -- the same value, made plain
            odd = isinstance(part, float) and not math.isfinite(part)
            plain[name] = None if odd else part
            if odd:
                plain[f"{name}_hex"] = part.hex()
        return plain
    if isinstance(value, list | tuple):
        return [_without_non_finite(part) for part in value]
    return value


def _with_non_finite(record: Record) -> Record:
    """Put NaN and infinity back. ``loss_hex`` stays, it is a value of its own."""
    for name in [name for name in record if name.endswith("_hex")]:
        plain = name.removesuffix("_hex")
        text = record[name]
        if plain in record and record[plain] is None and isinstance(text, str):
            record[plain] = float.fromhex(text)
            if name != "loss_hex":
                del record[name]
    for part in record.values():
        if isinstance(part, dict):
            _with_non_finite(part)
    return record


_REST = 9
"""After a write the log waits so many times as long as the write took."""

_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """What a log holds."""

    records: list[Record]
    """Every whole record, in the order written."""

    torn: bool
    """The last line was cut off: the writer died in it. Nothing to worry about."""

    damaged: tuple[int, ...]
    """Numbers of the other lines that are no record, from 1. The log was written on or changed."""


def decode(log: bytes) -> Decoded:
    """Return the records of an event log; a line that is none is left out and named."""
    lines = log.split(b"\n")
    records: list[Record] = []
    damaged: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        record = _decode_line(line)
        if record is None:
            damaged.append(number)
        else:
            records.append(record)
    torn = bool(damaged) and damaged[-1] == len(lines)  # it has no newline
    return Decoded(records=records, torn=torn, damaged=tuple(damaged[:-1] if torn else damaged))


def _decode_line(line: bytes) -> Record | None:
    try:
        record = json.loads(line.decode("utf-8"))
        if not isinstance(record, dict) or not isinstance(record.get("type"), str):
            return None
        if record["type"] == "step" and not isinstance(record.get("step"), int):
            return None
        return _with_non_finite(record)
    except (ValueError, OverflowError, RecursionError):
        return None


class EventLog:
    """An append-only log whose writing costs the training loop next to nothing.

    ``append`` only puts the record into a queue. A background thread makes the JSON, in batches,
    and hands them to storage. If storage refuses a batch, the log keeps it and tries again with
    the next one; training goes on. Beyond ``limit_bytes`` of unwritten lines the newest are
    dropped, counted, and named by a warning in the log.

    Args:
        append: Adds bytes to the end of the log. Raises ``StorageError`` or ``OSError``.
        flush_s: Seconds between two batches; more where writing one takes long.
        limit_bytes: Most bytes to hold while storage does not answer.
        deadline_s: Longest wait of ``flush`` and ``close``, in seconds.
        clock: Unix seconds, the ``t`` of a record.
    """

    def __init__(
        self,
        append: Callable[[bytes], None],
        *,
        flush_s: float = 0.2,
        limit_bytes: int = 64_000_000,
        deadline_s: float = 120.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._append = append
        self._flush_s = flush_s
        self._limit_bytes = limit_bytes
        self._deadline_s = deadline_s
        self._clock = clock
        self._queue: deque[tuple[float, Mapping[str, Any] | threading.Event]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._unwritten = bytearray()
        self._dropped = 0
        self._trouble: Exception | None = None
        self._thread = threading.Thread(target=self._write_on, name="event-log", daemon=True)
        self._thread.start()

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record, from any thread. Do not change the record afterwards."""
        self._queue.append((self._clock(), record))

    def flush(self) -> None:
        """Wait until everything appended so far is in storage.

        Raises:
            StorageError: It was not after ``deadline_s`` seconds. The log goes on trying.
        """
        done = threading.Event()
        self._queue.append((0.0, done))
        self._wake.set()
        if not done.wait(self._deadline_s):
            cause = self._trouble or "storage does not answer"
            raise StorageError(
                f"The event log is not written after {self._deadline_s:g} s: {cause}"
            )

    def close(self) -> None:
        """Write what is left and end the thread. A second call does nothing.

        Raises:
            StorageError: Storage did not take it within ``deadline_s`` seconds.
        """
        if self._closing:
            return
        try:
            self.flush()
        finally:
            self._closing = True
            self._wake.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except StorageError:
            if kind is None:  # an error on its way out says more
                raise

    def _write_on(self) -> None:
        waiting: list[threading.Event] = []
        pause_s = self._flush_s
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
            closing = self._closing
            waiting += self._take_queue()
            began = time.monotonic()
            if self._write():
                # An object store rewrites the whole log for each batch: let it rest.
                rest_s = _REST * (time.monotonic() - began)
                pause_s = max(self._flush_s, min(rest_s, _LONGEST_PAUSE_S))
                for done in waiting:
                    done.set()
                waiting.clear()
            else:
                pause_s = min(max(2 * pause_s, 0.1), _LONGEST_PAUSE_S)
            if closing:
                return

    def _take_queue(self) -> list[threading.Event]:
        """Turn the queue into lines; return the callers who wait for them."""
        waiting = []
        while self._queue:
            t, item = self._queue.popleft()
            if isinstance(item, threading.Event):
                waiting.append(item)
            elif len(self._unwritten) > self._limit_bytes:
                self._dropped += 1
            else:
                self._unwritten += _encode_or_say_why(item, t)
        return waiting

    def _write(self) -> bool:
        if self._dropped:
            message = f"{self._dropped} events were dropped while storage failed: {self._trouble}"
            warning = encode({"type": "warning", "message": message}, t=self._clock())
        else:
            warning = b""
        if not self._unwritten and not warning:
            return True
        try:
            self._append(bytes(self._unwritten) + warning)
        except (StorageError, OSError) as error:
            # Part of it may have been written. The newline keeps a torn line from swallowing
            # the first of the next try; lines that come twice are one step all the same.
            if not self._unwritten.startswith(b"\n"):
                self._unwritten[:0] = b"\n"
            self._trouble = error
            return False
        self._unwritten.clear()
        self._dropped = 0
        self._trouble = None
        return True


def _encode_or_say_why(record: Mapping[str, Any], t: float) -> bytes:
    """Never raise: the log has to survive a record that cannot be written."""
    try:
        return encode(record, t=t)
    except (TypeError, ValueError, KeyError, RecursionError, RuntimeError) as error:
        message = f"An event of type {record.get('type')!r} could not be written: {error!r}"
        return encode({"type": "warning", "message": message}, t=t)
