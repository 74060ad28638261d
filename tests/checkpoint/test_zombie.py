"""Two writers and attempts that live on after they were replaced."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayway.checkpoint.share import plan_share
from rayway.checkpoint.store import CheckpointStore
from rayway.errors import CheckpointError, StorageError
from rayway.storage.objects import Objects
from rayway.storage.runs import RunFolder

T = TypeVar("T")
FRESH = itertools.count()


class Interrupted(Objects):
    """Objects whose caller is held up once, before a given call, while something else happens."""

    left = -1
    meanwhile: Callable[[], None]

    def _call(self, verb: str, key: str, call: Callable[[str], T], **options: bool) -> T:
        shared = self.shared
        shared.left -= 1
        if shared.left == -1:
            shared.meanwhile()
        return super()._call(verb, key, call, **options)


@dataclass
class Shared:
    """Common to all objects made from one by ``at``."""

    left: int
    meanwhile: Callable[[], None]


def open_store(run: RunFolder, attempt: int) -> CheckpointStore:
    return CheckpointStore(
        run, attempt=attempt, is_newest_attempt=lambda: run.is_newest(attempt), threads=1
    )


def interrupted_store(
    run: RunFolder, attempt: int, left: int, meanwhile: Callable[[], None]
) -> CheckpointStore:
    objects = Interrupted(run.url)
    objects.shared = Shared(10**9, meanwhile)
    store = open_store(RunFolder(objects), attempt)
    objects.shared.left = left
    return store


@pytest.mark.parametrize("act", ["save", "prune"])
def test_an_attempt_replaced_at_any_call_announces_nothing_the_new_one_has_not_seen(
    tmp_path, new_run, state, same, act
) -> None:
    outcomes = set()
    for left in range(60):
        run = new_run(f"memory://{tmp_path}/{act}/{left}/a-1")
        first = run.next_attempt({})
        for step in [3, 6]:
            open_store(run, first).save(step, plan_share(state(step, 1)), {})
        seen: list[int] = []

        def meanwhile(run: RunFolder = run, seen: list[int] = seen) -> None:
            second = run.next_attempt({})
            store = open_store(run, second)
            loaded = store.load_newest(lambda line: None)
            assert loaded is not None
            assert same(loaded.tensors, state(loaded.step, loaded.attempt))
            seen.append(loaded.step)
            store.save(loaded.step + 3, plan_share(state(loaded.step + 3, second)), {})
            store.prune(2, None, loaded.step)
            seen.append(loaded.step + 3)

        zombie = interrupted_store(run, first, 10**9, meanwhile)
        if act == "prune":
            zombie.save(9, plan_share(state(9, 1)), {})
        zombie._objects.shared.left = left
        announced = 9 if act == "prune" else 0
        try:
            if act == "save":
                announced = zombie.save(9, plan_share(state(9, 1)), {}).step
            else:
                zombie.prune(1, None, None)
            outcomes.add("done")
        except StorageError:  # the fence, or its files are gone: pruned by the new attempt
            assert seen, "refused though nobody had replaced it"
            outcomes.add("refused")
        if announced and seen and act == "save":
            assert seen[0] >= announced
        newest = max([announced, 6, *seen[1:]])
        loaded = open_store(run, run.next_attempt({})).load_newest(lambda line: None)
        assert loaded is not None
        assert loaded.step == newest
        assert same(loaded.tensors, state(loaded.step, loaded.attempt))
        for entry in open_store(run, 99).committed():
            found = open_store(run, 99).load(entry.step)
            assert same(found.tensors, state(found.step, found.attempt))
    assert outcomes == {"done", "refused"}


OPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "save", "save", "save", "prune", "cut"]),
        st.integers(0, 3),
        st.integers(1, 4),
        st.integers(0, 40),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@given(OPS, st.sampled_from(["memory", "local"]))
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_two_writers_and_their_zombies_do_nothing_announced_is_lost(
    tmp_path_factory: Any, new_run: Any, state: Any, same: Any, ops: Any, kind: str
) -> None:
    root = tmp_path_factory.getbasetemp() / f"zombies-{next(FRESH)}"
    run = new_run(f"memory://{root}/a-1" if kind == "memory" else f"{root}/a-1")
    act_out(run, state, same, ops)


@pytest.mark.slow
@given(OPS)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_nor_is_it_in_a_bucket(s3: str, new_run: Any, state: Any, same: Any, ops: Any) -> None:
    act_out(new_run(f"{s3}/{next(FRESH)}/a-1"), state, same, ops)


def act_out(run: RunFolder, state: Any, same: Any, ops: Any) -> None:
    """Let writers do what was drawn, and hold what is there against what was announced."""
    writers: list[tuple[int, CheckpointStore]] = []
    at: dict[int, int] = {}
    announced = 0

    def begin() -> None:
        attempt = run.next_attempt({})
        store = open_store(run, attempt)
        loaded = store.load_newest(lambda line: None)
        if loaded is None:
            assert announced == 0
        else:
            assert loaded.step >= announced
            assert same(loaded.tensors, state(loaded.step, loaded.attempt))
        at[attempt] = loaded.step if loaded else 0
        writers.append((attempt, store))

    begin()
    for op, who, much, when in ops:
        attempt, store = writers[-1 - who % len(writers)]
        replaced = attempt != run.newest_attempt()
        if op == "begin":
            begin()
        elif op == "prune":
            try:
                store.prune(much, None, None)
            except CheckpointError:
                assert replaced
        else:
            step = at[attempt] + much
            if op == "cut":
                store = interrupted_store(run, attempt, when, begin)
            try:
                store.save(step, plan_share(state(step, attempt)), {})
                assert not replaced
                announced, at[attempt] = step, step
            except StorageError:
                assert attempt != run.newest_attempt(), "refused though nobody had replaced it"
    for entry in writers[-1][1].committed():
        found = writers[-1][1].load(entry.step)
        assert same(found.tensors, state(found.step, found.attempt))
    begin()
