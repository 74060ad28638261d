"""A rank's micro-batches, step after step, made ready in the background.

One thread gathers blocks of steps and cuts them, the engine's threads read ahead of it. What the
training loop pays for a step is taking a finished list.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from types import TracebackType
from typing import Self, TypedDict, Unpack

import numpy as np
import torch

from rayway.data.blocks import Block, Blocks
from rayway.data.engine import Engine, local_engine
from rayway.data.index import Index
from rayway.data.keys import Int64s
from rayway.data.plan import Plan
from rayway.data.shards import Reader, Transform

_BLOCKS_READY = 2
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
    threads: int
    """Reads in flight. 1 if left out."""
    ahead: int | None
    """Units read before they are asked for. ``None``: twice the threads."""


class Feed:
    """An iterator of steps: each a list of :class:`MicroBatch`, equally long on every rank.

    A step has ceil(ceil(global batch / world size) / micro_batch) micro-batches. The rows are the
    plan's, whatever the engine, the world size and ``start_step``. Close it, or use ``with``.

    Args:
        plan: The order.
        index: The data set.
        rank: Whose rows.
        world_size: All ranks that see different data.
        micro_batch: Slots of a micro-batch; its rows are fewer where slots are empty.
        start_step: The first global step; a resume gives the number of finished steps.
        stop_step: The step to end before. ``None`` never ends.
        engine: Fills the feed. ``None``: reads in threads of this process, as ``reading`` says.

    Raises:
        DataError: In ``next``: a shard cannot be read, or a column is no tensor.
        TrainingError: In ``next``: the user's transform failed.
    """

    def __init__(
        self,
        plan: Plan,
        index: Index,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        start_step: int = 0,
        stop_step: int | None = None,
        engine: Engine | None = None,
        **reading: Unpack[Reading],
    ) -> None:
        engine = engine or _engine(plan, index, reading)
        self._blocks = Blocks(
            plan, engine, rank=rank, world_size=world_size, micro_batch=micro_batch
        )
        self._steps: deque[list[MicroBatch]] = deque()
        self._ready: Queue[list[list[MicroBatch]] | BaseException | None] = Queue(_BLOCKS_READY)
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
        block = self._ready.get()
        if isinstance(block, BaseException):
            self._closed.set()
            raise block
        if block is None:
            self._ended = True
            raise StopIteration
        self._steps.extend(block)

    def _work(self, start: int, stop: int | None) -> None:
        """Make blocks until the end, an error, or ``close``. Runs in the feed's own thread."""
        blocks = self._blocks.run(start, stop)
        try:
            for block in blocks:
                if self._closed.is_set():
                    return
                self._ready.put(self._cut(block))
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


def _engine(plan: Plan, index: Index, reading: Reading) -> Engine:
    reader = Reader(
        index,
        columns=reading.get("columns"),
        transform=reading.get("transform"),
        seed=reading.get("seed", plan.stream.seed),
        training=reading.get("training", True),
    )
    return local_engine(reader, threads=reading.get("threads", 1), ahead=reading.get("ahead"))
