"""Following a log that grows."""

import io
from pathlib import Path
from typing import BinaryIO

from hypothesis import given
from hypothesis import strategies as st

from rayway.errors import StorageError
from rayway.telemetry.events import encode
from rayway.telemetry.follow import LineTail, Tail


@given(cuts=st.lists(st.integers(0, 200), max_size=8), count=st.integers(0, 6))
def test_every_record_is_seen_once_however_the_log_grows(cuts: list[int], count: int) -> None:
    log = b"".join(encode({"type": "step", "step": i, "loss": 1.0}, t=1.0) for i in range(count))
    shown = 0
    tail = Tail(lambda: io.BytesIO(log[:shown]))
    seen = tail.poll()
    for cut in [*cuts, len(log)]:
        shown = min(shown + cut, len(log))
        seen += tail.poll()
    assert [record["step"] for record in seen] == list(range(count))


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(lambda: path.open("rb"))
    assert tail.poll() == []
    path.write_bytes(encode({"type": "warning", "message": "x"}, t=1.0))
    assert [record["message"] for record in tail.poll()] == ["x"]


def test_storage_that_fails_is_a_look_that_sees_nothing() -> None:
    def fail() -> BinaryIO:
        raise StorageError("no answer")

    assert Tail(fail).poll() == []


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    log = tmp_path / "out"
    tail = LineTail(lambda: log.open("rb"))
    assert tail.poll() == []
    log.write_bytes("grüße\nhal".encode())
    assert tail.poll() == ["grüße"]
    with log.open("ab") as more:
        more.write(b"b\n\xff\n")
    assert tail.poll() == ["halb", "\ufffd"]
