"""Claim: a save blocks training for at most 0.15 of a copy of the state, and loses none of it.

``python benchmarks/checkpoints.py [--big | --quick]`` takes some 5 minutes on two quiet cores;
``--big`` (200M weights) takes 20 and 16 GB of memory. Checkpoints go to a local folder, ``--at``.
"""

import argparse
import ctypes
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import AdamW

from measure import note, report, spread
from rayway import BatchSpec, CheckpointSpec, DataSpec, Job, ModelSpec, OptimSpec
from rayway.checkpoint.catalog import Committed
from rayway.checkpoint.files import check_same, plan_files, write_share
from rayway.checkpoint.share import Share, plan_share
from rayway.checkpoint.store import CheckpointStore
from rayway.checkpoint.tensors import TensorFile
from rayway.data.index import build_index
from rayway.storage.objects import Objects
from rayway.storage.runs import RunFolder
from rayway.telemetry.events import EventLog, decode
from rayway.train.course import plan_training
from rayway.train.saver import Saver
from rayway.train.state import TrainState

GOALS = {
    "blocked_per_memcpy": 0.15,
    "lost_per_torch_save": 0.35,
    "durable_per_raw_write": 1.1,
    "bytes_per_state": 1.005,
    "restore_per_torch_load": 1.3,
}
METHOD = """\
One process trains a stack of linear layers with fused AdamW in fp32, with one torch thread. Each \
way saves the whole state while training goes on; ways take turns in each repeat, in changing \
order, after dirty pages are written out. blocked_s: the loop stands still, in the call and, for \
rayway, before the next update. lost_s: blocked, and what the steps after it took longer than the \
median of those before, until all is durable. durable_s: from the call until it is fsynced and, \
for rayway, committed. memcpy: into kept buffers, one core. raw_write: as many bytes as the state \
has, from memory into one file, with fsync. restore_s: from files in the page cache into a fresh \
model and optimizer; rayway hashes every byte, the others check nothing. ready_s: and one step, \
which touches every page. hashing: a rank's files written by one thread and read back, with and \
without hashes. Ratios are of neighbouring repeats; at_best: of the smallest figures, to be \
trusted on a busy machine."""


class Layers(nn.Module):
    """A stack of feed-forward layers, 2 * depth * 4 * width * width weights."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                          nn.Linear(4 * width, width))
            for _ in range(depth)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, width) to the same shape."""
        for layer in self.layers:
            x = x + layer(x)
        return x


class Training:
    """A model that trains, one step a call."""

    def __init__(self, width: int, depth: int, rows: int) -> None:
        torch.manual_seed(0)
        model = Layers(width, depth)
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
        self.state = TrainState(model=model, replica=model, optimizer=optimizer)
        self._x = torch.randn(rows, width)

    def step(self) -> float:
        """Make a step and return its seconds."""
        began = time.perf_counter()
        torch.autograd.backward(self.state.model(self._x).square().mean())
        self.state.optimizer.step()
        self.state.optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        return time.perf_counter() - began

    def tensors(self) -> dict[str, Tensor]:
        """Return the state, flat."""
        return {f"{s}/{n}": t for s, part in self.state.tensors().items() for n, t in part.items()}


class Way(Protocol):
    """One way to save a state. One save at a time."""

    def save(self, state: TrainState) -> None:
        """Save, or begin to."""

    def durable_at(self) -> float | None:
        """Return when the last save was durable, by ``perf_counter``; ``None``: not yet."""

    def held_up_s(self) -> float:
        """Return how long updates waited for the last save, once it is durable."""

    def restore(self, state: TrainState) -> None:
        """Take the last save up."""

    def bytes(self) -> int:
        """Return the size of the last save on disk."""


class TimedStore(CheckpointStore):
    """A store that notes when a checkpoint was committed."""

    durable_at: float | None = None

    def save(self, *args: Any) -> Committed | None:
        """Save."""
        committed = super().save(*args)
        self.durable_at = time.perf_counter()
        return committed


class Rayway:
    """A saver, as a run has it."""

    def __init__(self, folder: Path) -> None:
        places = str(folder / "rows")
        pq.write_table(pa.table({"x": list(range(64))}), _fresh(folder / "rows") / "rows.parquet")
        job = Job(
            name="bench",
            model=ModelSpec(build="models.none:build"),
            loss="models.none:loss",
            data=DataSpec(train=places),
            batch=BatchSpec(global_batch=8),
            optim=OptimSpec(lr=1e-4, steps=10**6),
            checkpoint=CheckpointSpec(keep_last=1),
        )
        self._run = RunFolder.create(str(folder / "run"), "{}", now=datetime.now(UTC))
        attempt = self._run.next_attempt({})
        self._lines = bytearray()
        self._log = EventLog(self._lines.extend, flush_s=0.01)
        self._store = TimedStore(
            self._run, attempt=attempt, is_newest_attempt=lambda: self._run.is_newest(attempt)
        )
        plan = plan_training(job, [build_index(places)])
        self._saver = Saver(self._store, self._log, job=job, plan=plan, writes=True)

    def save(self, state: TrainState) -> None:
        """Begin to save."""
        self._store.durable_at = None
        self._saver.save(state)

    def durable_at(self) -> float | None:
        """Return when it was committed."""
        return self._store.durable_at

    def held_up_s(self) -> float:
        """Return how long updates waited, beyond the call."""
        self._saver.finish()
        self._log.flush()
        event = [r for r in decode(bytes(self._lines)).records if r["type"] == "checkpoint"][-1]
        return float(event["update_waited_s"])

    def restore(self, state: TrainState) -> None:
        """Take the newest checkpoint up."""
        loaded = self._store.load_newest(on_skip=note)
        assert loaded is not None
        state.restore(loaded.tensors, loaded.step)

    def bytes(self) -> int:
        """Return the size of all files of the newest checkpoint."""
        folder = self._run.checkpoints.folders()[-1]
        return sum(info.bytes for info in self._run.checkpoints.at(folder).list())


class TorchSave:
    """One file, written while training waits."""

    def __init__(self, folder: Path) -> None:
        self._path = _fresh(folder) / "state.pt"
        self._durable_at = 0.0

    def save(self, state: TrainState) -> None:
        """Save."""
        with self._path.open("wb") as file:
            torch.save(state.tensors(), file)
            file.flush()
            os.fsync(file.fileno())
        self._durable_at = time.perf_counter()

    def durable_at(self) -> float | None:
        """Return when it was fsynced."""
        return self._durable_at

    def held_up_s(self) -> float:
        """Return 0: the call was all."""
        return 0.0

    def restore(self, state: TrainState) -> None:
        """Take the file up, mapped into memory."""
        state.restore(torch.load(self._path, mmap=True, weights_only=True), state.step)

    def bytes(self) -> int:
        """Return the size of the file."""
        return self._path.stat().st_size


class Dcp:
    """torch.distributed.checkpoint, a folder for each save."""

    def __init__(self, folder: Path, *, background: bool) -> None:
        self._folder = _fresh(folder)
        self._background = background
        self._saves = 0
        self._durable_at: float | None = None

    def save(self, state: TrainState) -> None:
        """Save, or begin to."""
        self._saves += 1
        self._durable_at = None
        writer = FileSystemWriter(self._path())
        if self._background:
            future = async_save(state.tensors(), storage_writer=writer)
            assert isinstance(future, Future)
            future.add_done_callback(self._note)
        else:
            save(state.tensors(), storage_writer=writer)
            self._durable_at = time.perf_counter()
        shutil.rmtree(self._folder / str(self._saves - 1), ignore_errors=True)

    def _note(self, future: Future[Any]) -> None:
        future.result()
        self._durable_at = time.perf_counter()

    def _path(self) -> Path:
        return self._folder / str(self._saves)

    def durable_at(self) -> float | None:
        """Return when all was fsynced."""
        return self._durable_at

    def held_up_s(self) -> float:
        """Return 0: the call was all."""
        return 0.0

    def restore(self, state: TrainState) -> None:
        """Fill tensors as large as the saved ones, and take them up."""
        reader = FileSystemReader(self._path())
        into: dict[str, dict[str, Tensor]] = {}
        for key, told in reader.read_metadata().state_dict_metadata.items():
            assert isinstance(told, TensorStorageMetadata)
            stem, _, name = key.partition(".")
            into.setdefault(stem, {})[name] = torch.empty(told.size, dtype=told.properties.dtype)
        load(into, storage_reader=reader)
        state.restore(into, state.step)

    def bytes(self) -> int:
        """Return the size of all files."""
        return sum(path.stat().st_size for path in self._path().iterdir())


def time_save(training: Training, way: Way) -> dict[str, float]:
    """Save once while training goes on, and return what it cost."""
    os.sync()
    usual = statistics.median(training.step() for _ in range(4))
    began = time.perf_counter()
    way.save(training.state)
    called_s = time.perf_counter() - began
    steps, over = [training.step(), training.step()], 0
    while (durable_at := way.durable_at()) is None:
        steps.append(training.step())
        over += 1
    lost_s = called_s + sum(step - usual for step in steps)
    return {
        "blocked_s": called_s + way.held_up_s(),
        "lost_s": lost_s,
        "durable_s": durable_at - began,
        "usual_step_s": usual,
    }


def time_memcpy(tensors: dict[str, Tensor], kept: dict[str, Tensor]) -> float:
    """Copy the state into kept buffers on one core."""
    began = time.perf_counter()
    for name, tensor in tensors.items():
        ctypes.memmove(kept[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return time.perf_counter() - began


def time_raw_write(kept: dict[str, Tensor], path: Path) -> float:
    """Write as many bytes as the state has into one file, and make it durable."""
    os.sync()
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for tensor in kept.values():
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), 8 << 20):
                file.write(data[start : start + (8 << 20)])
        os.fsync(file.fileno())
    return time.perf_counter() - began


def time_files(state: TrainState, folder: Path, *, hashed: bool) -> float:
    """Write a rank's files and read them back, with or without hashes."""
    objects = Objects(str(_fresh(folder)))
    share = plan_share(state.tensors())
    os.sync()
    began = time.perf_counter()
    if hashed:
        write_share(objects, share, threads=1)
    else:
        for file, names in plan_files(share).items():
            _write_bare(objects, share, file, names)
    return time.perf_counter() - began


def _write_bare(objects: Objects, share: Share, file: str, names: list[str]) -> None:
    content = TensorFile({name.partition("/")[2]: share.tensors[name] for name in names})
    objects.put(file, Pieces(content))
    check_same(objects, file, content.pieces())


class Pieces:
    """A file's bytes without their hash."""

    def __init__(self, content: TensorFile) -> None:
        self._content = content

    def __iter__(self) -> Iterator[memoryview]:
        return self._content.pieces()


def time_restore(way: Way, new: Callable[[], Training]) -> dict[str, float]:
    """Take the last save up into a fresh model, and make a step."""
    training = new()
    began = time.perf_counter()
    way.restore(training.state)
    restored = time.perf_counter()
    training.step()
    return {"restore_s": restored - began, "ready_s": time.perf_counter() - began}


def measure(new: Callable[[], Training], folder: Path, *, repeats: int) -> dict[str, Any]:
    """Let all ways take turns, and return the figures of all."""
    training = new()
    training.step()
    state_bytes = sum(tensor.nbytes for tensor in training.tensors().values())
    kept = {name: torch.zeros_like(tensor) for name, tensor in training.tensors().items()}
    ways: dict[str, Way] = {
        "rayway": Rayway(folder / "rayway"),
        "torch_save": TorchSave(folder / "torch_save"),
        "dcp": Dcp(folder / "dcp", background=False),
        "dcp_async": Dcp(folder / "dcp_async", background=True),
    }
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    plain: dict[str, list[float]] = {"memcpy_s": [], "raw_write_s": [], "hashed": [], "bare": []}
    for number in range(repeats + 1):
        order = list(ways.items())
        for name, way in order if number % 2 else reversed(order):
            figures = time_save(training, way)
            figures |= time_restore(way, new)
            taken[name].append(figures)
            note(f"{name}: { ({k: round(v, 3) for k, v in figures.items()}) }")
        plain["memcpy_s"].append(time_memcpy(training.tensors(), kept))
        plain["raw_write_s"].append(time_raw_write(kept, folder / "raw"))
        for name in ("hashed", "bare") if number % 2 else ("bare", "hashed"):
            plain[name].append(
                time_files(training.state, folder / "files", hashed=name == "hashed")
            )
        note(f"plain: { ({name: round(values[-1], 3) for name, values in plain.items()}) }")
    for figures_of_way in taken.values():
        del figures_of_way[0]  # the first pays for buffers and for files that are new
    for values in plain.values():
        del values[0]
    return {
        "weights": sum(weight.numel() for weight in training.state.model.parameters()),
        "state_bytes": state_bytes,
        "bytes_per_state": {
            name: round(way.bytes() / state_bytes, 5) for name, way in ways.items()
        },
        "blocked_per_memcpy": _ratios(taken, "blocked_s", plain["memcpy_s"]),
        "lost_per_torch_save": _ratios(
            taken, "lost_s", [f["blocked_s"] for f in taken["torch_save"]]
        ),
        "durable_per_raw_write": _ratios(taken, "durable_s", plain["raw_write_s"]),
        "restore_per_torch_load": _ratios(
            taken, "restore_s", [f["restore_s"] for f in taken["torch_save"]]
        ),
        "ready_per_torch_load": _ratios(
            taken, "ready_s", [f["ready_s"] for f in taken["torch_save"]]
        ),
        "hashing_per_bare_write": spread(
            [a / b for a, b in zip(plain["hashed"], plain["bare"], strict=True)]
        ),
        **{name: spread(plain[name]) for name in ("memcpy_s", "raw_write_s")},
        **{
            name: {key: spread([f[key] for f in figures]) for key in figures[0]}
            for name, figures in taken.items()
        },
    }


def _ratios(
    taken: dict[str, list[dict[str, float]]], key: str, to: list[float]
) -> dict[str, dict[str, Any]]:
    """Return each way's ratio of a figure to another one of the same repeat."""
    return {
        name: {
            **spread([f[key] / base for f, base in zip(figures, to, strict=True)]),
            "at_best": round(min(f[key] for f in figures) / min(to), 4),
        }
        for name, figures in taken.items()
    }


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one repeat")
    parser.add_argument("--big", action="store_true", help="200M weights instead of 50M")
    parser.add_argument("--repeats", type=int, help="[7; --big: 3; --quick: 1]")
    parser.add_argument("--rows", type=int, default=48, help="of a batch: how long a step takes")
    parser.add_argument("--at", help="a folder on the disk to measure [the system's scratch]")
    asked = parser.parse_args()
    width, depth, repeats = (512, 24, 7)
    if asked.big:
        width, depth, repeats = (1024, 24, 3)
    if asked.quick:
        width, depth, repeats = (64, 2, 1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=asked.at) as scratch:
        meeting = f"file://{scratch}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)  # for async DCP
        results = measure(
            lambda: Training(width, depth, asked.rows),
            Path(scratch),
            repeats=asked.repeats or repeats,
        )
        dist.destroy_process_group()
    report(
        "checkpoints", method=METHOD, packages=["torch"], goals=GOALS, quick=asked.quick, **results
    )


if __name__ == "__main__":
    main()
