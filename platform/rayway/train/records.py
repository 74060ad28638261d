"""A run's steps as events: the numbers of each step, once they are there."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rayway.data.feed import MicroBatch
from rayway.errors import TrainingError
from rayway.train.ranks import grouped
from rayway.train.step import StepReport

_LAG_ON_GPU = 8
_EMPTY = -1
_ADVICE = (
    "Lower optim.lr, lengthen optim.warmup_steps, clip with optim.max_norm, or look at the step's "
    "samples with --set trace=true."
)


class NumericsError(TrainingError):
    """The loss or the gradient is not a finite number any more."""


class StepRecords:
    """An observer that writes an event a step, and ends a run whose numbers are not finite.

    On a GPU it looks at a step's numbers some steps later, so that nothing waits for the device.
    No checkpoint is written before its steps were looked at.

    Args:
        write: Takes an event; ``None`` on ranks that do not write.
        rows_in_step: Rows of the global batch after so many finished steps.
        trace_slots: Gather the sample ids of each step from all ranks, each of which has at most
            so many slots; ``None``: do not.
        advice: What to do about numbers that are not finite.
    """

    def __init__(
        self,
        write: Callable[[Mapping[str, Any]], None] | None,
        *,
        rows_in_step: Callable[[int], int],
        trace_slots: int | None,
        advice: str = _ADVICE,
    ) -> None:
        self._write = write
        self._rows_in_step = rows_in_step
        self._trace_slots = trace_slots
        self._advice = advice
        self.left_out = 0
        """Rows with invalid values that were left out so far, over all ranks."""
        self._waiting: deque[tuple[StepReport, list[int] | None]] = deque()

    def on_step(self, report: StepReport, micro_batches: Sequence[MicroBatch]) -> None:
        """Take note of a step."""
        ids = None
        if self._trace_slots is not None:
            ids = gather_ids(micro_batches, slots=self._trace_slots)
        self._waiting.append((report, ids))
        lag = 0 if report.totals.device.type == "cpu" else _LAG_ON_GPU
        while len(self._waiting) > lag:
            self._record(*self._waiting.popleft())

    def settle(self) -> None:
        """Write what is waiting.

        Raises:
            NumericsError: A step's loss or gradient was not finite.
        """
        while self._waiting:
            self._record(*self._waiting.popleft())

    def _record(self, report: StepReport, ids: list[int] | None) -> None:
        loss = report.loss()
        grad_norm = None if report.grad_norm is None else report.grad_norm.item()
        rows, planned = report.rows(), self._rows_in_step(report.step - 1)
        if rows < planned and self._write is not None:
            self._note_left_out(report.step, rows, planned)
        if self._write is not None:
            record = {
                "type": "step",
                "step": report.step,
                "loss": loss,
                "lr": report.lr,
                "grad_norm": grad_norm,
                "rows": rows,
            }
            if ids is not None:
                record["ids"] = ids
            self._write(record)
        if not math.isfinite(loss) or not (grad_norm is None or math.isfinite(grad_norm)):
            if report.weight() == 0:
                raise NumericsError(
                    f"step {report.step}: the weight of the whole global batch is 0, so it has no "
                    f"mean loss. Return Loss(weight=...) with the number of rows or tokens that "
                    f"count, or leave out such samples. Nothing of it was saved."
                )
            norm = "" if grad_norm is None else f" and the gradient's norm {grad_norm}"
            raise NumericsError(
                f"step {report.step}: the loss is {loss}{norm}. {self._advice} "
                f"Nothing of it was saved."
            )

    def _note_left_out(self, step: int, rows: int, planned: int) -> None:
        assert self._write is not None, "asked only where there is a log"
        if not self.left_out:
            self._write(
                {
                    "type": "warning",
                    "message": f"step {step}: {planned - rows} of {planned} rows have invalid "
                    f"values and were left out, as data.invalid says. This is said once.",
                }
            )
        self.left_out += planned - rows


def gather_ids(micro_batches: Sequence[MicroBatch], *, slots: int) -> list[int]:
    """Return the ids of the samples that all ranks really used in a step, in slot order."""
    mine = torch.full((slots,), _EMPTY, dtype=torch.int64)
    used = np.concatenate([micro_batch.ids for micro_batch in micro_batches])
    mine[: len(used)] = torch.from_numpy(used)
    shares = [mine]
    if grouped():
        shares = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, mine)
    ids: list[int] = torch.cat(shares).tolist()
    return [sample for sample in ids if sample != _EMPTY]
