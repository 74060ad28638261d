"""A rank's micro-batches, step after step, made ready in the background.

One thread gathers blocks of steps and cuts them, the engine's threads read ahead of it. What the
training loop pays for a step is taking a finished list.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from time import perf_counter, thread_time
from types import TracebackType
from typing import Literal, Self, TypedDict, Unpack

import numpy as np
import torch

from rayway.data.blocks import Block, Blocks
from rayway.data.engine import Engine, local_engine
from rayway.data.keys import Int64s
from rayway.data.plan import Plan
from rayway.data.shards import Reader
from rayway.data.stages import DECODE, READ, TRANSFORM, Stages
from rayway.data.transforms import Transform

_BLOCKS_READY = 2
_BUDGET_BYTES = 128 << 20
_CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward pass on one rank."""

    columns: dict[str, torch.Tensor]
    """Tensors of shape (rows, ...) on the CPU, free to be written to."""
    ids: Int64s
    """Sample ids, shape (weight_rows,)."""
    weight_rows: int
    """Rows that count. 0: ``columns`` holds one row only to keep the ranks in step."""
    first_slot: int
    """The place in the global batch at which this micro-batch begins."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Where the time of a feed went, in seconds since it was made, and what it left out."""

    wait_s: float
    """What the consumer waited for steps that were not ready."""
    read_s: float
    """Waiting for storage, summed over the threads that read."""
    decode_s: float
    """CPU time of decompressing and decoding, summed over those threads."""
    transform_s: float
    """The user's transform, summed over those threads."""
    transfer_s: float
    """Waiting for rows that another process made."""
    gather_s: float
    """CPU time of gathering rows into batches."""
    skipped_rows: int
    """Rows left out of the steps handed over so far because they do not count."""


class Reading(TypedDict, total=False):
    """How the local engine reads."""

    columns: Sequence[str] | None
    """What to read. ``None``: the index's columns."""
    transform: Transform | None
    """The user's function on rows."""
    seed: int
    """Of the transform's draws. The plan's seed if left out."""
    training: bool
    """Whether the rows are for training, which the transform is told. True if left out."""
    invalid: Literal["error", "skip", "fill"]
    """What becomes of a row with a null, NaN or infinite value. ``error`` if left out."""
    pad: Mapping[str, int] | None
    """List column -> values a row."""
    budget_bytes: int
    """What units read ahead may hold; in a sticky order half of it is for row groups that come
    again. 128 MiB if left out."""


_Steps = tuple[list[list[MicroBatch]], int]
"""The steps of a block, and how many rows they leave out."""


class Feed:
    """An iterator of steps: each a list of :class:`MicroBatch`, equally long on every rank.

    A step has ceil(ceil(global batch / world size) / micro_batch) micro-batches. The rows are the
    plan's, whatever the engine, the world size and ``start_step``. Close it, or use ``with``.

    Args:
        plan: The order.
        rank: Whose rows.
        world_size: All ranks that see different data.
        micro_batch: Slots of a micro-batch; its rows are fewer where slots are empty or hold rows
            that do not count.
        start_step: The first global step; a resume gives the number of finished steps.
        stop_step: The step to end before. ``None`` never ends.
        engine: Fills the feed. ``None``: reads in threads of this process, as ``reading`` says.
        stages: Those that the engine tells its times; for :meth:`waits`.

    Raises:
        DataError: In ``next``: a shard cannot be read, or a column is no tensor.
        TrainingError: In ``next``: the user's transform failed.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        start_step: int = 0,
        stop_step: int | None = None,
        engine: Engine | None = None,
        stages: Stages | None = None,
        **reading: Unpack[Reading],
    ) -> None:
        self._stages = stages or Stages()
        engine = engine or _engine(plan, self._stages, reading)
        self._blocks = Blocks(
            plan, engine, rank=rank, world_size=world_size, micro_batch=micro_batch
        )
        self._wait_s, self._gather_s, self._skipped_rows = 0.0, 0.0, 0
        self._steps: deque[list[MicroBatch]] = deque()
        self._ready: Queue[_Steps | BaseException | None] = Queue(_BLOCKS_READY)
        self._closed, self._ended = threading.Event(), False
        self._thread = threading.Thread(
            target=self._work, args=(start_step, stop_step), name="rayway-feed", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """Return the feed itself; its place is kept between loops."""
        return self

    def __next__(self) -> list[MicroBatch]:
        """Return the next step's micro-batches."""
        if not self._steps:
            self._take_block()
        return self._steps.popleft()

    def __enter__(self) -> Self:
        """Return the feed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the feed."""
        self.close()

    def waits(self) -> Waits:
        """Return where the time went until now."""
        seconds = self._stages.seconds()
        return Waits(
            wait_s=self._wait_s,
            read_s=seconds.get(READ, 0.0),
            decode_s=seconds.get(DECODE, 0.0),
            transform_s=seconds.get(TRANSFORM, 0.0),
            transfer_s=seconds.get("transfer", 0.0),
            gather_s=self._gather_s,
            skipped_rows=self._skipped_rows,
        )

    def close(self) -> None:
        """End the threads. Reads in flight end by themselves and are not waited for long."""
        self._closed.set()
        self._steps.clear()
        while True:  # makes room if the thread waits to hand over a block
            try:
                self._ready.get_nowait()
            except Empty:
                break
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _take_block(self) -> None:
        if self._ended:
            raise StopIteration
        if self._closed.is_set():
            raise ValueError("this feed is closed; make a new one with start_step to go on.")
        began = perf_counter()
        block = self._ready.get()
        self._wait_s += perf_counter() - began
        if isinstance(block, BaseException):
            self._closed.set()
            raise block
        if block is None:
            self._ended = True
            raise StopIteration
        steps, skipped = block
        self._steps.extend(steps)
        self._skipped_rows += skipped

    def _work(self, start: int, stop: int | None) -> None:
        """Make blocks until the end, an error, or ``close``. Runs in the feed's own thread."""
        blocks, began = self._blocks.run(start, stop), thread_time()
        try:
            for block in blocks:
                if self._closed.is_set():
                    return
                steps = self._cut(block)
                self._gather_s = thread_time() - began - self._blocks.engine_cpu_s
                self._ready.put((steps, block.skipped))
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, who raises it
            self._ready.put(error)
        finally:
            blocks.close()

    def _cut(self, block: Block) -> list[list[MicroBatch]]:
        """Return the steps of a block. Micro-batches are views of disjoint rows."""
        first_slots, steps, row = self._blocks.first_slots, [], 0
        for begin in range(0, len(block.counts), len(first_slots)):
            step = []
            for first_slot, count in zip(first_slots, block.counts[begin:], strict=False):
                end = row + count
                columns = (
                    {name: torch.from_numpy(x[row:end]) for name, x in block.columns.items()}
                    if count
                    else {k: torch.from_numpy(np.copy(x)) for k, x in self._blocks.filler.items()}
                )
                step.append(MicroBatch(columns, block.ids[row:end], count, first_slot))
                row = end
            steps.append(step)
        return steps


def _engine(plan: Plan, stages: Stages, reading: Reading) -> Engine:
    budget_bytes = reading.get("budget_bytes", _BUDGET_BYTES)
    sticky = any(stream.shuffle == "sticky" for stream in plan.streams)
    cache_bytes = budget_bytes // 2 if sticky else None
    reader = Reader(
        [stream.index for stream in plan.streams],
        columns=reading.get("columns"),
        transform=reading.get("transform"),
        seed=reading.get("seed", plan.streams[0].seed),
        training=reading.get("training", True),
        invalid=reading.get("invalid", "error"),
        pad=reading.get("pad"),
        stages=stages,
        cache_bytes=cache_bytes,
    )
    return local_engine(
        reader,
        budget_bytes=budget_bytes - (cache_bytes or 0),
        unit_bytes=max(stream.index.group_bytes * stream.window for stream in plan.streams),
        stages=stages,
    )
