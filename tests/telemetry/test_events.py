"""The event log: what is written is read, whatever is cut off, and training is not held up."""

import json
import math
import struct
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.errors import StorageError
from rayway.telemetry.events import EventLog, Record, decode, encode

any_float = st.floats(width=64)
texts = st.text(st.characters(), max_size=20)


def step(number: int, loss: float = 0.5) -> Record:
    return {"type": "step", "step": number, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "rows": 8}


def steps_in(log: bytes) -> list[int]:
    return [record["step"] for record in decode(log).records if record["type"] == "step"]


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)


class Storage:
    """A log in memory that can be told to fail, before or amid a write."""

    def __init__(self) -> None:
        self.log = b""
        self.failing = False
        self.written_before_failing = 0

    def append(self, more: bytes) -> None:
        if self.failing:
            self.log += more[: self.written_before_failing]
            raise StorageError("disk full")
        self.log += more


@given(loss=any_float, lr=any_float, accuracy=any_float)
def test_every_float_survives_and_the_line_is_strict_json(
    loss: float, lr: float, accuracy: float
) -> None:
    log = encode({**step(7, loss), "lr": lr}, t=1.0) + encode(
        {"type": "evaluate", "step": 7, "metrics": {"accuracy": accuracy}}, t=2.0
    )
    for line in log.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    first, second = decode(log).records
    assert same(first["loss"], loss)
    assert same(float.fromhex(first["loss_hex"]), loss)
    assert same(first["lr"], lr)
    assert list(second["metrics"]) == ["accuracy"]
    assert same(second["metrics"]["accuracy"], accuracy)


@given(message=texts)
def test_any_text_is_one_line(message: str) -> None:
    line = encode({"type": "warning", "message": message}, t=1.0)
    assert line.count(b"\n") == 1
    assert decode(line).records[0]["message"] == message


def test_arrays_are_written_as_numbers() -> None:
    record = {**step(1), "loss": np.float32(0.1), "grad_norm": np.float32("inf")}
    (read,) = decode(encode({**record, "ids": np.arange(3)}, t=1.0)).records
    assert read["loss"] == float(np.float32(0.1))
    assert read["grad_norm"] == math.inf
    assert read["ids"] == [0, 1, 2]


@given(count=st.integers(1, 5), data=st.data())
def test_a_log_cut_at_any_byte_gives_every_whole_record(count: int, data: st.DataObject) -> None:
    lines = [encode(step(i), t=1.0) for i in range(count)]
    log = b"".join(lines)
    cut = log[: data.draw(st.integers(0, len(log)))]
    decoded = decode(cut)
    # A record that only lacks its newline is whole.
    whole = sum(len(b"".join(lines[: i + 1])) - 1 <= len(cut) for i in range(count))
    assert [record["step"] for record in decoded.records] == list(range(whole))
    assert decoded.damaged == ()


def test_a_torn_last_line_is_tolerated_and_known() -> None:
    decoded = decode(encode(step(1), t=1.0) + b'{"type":"step","st')
    assert [record["step"] for record in decoded.records] == [1]
    assert decoded.torn
    assert decoded.damaged == ()


@pytest.mark.parametrize(
    "bad",
    [
        b'{"type":"step","st',
        b"\xff\xfe",
        b"\0\0\0\0",
        b"[]",
        b'{"no":"type"}',
        b'{"type":"step"}',
        b"[" * 100_000,
        b'{"type":"step","step":' + b"9" * 5000 + b"}",
    ],
)
def test_a_damaged_line_in_the_middle_is_named(bad: bytes) -> None:
    decoded = decode(encode(step(1), t=1.0) + bad + b"\n" + encode(step(2), t=1.0))
    assert [record["step"] for record in decoded.records] == [1, 2]
    assert decoded.damaged == (2,)
    assert not decoded.torn


def test_a_log_written_by_many_threads_has_every_record() -> None:
    storage = Storage()
    with EventLog(storage.append, flush_s=0.001) as log:
        threads = [
            threading.Thread(target=lambda i=i: [log.append(step(i)) for _ in range(500)])
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(steps_in(storage.log)) == sorted([0, 1, 2, 3] * 500)


def test_records_keep_their_order_and_time() -> None:
    storage = Storage()
    times = iter([10.0, 20.0])
    with EventLog(storage.append, clock=lambda: next(times)) as log:
        log.append(step(1))
        log.append(step(2))
    assert [(r["step"], r["t"]) for r in decode(storage.log).records] == [(1, 10.0), (2, 20.0)]


def test_flush_returns_once_everything_is_written() -> None:
    storage = Storage()
    with EventLog(storage.append, flush_s=60.0) as log:
        for number in range(1, 4):
            log.append(step(number))
            log.flush()
            assert steps_in(storage.log) == list(range(1, number + 1))


def test_records_are_written_without_a_flush() -> None:
    storage = Storage()
    with EventLog(storage.append, flush_s=0.01) as log:
        log.append(step(1))
        wait_until(lambda: steps_in(storage.log) == [1])


def test_slow_storage_is_left_to_rest_between_batches() -> None:
    writes = []

    def append(more: bytes) -> None:
        time.sleep(0.05)
        writes.append(more)

    began = time.monotonic()
    with EventLog(append, flush_s=0.001) as log:
        for number in range(100):
            log.append(step(number))
            time.sleep(0.01)
    there_was_time_for = (time.monotonic() - began) / 0.05
    assert steps_in(b"".join(writes)) == list(range(100))
    assert len(writes) <= 2 + there_was_time_for / 4


@pytest.mark.parametrize("written", [0, 1, 40, 200])
def test_nothing_is_lost_while_storage_fails(written: int) -> None:
    storage = Storage()
    storage.failing, storage.written_before_failing = True, written
    with EventLog(storage.append, flush_s=0.001, deadline_s=0.2) as log:
        log.append(step(1))
        log.append(step(2))
        with pytest.raises(StorageError, match=r"not written after 0\.2 s: disk full"):
            log.flush()
        storage.failing = False
        log.append(step(3))
        wait_until(lambda: steps_in(storage.log)[-1:] == [3])
    assert sorted(set(steps_in(storage.log))) == [1, 2, 3]
    assert steps_in(storage.log)[-3:] == [1, 2, 3]


def test_what_does_not_fit_while_storage_fails_is_counted_in_the_log() -> None:
    storage = Storage()
    storage.failing = True
    with EventLog(storage.append, flush_s=0.001, limit_bytes=300, deadline_s=0.2) as log:
        for number in range(1, 21):
            log.append(step(number))
        with pytest.raises(StorageError):
            log.flush()
        storage.failing = False
        wait_until(lambda: b"dropped" in storage.log)
    kept = steps_in(storage.log)
    warning = decode(storage.log).records[-1]
    assert kept == list(range(1, len(kept) + 1))
    assert len(kept) < 20
    assert warning["message"].startswith(f"{20 - len(kept)} events were dropped")
    assert "disk full" in warning["message"]


def test_a_record_that_cannot_be_written_becomes_a_warning() -> None:
    storage = Storage()
    itself: Record = {"type": "step", "step": 1, "loss": 1.0}
    itself["itself"] = itself
    with EventLog(storage.append) as log:
        log.append({"type": "step", "step": 1, "loss": 1.0, "odd": object()})
        log.append({"no": "type"})
        log.append(itself)
        log.append(step(2))
    types = [record["type"] for record in decode(storage.log).records]
    assert types == ["warning", "warning", "warning", "step"]


def test_close_says_that_storage_does_not_answer() -> None:
    storage = Storage()
    storage.failing = True
    log = EventLog(storage.append, deadline_s=0.05)
    log.append(step(1))
    with pytest.raises(StorageError, match="disk full"):
        log.close()
    log.close()  # the second call does nothing


def test_an_error_in_the_body_is_not_hidden_by_storage() -> None:
    def refuse(more: bytes) -> None:
        raise StorageError("disk full")

    log = EventLog(refuse, deadline_s=0.05)
    log.append(step(1))
    with pytest.raises(ZeroDivisionError), log:
        _ = 1 / 0
    with pytest.raises(StorageError, match="disk full"):
        log.flush()


def test_append_takes_microseconds() -> None:
    storage = Storage()
    with EventLog(storage.append) as log:
        begin = time.thread_time()
        for number in range(2000):
            log.append(step(number))
        per_append_s = (time.thread_time() - begin) / 2000
    assert per_append_s < 20e-6
