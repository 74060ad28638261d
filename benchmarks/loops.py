"""The two loops that are compared step by step: rayway's, and the one you would write by hand.

Both train an equal model on the same rows in the same process, in alternating blocks of steps. The
hand-written loop is the strongest plain one for the same updates of the weights: its data is in
memory, the optimizer is fused, and it checks, gathers and promises nothing. It logs loss, gradient
norm and rate of each step to a JSON Lines file.
"""

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rayway.data.columns import to_numpy
from rayway.data.index import build_index
from rayway.spec.job import Job
from rayway.spec.load import import_object, job_to_json, resolve_job
from rayway.storage.runs import RunFolder, events_key
from rayway.telemetry.events import EventLog
from rayway.train.build import build_state, learning_rate
from rayway.train.clock import Clock
from rayway.train.course import plan_course, plan_training
from rayway.train.deadline import StepDeadline
from rayway.train.feeds import Feeds
from rayway.train.loop import Errands, Observer, train
from rayway.train.records import StepRecords
from rayway.train.step import StepSettings
from rayway.train.watch import Watch

CPU = torch.device("cpu")
_LOG_PAUSE_S = 0.25  # longer than the event log's pause between two batches


class TrainLoop(Protocol):
    """Trains on and on, some steps at a time."""

    def run(self, steps: int) -> None:
        """Train for so many more steps."""

    def settle(self) -> None:
        """Finish what the steps left to be done in the background."""


@dataclass(frozen=True)
class Cost:
    """What a step took, on average over a block of steps."""

    wall_s: float
    """Seconds until the slowest rank was through with the block."""

    cpu_s: float
    """Seconds of CPU of all ranks' processes: with background threads, and what they did after."""


@dataclass(frozen=True)
class Pair:
    """Two neighbouring blocks of as many steps."""

    bare: Cost
    ours: Cost


def take_turns(bare: TrainLoop, ours: TrainLoop, *, pairs: int, steps: int) -> list[Pair]:
    """Return the costs of alternating blocks; which loop goes first alternates, too.

    All ranks call it at the same time. One more pair goes before and is not counted.
    """
    taken = []
    for number in range(pairs + 1):
        loops = (bare, ours) if number % 2 else (ours, bare)
        costs = {loop: _block(loop, steps) for loop in loops}
        taken.append(Pair(costs[bare], costs[ours]))
    return taken[1:]


def _block(loop: TrainLoop, steps: int) -> Cost:
    if dist.is_initialized():
        dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    loop.run(steps)
    wall = time.perf_counter() - wall
    loop.settle()
    cpu = time.process_time() - cpu
    costs = torch.tensor([wall, cpu], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(costs[:1], dist.ReduceOp.MAX)
        dist.all_reduce(costs[1:])
    return Cost(wall_s=costs[0].item() / steps, cpu_s=costs[1].item() / steps)


class BareLoop:
    """A hand-written training loop as one would start it with torchrun."""

    def __init__(self, job: Job, log: Path, *, rank: int, world_size: int) -> None:
        torch.manual_seed(job.seed)
        self._model: nn.Module = import_object(job.model.build)(**job.model.args)
        self._replica = self._model
        if dist.is_initialized():
            self._replica = DistributedDataParallel(self._model, gradient_as_bucket_view=True)
        self._loss = import_object(job.loss)
        matrices = [weight for weight in self._model.parameters() if weight.ndim >= 2]
        others = [weight for weight in self._model.parameters() if weight.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=job.optim.lr,
            betas=job.optim.betas,
            weight_decay=job.optim.weight_decay,
            fused=True,
        )
        self._job, self._rank, self._world_size = job, rank, world_size
        self._rows = job.batch.global_batch // world_size
        self._columns = read_columns(Path(next(iter(job.data.sources))))
        self._batches = self._epochs()
        self._step = 0
        self._log = log.open("a", buffering=1) if rank == 0 else None

    def run(self, steps: int) -> None:
        """Train for so many more steps."""
        self._model.train()
        for _ in range(steps):
            batch = next(self._batches)
            lr = self._lr()
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            summed = self._loss(self._replica, batch)
            loss = summed.sum / summed.weight
            torch.autograd.backward(loss)
            norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._job.optim.max_norm or 1)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._step += 1
            if self._log is not None:
                record = {
                    "step": self._step,
                    "loss": loss.item(),
                    "grad_norm": norm.item(),
                    "lr": lr,
                }
                self._log.write(json.dumps(record) + "\n")

    def settle(self) -> None:
        """Wait as long as our loop does."""
        time.sleep(_LOG_PAUSE_S)

    def _epochs(self) -> Iterator[dict[str, Tensor]]:
        total = len(next(iter(self._columns.values())))
        shuffled = torch.Generator().manual_seed(self._job.seed)
        while True:
            order = torch.randperm(total, generator=shuffled)[self._rank :: self._world_size]
            whole = len(order) - len(order) % self._rows
            for rows in order[:whole].view(-1, self._rows):
                yield {name: column[rows] for name, column in self._columns.items()}

    def _lr(self) -> float:
        optim = self._job.optim
        if self._step < optim.warmup_steps:
            return optim.lr * (self._step + 1) / optim.warmup_steps
        assert optim.steps is not None
        done = (self._step - optim.warmup_steps) / (optim.steps - optim.warmup_steps)
        return optim.lr * (1 + math.cos(math.pi * done)) / 2


class OurLoop:
    """rayway's loop with all that a rank of a run has around it, put together as it does."""

    def __init__(self, job: Job, run: RunFolder, stack: ExitStack, *, rank: int) -> None:
        plan = plan_training(job, [build_index(place) for place in job.data.sources])
        self._course = plan_course(job, plan)
        self._job = job
        self._settings = StepSettings(
            loss_function=import_object(job.loss), seed=job.seed, max_norm=job.optim.max_norm
        )
        feeds = Feeds(spec=job, plan=plan, rank=rank)
        self._feed = stack.enter_context(feeds.training(0, self._course.steps))
        self._state = build_state(job, CPU)
        key = events_key(1, rank)
        self._log = stack.enter_context(EventLog(lambda data: run.objects.append(key, data)))
        watch = stack.enter_context(Watch(run, 1)) if rank == 0 else None
        self._stop_asked = watch.stop_asked if watch else lambda: False
        write = self._log.append if rank == 0 else None
        self._observers: list[Observer] = [
            stack.enter_context(StepDeadline(job.scale.step_timeout_s)),
            StepRecords(write, rows_in_step=self._course.rows_in_step, trace_slots=None),
        ]
        self._clock = Clock()

    def run(self, steps: int) -> None:
        """Train for so many more steps."""
        train(
            self._state,
            self._feed,
            self._settings,
            replace(self._course, steps=self._state.step + steps, save_due=lambda _step: False),
            learning_rate=lambda step: learning_rate(self._job.optim, step, self._course.steps),
            errands=Errands(save=_refuse, evaluate=_refuse, stop_asked=self._stop_asked),
            observers=self._observers,
            clock=self._clock,
        )

    def settle(self) -> None:
        """Wait until the event log is written and the feed has read ahead."""
        self._log.flush()
        time.sleep(_LOG_PAUSE_S)


def _refuse(_state: object) -> None:
    raise AssertionError("no step of a benchmark saves or evaluates")


def new_run(job: Job, storage: Path) -> RunFolder:
    """Make the folder of a run, with a first attempt in it."""
    folder = RunFolder.create(
        f"{storage}/{job.name}", job_to_json(resolve_job(job)), now=datetime.now(UTC)
    )
    folder.next_attempt({})
    return folder


def read_columns(folder: Path) -> dict[str, Tensor]:
    """Return the columns of all Parquet files in a folder, as tensors of shape (rows, ...)."""
    table = pq.read_table(sorted(folder.glob("*.parquet")))
    return {
        name: torch.from_numpy(to_numpy(table[name].combine_chunks()).copy())
        for name in table.column_names
    }


def in_processes(
    measure: Callable[[int, int, Path], list[Pair]], *, ranks: int, folder: Path
) -> list[Pair]:
    """Call ``measure(rank, ranks, folder)`` in a process per rank; return what rank 0 returned.

    The processes form a gloo group, as torchrun's would.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(ranks, mp_context=spawn) as pool:
        work = [pool.submit(_as_rank, measure, rank, ranks, folder) for rank in range(ranks)]
        pairs, *_ = [each.result() for each in work]
        return pairs


def _as_rank(
    measure: Callable[[int, int, Path], list[Pair]], rank: int, ranks: int, folder: Path
) -> list[Pair]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    try:
        return measure(rank, ranks, folder)
    finally:
        dist.destroy_process_group()
