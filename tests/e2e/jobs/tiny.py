"""A job for tests: seconds long, with dropout, and with faults on request.

``model.args.faults`` is a list of ``{"kind", "rank", "call", "once"}``: at its ``call``-th training
forward pass the process of that rank does what ``kind`` says, unless the file ``once`` is there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayway import BatchSpec, CheckpointSpec, DataSpec, Job, Loss, ModelSpec, OptimSpec, ScaleSpec
from rayway.data.transforms import SampleRng

ROWS, SHARDS = 120, 5


def prepare(folder: str) -> None:
    """Write rows whose label follows from their id."""
    for name, rows in (("train", ROWS), ("validation", 37)):
        target = Path(folder) / name
        target.mkdir(parents=True)
        for shard, ids in enumerate(np.array_split(np.arange(rows), SHARDS)):
            x = np.random.default_rng(ids).normal(size=(len(ids), 8)).astype("float32")
            x[:, 0] += 2.0 * (ids % 4)
            table = pa.table(
                {
                    "id": ids,
                    "x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 8),
                    "y": ids % 4,
                }
            )
            pq.write_table(table, target / f"part-{shard}.parquet", row_group_size=7)


class Net(nn.Module):
    """8 -> 32 -> 4 with dropout."""

    def __init__(self, sleep_s: float, faults: list[dict[str, object]]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
        self.sleep_s = sleep_s
        self.faults = faults
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (rows, 4)."""
        if self.training:
            self.calls += 1
            time.sleep(self.sleep_s)
            for fault in self.faults:
                if fault["call"] == self.calls and str(fault["rank"]) == os.environ.get(
                    "RANK", "0"
                ):
                    cause(fault)
        return self.layers(x)


def cause(fault: dict[str, object]) -> None:
    """Do what a fault says, once."""
    once = Path(str(fault["once"]))
    if once.exists():
        return
    once.touch()
    if fault["kind"] == "raise":
        raise ValueError("a fault of the test")
    if fault["kind"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)


def build(
    sleep_s: float = 0.0, faults: list[dict[str, object]] | None = None, fail: bool = False
) -> nn.Module:
    """Build the network, or raise."""
    if fail:
        raise RuntimeError("this builder does not build")
    return Net(sleep_s, faults or [])


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Cross entropy and accuracy."""
    logits = model(batch["x"])
    return Loss(
        sum=functional.cross_entropy(logits, batch["y"], reduction="sum"),
        weight=len(logits),
        metrics={"accuracy": ((logits.argmax(1) == batch["y"]).sum(), len(logits))},
    )


def jitter(columns: dict[str, np.ndarray], rng: SampleRng) -> dict[str, np.ndarray]:
    """Move each row by draws of its own; for evaluation, only as far as the mean draw."""
    moved = rng.uniform(0) if rng.training else np.full(len(columns["x"]), 0.5)
    return {**columns, "x": columns["x"] + moved[:, None].astype("float32")}


def stumbles(columns: dict[str, np.ndarray], rng: SampleRng) -> dict[str, np.ndarray]:
    """Fail for the row with id 61."""
    if (columns["id"] == 61).any():
        raise ValueError("no such label")
    return columns


def bare_number(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What a loss must not be: a mean, and no Loss."""
    return model(batch["x"]).mean()


def leaves(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """A loss that ends the program as if all were done."""
    sys.exit(0)


def not_a_number(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """A loss that leaves the numbers in its first step."""
    return Loss(sum=model(batch["x"]).sum() * torch.nan, weight=len(batch["y"]))


job = Job(
    name="tiny",
    model=ModelSpec(build=build),
    loss=loss,
    data=DataSpec(train="data/train", validation="data/validation", prepare=prepare),
    batch=BatchSpec(global_batch=8),
    optim=OptimSpec(lr=1e-2, steps=24, warmup_steps=4),
    checkpoint=CheckpointSpec(every_steps=5),
    scale=ScaleSpec(workers=2),
    trace=True,
)
