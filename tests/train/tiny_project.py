"""A user's project, small: a model, a loss, a transform, rows, and runs of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayway.data.index import build_index
from rayway.spec.job import (
    BatchSpec,
    CheckpointSpec,
    DataSpec,
    Job,
    ModelSpec,
    OptimSpec,
    ScaleSpec,
)
from rayway.spec.load import Resolved, job_to_json
from rayway.storage.runs import RunFolder, attempt_key, error_key, events_key
from rayway.telemetry.events import Record, decode
from rayway.train.run_data import RunData, write_run_data
from rayway.train.worker import RankTask, run_rank

USER_CODE = '''
"""A user's code. A line of the file ``faults`` is the forward pass in which a life fails."""

import fcntl
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rayway.train.loss import Loss

FAULTS = Path(__file__).with_name("faults")


class Net(nn.Module):
    def __init__(self, dropout, noise):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)
        )
        self.noise, self.calls, self.fails_at = noise, 0, None
        if FAULTS.exists():
            with FAULTS.open("r+") as faults:
                fcntl.flock(faults, fcntl.LOCK_EX)  # ranks come at the same time
                first, *rest = [*faults.read().split(), "0"]
                faults.seek(0)
                faults.truncate()
                faults.write(" ".join(rest))
            self.fails_at = int(first)

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls == self.fails_at:
                raise ValueError("a fault of the test")
            x = x + self.noise * (random.random() + np.random.random() - 1)
        return self.layers(x)


def build(dropout=0.0, noise=0.0):
    return Net(dropout, noise)


def loss(model, batch):
    logits = model(batch["x"])
    each = functional.cross_entropy(logits.float(), batch["y"], reduction="none")
    right = (logits.argmax(1) == batch["y"]).sum()
    metrics = {"accuracy": (right, len(each))}
    return Loss(sum=(each * batch["w"]).sum(), weight=batch["w"].sum(), metrics=metrics)


def broken(model, batch):
    return loss(model, batch)._replace(sum=model(batch["x"]).sum() * float("nan"))


def in_bf16(model, batch):
    assert model(batch["x"]).dtype == torch.bfloat16
    return loss(model, batch)


def jitter(columns, rng):
    x = columns["x"] + 0.3 * rng.uniform(0).astype("float32")[:, None]
    return {**columns, "x": x}
'''


@dataclass(frozen=True)
class Lives:
    """What a run's folder says of it."""

    folder: RunFolder

    def events(self, attempt: int, kind: str) -> list[Record]:
        """Return the events of one kind of one attempt."""
        log = decode(self.folder.objects.get(events_key(attempt, 0)))
        return [record for record in log.records if record["type"] == kind]

    def steps(self, name: str = "loss_hex") -> list[Any]:
        """Return a value of each step; of the steps that lives share, the last one's."""
        steps: dict[int, Any] = {}
        for attempt in self.folder.attempts():
            start = self.events(attempt, "start")[0]["from_step"]
            steps = {step: value for step, value in steps.items() if step <= start}
            steps |= {record["step"]: record[name] for record in self.events(attempt, "step")}
        assert list(steps) == list(range(1, len(steps) + 1))
        return list(steps.values())

    def end(self) -> Record:
        """Return how the newest attempt ended."""
        record = self.folder.read(attempt_key(self.folder.newest_attempt(), "end.json"))
        assert record is not None
        return record

    def error(self, attempt: int, rank: int = 0) -> Record:
        """Return what ended a rank early."""
        record = self.folder.read(error_key(attempt, rank))
        assert record is not None
        return record


class Project:
    """A folder with user code, 24 rows to train on and 5 to evaluate on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.code = root / "code"
        self.code.mkdir()
        (self.code / "usercode.py").write_text(USER_CODE)
        self.train = write_rows(root / "train", 24)
        self.validation = write_rows(root / "validation", 5, seed=1)

    def faults(self, *calls: int) -> None:
        """Let the next lives fail in these forward passes, the later ones in none."""
        (self.code / "faults").write_text(" ".join(map(str, calls)))

    def job(self, **changes: Any) -> Job:
        """Return a job of 9 steps that saves every 2; ``changes`` replace whole sections."""
        sections: dict[str, Any] = {
            "name": "tiny",
            "model": ModelSpec(build="usercode:build"),
            "loss": "usercode:loss",
            "data": DataSpec(train=str(self.train)),
            "batch": BatchSpec(global_batch=8),
            "optim": OptimSpec(lr=0.01, steps=9, schedule="cosine"),
            "checkpoint": CheckpointSpec(every_steps=2),
            "scale": ScaleSpec(workers=0),
            "trace": True,
        }
        return Job(**{**sections, **changes})

    def create(self, run_id: str, job: Job) -> Lives:
        """Make a run's folder."""
        resolved = Resolved(job=job, origins={}, job_file=None, code_root=self.code)
        url = str(self.root / "runs" / run_id)
        folder = RunFolder.create(url, job_to_json(resolved), now=datetime.now(UTC))
        train = tuple(build_index(place) for place in job.data.sources)
        validation = build_index(job.data.validation) if job.data.validation else None
        write_run_data(folder, RunData(train=train, validation=validation))
        return Lives(folder)

    def run(self, run_id: str, job: Job, *, faults: Sequence[int] = ()) -> Lives:
        """Run a job in this process, with one more life after each fault."""
        self.faults(*faults)
        lives = self.create(run_id, job)
        for _ in faults:
            with pytest.raises(ValueError, match="a fault of the test"):
                live(lives.folder)
        assert live(lives.folder) == "FINISHED"
        return lives


def live(folder: RunFolder) -> str:
    """Run a next attempt in this process."""
    attempt = folder.next_attempt({})
    return run_rank(RankTask(run_url=folder.url, attempt=attempt, rank=0, local_rank=0))


def write_rows(folder: Path, rows: int, *, seed: int = 0, shards: int = 3) -> Path:
    """Write rows x (4 numbers), y (class of 3), w (weight, a third of them 0), in shards."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for shard, ids in enumerate(np.array_split(np.arange(rows), min(shards, rows))):
        x = rng.normal(size=(len(ids), 4)).astype("float32")
        table = pa.table(
            {
                "x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4),
                "y": x[:, :3].argmax(1),
                "w": (ids % 3).astype("float32"),
            }
        )
        pq.write_table(table, folder / f"part-{shard}.parquet", row_group_size=4)
    return folder
