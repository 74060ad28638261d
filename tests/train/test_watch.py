"""A watch sees what others put into the run folder, and outlives trouble with storage."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rayway.errors import StorageError
from rayway.storage.runs import STOP_KEY, RunFolder
from rayway.train.watch import FencedError, Watch


class FlakyFolder(RunFolder):
    """Storage that fails while ``broken``."""

    broken = False

    def is_newest(self, attempt: int) -> bool:
        if self.broken:
            raise StorageError("no answer")
        return super().is_newest(attempt)


@pytest.fixture
def folder(tmp_path: Path) -> FlakyFolder:
    return FlakyFolder.create(str(tmp_path / "run-1"), "{}", now=datetime.now(UTC))


def soon(true: Callable[[], bool], *, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_a_request_to_stop_is_seen(folder: FlakyFolder) -> None:
    attempt = folder.next_attempt({})
    with Watch(folder, attempt, every_s=0.01) as watch:
        time.sleep(0.05)
        assert not watch.stop_asked()
        folder.write(STOP_KEY, {"by": "test"})
        assert soon(watch.stop_asked)
        folder.objects.delete([STOP_KEY])
        time.sleep(0.05)
        assert watch.stop_asked()  # once asked, asked


def test_a_newer_attempt_ends_the_older_one(folder: FlakyFolder) -> None:
    old = folder.next_attempt({})
    with Watch(folder, old, every_s=0.01) as watch:
        assert not watch.stop_asked()
        folder.next_attempt({})

        def fenced() -> bool:
            try:
                watch.stop_asked()
            except FencedError as error:
                return "attempt 1 of run run-1 ends here" in str(error)
            return False

        assert soon(fenced)


def test_storage_that_fails_ends_nothing_and_is_asked_again(folder: FlakyFolder) -> None:
    attempt = folder.next_attempt({})
    folder.broken = True
    with Watch(folder, attempt, every_s=0.01) as watch:
        time.sleep(0.05)
        assert not watch.stop_asked()
        folder.broken = False
        folder.write(STOP_KEY, {"by": "test"})
        assert soon(watch.stop_asked)


def test_leaving_it_is_quick_and_ends_its_thread(folder: FlakyFolder) -> None:
    began = time.monotonic()
    with Watch(folder, folder.next_attempt({}), every_s=60.0) as watch:
        pass
    assert time.monotonic() - began < 5.0
    assert not watch._thread.is_alive()
