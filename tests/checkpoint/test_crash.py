"""Stop a run's storage work after each single call, and after each single call of the disk.

Whatever the moment, recovery finds the newest announced checkpoint or a newer whole one, never a
half one, and the run can go on to its end.
"""

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pytest

from rayway.checkpoint import catalog
from rayway.checkpoint.catalog import Committed
from rayway.checkpoint.share import plan_share
from rayway.checkpoint.store import CheckpointStore
from rayway.storage.disk import Disk
from rayway.storage.local import LocalFolder
from rayway.storage.objects import Objects
from rayway.storage.runs import RunFolder

T = TypeVar("T")
KEEP = 2


class PowerCut(BaseException):
    """The end of the process. No ``except Exception`` outlives it."""


@dataclass
class Fuse:
    """Lets so many calls pass; the next one and all later ones end the process."""

    calls: float
    used: int = 0
    blown: bool = False

    def burn(self) -> None:
        if self.blown or self.used >= self.calls:
            self.blown = True
            raise PowerCut
        self.used += 1


class Idle(Disk):
    """A disk that saves the time of syncing, for tests in which the machine keeps its power."""

    def sync_file(self, file: BinaryIO) -> None:
        file.flush()

    def sync_folder(self, path: Path) -> None:
        path.stat()


class FusedObjects(Objects):
    """Objects whose process ends before, or just after, a given call."""

    fuse: Fuse
    after = False

    def _call(self, verb: str, key: str, call: Callable[[str], T], **options: bool) -> T:
        if self.after and not self.fuse.blown:
            answer = super()._call(verb, key, call, **options)
            with ExitStack() as ending:
                if isinstance(answer, BufferedReader):
                    ending.callback(answer.close)  # as the end of a process does
                self.fuse.burn()
                ending.pop_all()
            return answer
        self.fuse.burn()
        return super()._call(verb, key, call, **options)


@dataclass
class Told:
    """What a run has announced, and what it has asked to be deleted."""

    committed: list[int] = field(default_factory=list)


def open_stores(run: RunFolder, ranks: int) -> list[CheckpointStore]:
    """Begin an attempt; return the store of each rank."""
    attempt = run.next_attempt({})
    return [
        CheckpointStore(
            run,
            attempt=attempt,
            is_newest_attempt=lambda: run.is_newest(attempt),
            rank=rank,
            world_size=ranks,
            patience_s=0,
            threads=1,
            clock=lambda: 0.0,
        )
        for rank in range(ranks)
    ]


def save(stores: list[CheckpointStore], step: int, state: Any, facts: Any) -> Committed:
    """Save as all ranks, rank 0 last: it finds the parts of the others and waits for none."""
    equal = {f"{stem}/{name}" for stem, named in state.items() for name in named}
    for store in reversed(stores):
        share = plan_share(state, rank=store.rank, world_size=len(stores), replicated=equal)
        committed = store.save(step, share, facts)
    assert committed is not None
    return committed


def live(run: RunFolder, state: Callable[[int], Any], told: Told, *, ranks: int) -> None:
    """Two attempts of a run, the second going on from what the first left."""
    for steps in ([3, 6, 9], [12]):
        stores = open_stores(run, ranks)
        loaded = stores[0].load_newest(lambda line: None)
        for step in steps:
            told.committed.append(save(stores, step, state(step), {"step": step}).step)
            stores[0].prune(KEEP, None, in_use=loaded.step if loaded else None)


def check_recovery(
    run: RunFolder,
    state: Callable[[int], Any],
    same: Callable[..., bool],
    told: Told,
    *,
    ranks: int = 1,
) -> None:
    """Recover, hold what is found against what was told, and train on to a clean end."""
    stores = open_stores(run, ranks)
    store = stores[0]
    loaded = store.load_newest(lambda line: None)
    newest = max(told.committed, default=0)
    if loaded is None:
        assert not told.committed
    else:
        assert loaded.step in {newest, newest + 3}
        assert same(loaded.tensors, state(loaded.step))
        assert loaded.facts == {"step": loaded.step}
    for step in told.committed[-KEEP:]:
        assert same(store.load(step).tensors, state(step))
    for entry in catalog.find(run):
        if entry.marker or entry.problem:
            catalog.verify(run, entry)
    for step in (30, 33):
        save(stores, step, state(step), {})
        store.prune(KEEP, None, in_use=None)
    assert [entry.step for entry in store.committed()] == [30, 33]
    assert len(run.checkpoints.folders()) == KEEP


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before a call", "after a call"])
@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_stopping_at_any_call_to_storage_loses_nothing(
    tmp_path, new_run, state, same, ranks, kind, after
) -> None:
    def objects(n: int) -> Objects:
        if kind == "memory":
            return FusedObjects(f"memory://{tmp_path}/{n}/a-1")
        root = tmp_path / f"{n}/a-1"
        return FusedObjects(str(root), folder=LocalFolder(root, disk=Idle()))

    points = 0
    while True:
        at, told = objects(points), Told()
        at.fuse = Fuse(float("inf"))
        run = new_run(at)
        at.fuse.calls, at.fuse.used, at.after = points, 0, after
        try:
            live(run, state, told, ranks=ranks)
        except PowerCut:
            at.fuse = Fuse(float("inf"))
            check_recovery(RunFolder(at), state, same, told, ranks=ranks)
            if kind == "memory":  # whose listing takes longer the more there is in all
                Objects(f"memory://{tmp_path}").delete_folder(str(points))
            points += 1
        else:
            break
    assert told.committed == [3, 6, 9, 12]
    assert points > {1: 100, 3: 180}[ranks]


class PowerCutDisk(Disk):
    """A disk that forgets what was not synced, and keeps a record of what was.

    A file's bytes are safe once it is synced, a name once its folder is. What happens to the rest
    is up to the machine: all, nothing or any part of it may be there after the cut.
    """

    def __init__(self, root: Path, fuse: Fuse) -> None:
        self.fuse = fuse
        self.root = root
        self.files = 0
        self.names: dict[Path, int | None] = {}  # a file's number; None for a folder
        self.safe_names: dict[Path, int | None] = {}
        self.safe_bytes: dict[int, bytes] = {}

    def create_file(self, path: Path) -> BinaryIO:
        self.fuse.burn()
        file = super().create_file(path)
        self.files += 1
        self.names[path] = self.files
        return file

    def sync_file(self, file: BinaryIO) -> None:
        self.fuse.burn()
        file.flush()
        number = self.names[Path(file.name)]
        assert number is not None
        self.safe_bytes[number] = Path(file.name).read_bytes()

    def sync_folder(self, path: Path) -> None:
        self.fuse.burn()
        path.stat()
        inside = {name: number for name, number in self.names.items() if name.parent == path}
        self.safe_names = {
            name: number for name, number in self.safe_names.items() if name.parent != path
        } | inside

    def rename(self, source: Path, target: Path) -> None:
        self.fuse.burn()
        super().rename(source, target)
        self.names[target] = self.names.pop(source)

    def link(self, source: Path, target: Path) -> None:
        self.fuse.burn()
        super().link(source, target)
        self.names[target] = self.names[source]

    def remove_file(self, path: Path) -> None:
        self.fuse.burn()
        super().remove_file(path)
        self.names.pop(path, None)

    def create_folder(self, path: Path) -> None:
        self.fuse.burn()
        super().create_folder(path)
        self.names.setdefault(path, None)

    def remove_folder(self, path: Path) -> None:
        self.fuse.burn()
        super().remove_folder(path)
        self.names.pop(path, None)

    def restart(self, to: Path, draw: random.Random, unsynced: str) -> None:
        """Write what the machine finds after the cut into another folder."""
        names = dict(self.safe_names)
        for name in self.names.keys() | self.safe_names.keys():
            if self.names.get(name, 0) != self.safe_names.get(name, 0):
                keeps = unsynced == "kept" or (unsynced == "torn" and draw.random() < 0.5)
                if keeps and name in self.names:
                    names[name] = self.names[name]
                elif keeps:
                    names.pop(name)
        to.mkdir(parents=True)
        for name, number in sorted(names.items()):
            place = to / name.relative_to(self.root)
            if not place.parent.is_dir():
                continue  # the folder itself was lost
            if number is None:
                place.mkdir(exist_ok=True)
            elif number in self.safe_bytes:
                place.write_bytes(self.safe_bytes[number])
            elif unsynced == "kept":
                place.write_bytes(name.read_bytes())
            else:
                place.write_bytes(draw.choice([b"", bytes(4096), b'{"schema": 1']))


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before a call", "after a call"])
def test_stopping_at_calls_to_a_bucket_loses_nothing(new_run, state, same, s3, after) -> None:
    """Each call takes milliseconds there, so it is every fourth."""
    points, done = int(after), False
    while not done:
        at, told = FusedObjects(f"{s3}/{points}/a-1"), Told()
        at.fuse = Fuse(float("inf"))
        run = new_run(at)
        at.fuse.calls, at.fuse.used, at.after = points, 0, after
        try:
            live(run, state, told, ranks=1)
            done = True
        except PowerCut:
            at.fuse = Fuse(float("inf"))
            check_recovery(RunFolder(at), state, same, told)
            points += 4
    assert told.committed == [3, 6, 9, 12]
    assert points > 100


@pytest.mark.slow
@pytest.mark.parametrize("unsynced", ["lost", "torn", "torn again", "kept"])
def test_a_power_cut_at_any_call_to_the_disk_loses_nothing(
    tmp_path, new_run, state, same, unsynced
) -> None:
    points = 0
    while True:
        root, told, fuse = tmp_path / f"{points}/before", Told(), Fuse(float("inf"))
        root.mkdir(parents=True)
        disk = PowerCutDisk(root, fuse)
        run = new_run(Objects(str(root / "a-1"), folder=LocalFolder(root / "a-1", disk=disk)))
        fuse.calls, fuse.used = points, 0
        try:
            live(run, state, told, ranks=1)
        except PowerCut:
            after = tmp_path / f"{points}/after"
            draw = random.Random(f"{unsynced} {points}")
            disk.restart(after, draw, unsynced.removesuffix(" again"))
            folder = LocalFolder(after / "a-1", disk=Idle())
            recovered = RunFolder(Objects(str(after / "a-1"), folder=folder))
            check_recovery(recovered, state, same, told)
            points += 1
        else:
            break
    assert told.committed == [3, 6, 9, 12]
    assert points > 120
