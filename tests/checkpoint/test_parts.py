"""Several ranks save one checkpoint. They are threads here: nothing but the storage joins them."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from rayway.checkpoint import catalog
from rayway.checkpoint.boxes import Box, shard_box
from rayway.checkpoint.catalog import Committed
from rayway.checkpoint.share import Outline, Share, plan_share
from rayway.checkpoint.store import CheckpointStore
from rayway.checkpoint.tensors import dtype_name, weights_sha256
from rayway.errors import CheckpointError, StorageError
from rayway.storage.objects import Objects
from rayway.storage.runs import RunFolder

FOLDER = "step-00000005.attempt-001"
State = dict[str, dict[str, Tensor]]


def open_stores(run: RunFolder, ranks: int, **options: Any) -> list[CheckpointStore]:
    attempt = run.next_attempt({})
    return [
        CheckpointStore(
            run,
            attempt=attempt,
            is_newest_attempt=lambda: run.is_newest(attempt),
            rank=rank,
            world_size=ranks,
            **options,
        )
        for rank in range(ranks)
    ]


def dealt(state: State, rank: int, ranks: int) -> Share:
    """The share of a rank if all ranks have all tensors."""
    equal = {f"{stem}/{name}" for stem, part in state.items() for name in part}
    return plan_share(state, rank=rank, world_size=ranks, replicated=equal)


def cut(state: State, rank: int, ranks: int) -> Share:
    """The share of a rank if all tensors are cut along their first or second dimension."""
    flat = {f"{stem}/{name}": t for stem, part in state.items() for name, t in part.items()}
    outlines, boxes = {}, {}
    for number, (name, tensor) in enumerate(flat.items()):
        dims = tensor.ndim
        axes = [(number % min(dims, 2), ranks, rank)] if dims else []
        outlines[name] = Outline(
            dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), cut=dims > 0
        )
        box = shard_box(tensor.shape, axes)
        if box.volume and (dims or rank == 0):
            boxes[name] = box
    return Share(
        rank=rank,
        world_size=ranks,
        outlines=outlines,
        aliases={},
        boxes=boxes,
        tensors={
            name: flat[name][box.slices_in(Box.whole(flat[name].shape))].contiguous()
            for name, box in boxes.items()
        },
    )


def save_together(
    stores: list[CheckpointStore],
    share_of: Callable[[int], Share],
    *,
    step: int = 5,
    late: dict[int, float] | None = None,
) -> list[Committed | Exception | None]:
    """Save on all ranks at once; return what each returned or raised."""

    def save(store: CheckpointStore) -> Committed | Exception | None:
        time.sleep((late or {}).get(store.rank, 0.0))
        try:
            return store.save(step, share_of(store.rank), {"step": step})
        except StorageError as error:
            return error

    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(save, stores))


@pytest.mark.parametrize("split", [dealt, cut])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_state_that_ranks_save_together_is_whole(run, state, same, ranks, split) -> None:
    whole = state(5)
    whole["model"]["wide"] = torch.rand(3, 70)
    for late in ({}, {0: 0.1}, {ranks - 1: 0.1}):
        stores = open_stores(run, ranks, patience_s=20)
        first, *others = save_together(stores, lambda rank: split(whole, rank, ranks), late=late)
        assert isinstance(first, Committed)
        assert others == [None] * (ranks - 1)
        assert first.weights_sha256 == weights_sha256(whole["model"])
        loaded = stores[-1].load(5)
        assert same(loaded.tensors, whole)
        assert loaded.facts == {"step": 5}
        found = catalog.find(run)[-1]
        manifest = catalog.verify(run, found)
        assert manifest.world_size == ranks
        keys = {info.key for info in run.checkpoints.at(found.folder).list()}
        assert keys == {entry.name for entry in manifest.files} | {"manifest.json", "COMMITTED"}


def test_large_states_go_into_several_files(run, same) -> None:
    draw = random.Random(1)
    whole = {
        stem: {f"w{i}": torch.rand(draw.randrange(1, 400)) for i in range(40)}
        for stem in ("model", "optimizer")
    }
    stores = open_stores(run, 2, patience_s=20, file_bytes=2000)
    save_together(stores, lambda rank: dealt(whole, rank, 2))
    assert same(stores[0].load(5).tensors, whole)
    names = [info.key for info in run.checkpoints.at(FOLDER).list()]
    assert "rank-00001.optimizer-3.safetensors" in names
    sizes = [info.bytes for info in run.checkpoints.at(FOLDER).list() if "rank" in info.key]
    assert max(sizes) < 2000 + 1600 + 3000  # one tensor more, and the header


def test_a_rank_that_does_not_come_makes_the_save_fail_not_hang(run, state) -> None:
    stores = open_stores(run, 3, patience_s=0.3)
    began = time.monotonic()
    first, second = save_together(stores[:2], lambda rank: dealt(state(5), rank, 3))
    assert isinstance(first, StorageError)
    assert second is None
    assert "rank-00002.json was not there after 0 s: its rank did not store its part" in str(first)
    assert time.monotonic() - began < 10
    assert stores[0].committed() == []


@pytest.mark.parametrize("split", [dealt, cut])
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_rank_that_fails_lets_the_others_know(tmp_path, new_run, state, fails, split) -> None:
    class Full(Objects):
        """A disk on which one rank has no room."""

        def put(self, key: str, data: Any) -> None:
            if f"rank-{fails:05d}" in key and key.endswith("safetensors"):
                raise StorageError("no space left")
            super().put(key, data)

    run = new_run(Full(str(tmp_path / "a-1")))
    began = time.monotonic()
    outcomes = save_together(
        open_stores(run, 3, patience_s=60), lambda rank: split(state(5), rank, 3)
    )
    assert time.monotonic() - began < 10
    assert str(outcomes[fails]) == "no space left"
    if fails:
        assert f"rank {fails} could not store its part: StorageError: no space" in str(outcomes[0])
    assert catalog.committed(run) == []


def test_what_failed_saves_leave_goes_after_the_next_good_one(run, state) -> None:
    stores = open_stores(run, 2, patience_s=0.2)
    save_together(stores[:1], lambda rank: dealt(state(5), rank, 2))
    save_together(stores[1:], lambda rank: dealt(state(5), rank, 2))
    assert run.checkpoints.folders() == [FOLDER]
    assert save_together(stores, lambda rank: dealt(state(6), rank, 2), step=6)[0] is not None
    assert stores[0].prune(3, None, None) == [FOLDER]


def test_ranks_that_have_different_states_are_refused(run, state) -> None:
    other = state(5)
    other["optimizer"]["surplus"] = torch.zeros(3)
    states = {0: state(5), 1: other}
    first, _ = save_together(
        open_stores(run, 2, patience_s=5), lambda rank: dealt(states[rank], rank, 2)
    )
    assert isinstance(first, CheckpointError)
    assert "rank 1 has other tensors to save than rank 0" in str(first)
    assert catalog.committed(run) == []


def test_a_part_of_another_save_is_refused(run, state) -> None:
    stores = open_stores(run, 2, patience_s=5)
    assert stores[1].save(5, dealt(state(5), 1, 2), {}) is None
    part = run.checkpoints.get(f"{FOLDER}/rank-00001.json")
    run.checkpoints.put("step-00000006.attempt-001/rank-00001.json", part)
    with pytest.raises(CheckpointError, match=r"rank-00001\.json is that of another save"):
        stores[0].save(6, dealt(state(6), 0, 2), {})


def test_a_damaged_part_is_refused(run, state) -> None:
    stores = open_stores(run, 2, patience_s=5)
    stores[1].save(5, dealt(state(5), 1, 2), {})
    key = f"{FOLDER}/rank-00001.json"
    data = bytearray(run.checkpoints.get(key))
    data[data.index(b"sha256") + 20] ^= 1
    run.checkpoints.put(key, bytes(data))
    with pytest.raises(CheckpointError, match=r"rank-00001\.json is not as written"):
        stores[0].save(5, dealt(state(5), 0, 2), {})


def test_files_of_an_earlier_try_are_not_committed(run, state, same) -> None:
    folder = run.checkpoints.at(FOLDER)
    for key in ("rank-00001.old-0.safetensors", "loss=0.3.safetensors", "rank-00001.json"):
        folder.put(key, b"of an earlier try")
    outcomes = save_together(
        open_stores(run, 2, patience_s=5), lambda rank: dealt(state(5), rank, 2), late={0: 0.1}
    )
    assert isinstance(outcomes[0], Committed)
    [found] = catalog.find(run)
    catalog.verify(run, found)


def test_a_save_in_a_hurry_waits_no_longer(run, state) -> None:
    store = open_stores(run, 2, patience_s=60)[0]
    hurry = threading.Timer(0.1, store.hurry, [0.1])
    hurry.start()
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"rank-00001\.json was not there"):
        store.save(5, dealt(state(5), 0, 2), {})
    assert time.monotonic() - began < 5


@pytest.fixture
def slow_first(tmp_path, new_run) -> Iterator[RunFolder]:
    """A storage that has room for one file at a time, and takes the first rank last."""

    class Slow(Objects):
        def put(self, key: str, data: Any) -> None:
            if "rank-00000" in key:
                time.sleep(0.2)
            super().put(key, data)

    return new_run(Slow(str(tmp_path / "a-1")))


def test_ranks_save_at_their_own_pace(slow_first, state, same) -> None:
    stores = open_stores(slow_first, 3, patience_s=20)
    for step in (5, 6):
        outcomes = save_together(
            stores, lambda rank, step=step: cut(state(step), rank, 3), step=step
        )
        assert isinstance(outcomes[0], Committed), outcomes
        assert same(stores[1].load(step).tensors, state(step))
