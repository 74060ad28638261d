"""Two processes that begin attempts, and one that should be dead, with their calls in any order.

Each call to the storage waits for its turn, so an order that hypothesis drew is the order that
happens. What must hold: no number is given twice; whoever was told a number has fenced all lower
ones; and what a zombie still announces was there for each newer attempt to find.
"""

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayway.storage.objects import Objects
from rayway.storage.runs import RunFolder, attempt_key

T = TypeVar("T")
NOW = datetime(2026, 1, 31, tzinfo=UTC)
COMMIT = "checkpoints/step-00000001.attempt-001/COMMITTED"


class Actor:
    """A process of its own, as far as storage can tell: a thread that makes a call when told."""

    def __init__(self, url: str, act: Callable[[RunFolder], Any]) -> None:
        self.turn, self.waits = threading.Semaphore(0), threading.Semaphore(0)
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        folder = RunFolder(TurnObjects(url, self))
        self.thread = threading.Thread(target=self._run, args=(act, folder), daemon=True)
        self.thread.start()
        self._until_it_waits()

    def step(self) -> None:
        """Let it make its next call, and go on to the one after it."""
        if not self.done:
            self.turn.release()
            self._until_it_waits()

    def _run(self, act: Callable[[RunFolder], Any], folder: RunFolder) -> None:
        try:
            self.result = act(folder)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
        self.done = True
        self.waits.release()

    def _until_it_waits(self) -> None:
        assert self.waits.acquire(timeout=30)
        if self.error is not None:
            raise self.error


class TurnObjects(Objects):
    """Objects that make a call when it is their actor's turn."""

    def __init__(self, url: str, actor: Actor) -> None:
        super().__init__(url)
        self.actor = actor

    def _call(self, verb: str, key: str, call: Callable[[str], T], **options: Any) -> T:
        if threading.current_thread() is self.actor.thread:
            self.actor.waits.release()
            assert self.actor.turn.acquire(timeout=30)
        return super()._call(verb, key, call, **options)


def begin_twice(name: str, log: list[tuple[str, Any]]) -> Callable[[RunFolder], list[int]]:
    """A process that begins an attempt, looks for checkpoints, and does so again."""

    def act(folder: RunFolder) -> list[int]:
        numbers = []
        for _ in range(2):
            number = folder.next_attempt({"name": name})
            log.append(("told", number))
            numbers.append(number)
            log.append(("finds", folder.objects.exists(COMMIT)))
        return numbers

    return act


def haunt(log: list[tuple[str, Any]]) -> Callable[[RunFolder], bool]:
    """Attempt 1, which saves as the checkpoint store does: fence, marker, fence, announcement."""

    def act(folder: RunFolder) -> bool:
        fenced = any(event == "told" for event, _ in log)
        if not folder.is_newest(1):
            return False
        assert not fenced  # whoever was told a number before we asked had fenced us
        folder.objects.create(COMMIT, b"attempt 1")
        if not folder.is_newest(1):
            folder.objects.delete([COMMIT])
            return False
        log.append(("announced", 1))
        return True

    return act


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(order=st.lists(st.integers(0, 2), max_size=40), lives=st.booleans())
def test_numbers_are_given_once_and_fence_all_lower_ones(
    storage: str, order: list[int], lives: bool
) -> None:
    url = f"{storage}/run-1"
    Objects(storage).delete_folder("run-1")
    folder = RunFolder.create(url, "{}", now=NOW)
    assert folder.next_attempt({}) == 1
    log: list[tuple[str, Any]] = []
    actors = [Actor(url, begin_twice("a", log)), Actor(url, begin_twice("b", log))]
    actors.append(Actor(url, haunt(log)))
    for turn in order:
        actors[turn].step()
    for actor in actors[: 3 if lives else 2]:  # a zombie may also never wake again
        while not actor.done:
            actor.step()
    first, second, zombie = (actor.result for actor in actors)
    assert sorted(first + second) == [2, 3, 4, 5]
    assert first == sorted(first)
    for name, numbers in (("a", first), ("b", second)):
        for number in numbers:
            record = folder.read(attempt_key(number))
            assert record is not None
            assert (record["name"], record["attempt"]) == (name, number)
    assert folder.attempts() == [1, 2, 3, 4, 5]
    assert folder.newest_attempt() == 5
    assert [folder.is_newest(n) for n in range(1, 6)] == [False] * 4 + [True]
    if zombie:
        assert ("finds", False) not in log
    if not lives and not actors[2].done:
        actors[2].error = None
        while not actors[2].done:  # so that its thread ends
            actors[2].step()
