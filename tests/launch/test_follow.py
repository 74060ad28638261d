"""What is shown while a run goes, and what signals do to it."""

import io
import os
import signal
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rayway.launch.follow import Follower, stop_on_signal
from rayway.storage.runs import STOP_KEY, RunFolder, events_key, output_key
from rayway.telemetry.console import Progress
from rayway.telemetry.events import encode

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(str(tmp_path / "run-1"), "{}", now=datetime.now(UTC))


def shown_within(stream: io.StringIO, text: str, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while text not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    return text in stream.getvalue()


def warning(text: str) -> bytes:
    return encode({"type": "warning", "message": text}, t=1.0)


def test_events_and_output_of_rank_0_are_shown_as_they_come(folder: RunFolder) -> None:
    stream = io.StringIO()
    key = events_key(2, 0)
    with Progress("run-1", stream=stream) as progress, Follower(folder, 2, progress):
        folder.objects.append(key, warning("first"))
        assert shown_within(stream, "first")
        folder.objects.append(output_key(2, 0, "out"), b"hello from the user\n")
        assert shown_within(stream, "hello from the user")
        folder.objects.append(events_key(2, 1), warning("of another rank"))
        folder.objects.append(events_key(1, 0), warning("of another attempt"))
        folder.objects.append(key, warning("second"))
        assert shown_within(stream, "second")
    assert stream.getvalue().count("first") == 1
    assert "of another" not in stream.getvalue()


def test_what_comes_with_the_end_is_still_shown(folder: RunFolder) -> None:
    stream = io.StringIO()
    with Progress("run-1", stream=stream) as progress, Follower(folder, 1, progress):
        folder.objects.append(events_key(1, 0), warning("last words"))
    assert "last words" in stream.getvalue()


def kill_and_wait(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # where Python runs the handler


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_to_stop_and_the_second_aborts(
    number: signal.Signals, folder: RunFolder
) -> None:
    notes: list[str] = []
    before = [signal.getsignal(each) for each in SIGNALS]
    with stop_on_signal(folder, notes.append):
        kill_and_wait(number)
        record = folder.read(STOP_KEY)
        with pytest.raises(KeyboardInterrupt):
            kill_and_wait(signal.SIGTERM)
    assert record is not None
    assert record["by"] == number.name
    text = "stopping after this step, with a checkpoint. Once more aborts at once."
    assert notes == [f"{number.name}: {text}"]
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_without_a_signal_nothing_is_asked_and_handlers_are_put_back(folder: RunFolder) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with stop_on_signal(folder, print):
        assert [signal.getsignal(each) for each in SIGNALS] != before
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert folder.read(STOP_KEY) is None


def test_off_the_main_thread_signals_are_left_alone(folder: RunFolder) -> None:
    handlers: list[object] = []

    def run() -> None:
        with stop_on_signal(folder, print):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]
