"""A run whose step is a script of the user's own: order, records, checkpoints and resume by rayway.

The script asks for a batch, makes its step as ever and logs the loss. What it does between two
batches belongs to the step before: the next batch is asked for when the step is finished, and then
its numbers are recorded and, where one is due, a checkpoint is saved. A script that was killed is
started again and goes on at the newest checkpoint, to the bit.

Under ``torchrun`` every rank makes the same loop after ``init_process_group``; rank 0 writes.
"""

import atexit
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rayway.checkpoint.policy import save_due
from rayway.checkpoint.store import CheckpointStore
from rayway.data.feed import Feed
from rayway.errors import SpecError
from rayway.spec.batch import plan_batch
from rayway.spec.job import BatchSpec, CheckpointSpec, DataSpec
from rayway.spec.load import absolute_sources
from rayway.spec.own import OwnSpec
from rayway.spec.suggest import nearest
from rayway.storage.objects import Objects
from rayway.storage.runs import RunFolder, attempt_key, error_key
from rayway.telemetry.alive import Heartbeat
from rayway.train.clock import Clock
from rayway.train.course import count_steps, plan_training
from rayway.train.draws import seed_forward
from rayway.train.failure import describe_failure
from rayway.train.feeds import Feeds
from rayway.train.loss import Batch
from rayway.train.own_folder import take_attempt
from rayway.train.ranks import dp_size, grouped, sum_over_ranks
from rayway.train.records import StepRecords
from rayway.train.run_data import read_run_data
from rayway.train.saver import Saver
from rayway.train.starving import waits_record
from rayway.train.state import TrainState
from rayway.train.stateful import OPTIMIZER_GROUPS, OptimizerGroups, Stateful
from rayway.train.step import StepReport, on_device
from rayway.train.watch import Watch
from rayway.train.worker import event_log, start_event, write_end

_OTHER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_ADVICE = "Lower the learning rate, warm it up, or clip the gradient."


class Options(TypedDict, total=False):
    """What has a default."""

    seed: int
    """Of the order of the samples, and of the draws in each step. 0 if left out."""
    columns: Sequence[str] | None
    """Columns to read. ``None`` or left out: all."""
    shuffle: bool | Literal["sticky"]
    """Whether samples come in an order drawn from ``seed`` and epoch. True if left out."""
    invalid: Literal["error", "skip", "fill"]
    """What happens to rows with null, NaN or infinite values. ``"error"`` if left out."""
    pad: Mapping[str, int]
    """Lists of differing length: column -> values a row; see ``data.pad`` of a job."""
    keep_last: int
    """Newest checkpoints to keep. 3 if left out."""
    also: Mapping[str, Stateful]
    """What else a checkpoint holds, by name: schedulers, scalers, averaged weights."""


class OwnLoop:
    """An iterator of batches, one a step, that makes a script a run.

    A batch is a dict of tensors of shape (rows, ...) on the model's device: this rank's rows of
    the step's global batch. Model, optimizer and ``also`` are restored before ``__init__`` returns.
    Call :meth:`log` once in each step.

    Args:
        folder: The run's folder, a path or URL. Made if it is not there, gone on with if it is.
        model: Under torchrun the script wraps it in DistributedDataParallel, before.
        optimizer: Of the model's parameters.
        train: Folder or URL of the training Parquet files, or a mixture of them with weights.
        global_batch: Samples per optimizer step, over all ranks.
        steps: Finished steps at which the run ends.
        epochs: The same in passes over the data. One of the two is given.
        checkpoint_every_steps: Save after each such number of steps, and at the end. ``None``: only
            at the end.
        options: See :class:`Options`.

    Raises:
        SpecError: A setting is wrong or not what the run was begun with, the run is still running,
            or it is the run of a job.
        DataError: The data is missing, unreadable, or not what it was.
        CheckpointError: No sound checkpoint is left, or it does not fit.
        StorageError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: str,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        train: str | Mapping[str, float],
        global_batch: int,
        steps: int | None = None,
        epochs: float | None = None,
        checkpoint_every_steps: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._clock = Clock()
        _refuse_unknown(options)
        self._spec = OwnSpec(
            name=Objects(folder).url.rsplit("/", 1)[-1],
            data=DataSpec(
                train=absolute_sources(train),
                columns=None if (names := options.get("columns")) is None else tuple(names),
                shuffle=options.get("shuffle", True),
                invalid=options.get("invalid", "error"),
                pad=dict(options.get("pad", {})),
            ),
            batch=BatchSpec(global_batch=global_batch),
            steps=steps,
            epochs=epochs,
            checkpoint=CheckpointSpec(
                every_steps=checkpoint_every_steps, keep_last=options.get("keep_last", 3)
            ),
            seed=options.get("seed", 0),
        )
        _refuse_lone_ranks()
        plan_batch(self._spec.batch, dp_size=dp_size())
        self._state = _state(model, optimizer, options.get("also", {}))
        self._device = next(self._state.model.parameters()).device
        self._rank = dist.get_rank() if grouped() else 0
        self._stack = ExitStack()
        self._feed: Feed | None = None
        self._watch: Watch | None = None
        self._rows, self._lr = 0, 0.0
        self._at_hand = False
        self._numbers: tuple[Tensor, Tensor | None] | None = None
        self._open, self._attempt = self._begin(folder)
        self._folder = RunFolder.open(folder)
        try:
            self._take_up()
        except Exception as error:
            self._fail(error)
            raise
        if self._open:
            atexit.register(self._leave)

    def _begin(self, folder: str) -> tuple[bool, int]:
        """Let rank 0 take an attempt; return whether it is a new one, and its number."""
        number = 0
        try:
            if self._rank == 0:
                number = take_attempt(self._spec, folder)
        finally:  # the other ranks wait for this, whatever happened; 0: rank 0 was refused
            number = int(sum_over_ranks(torch.tensor([number], device=self._device)).item())
        if number == 0:
            raise SpecError(f"rank 0 could not begin the run in {folder}; its message says why.")
        return number > 0, abs(number)

    def _take_up(self) -> None:
        """Find where the run is, and be there."""
        attempt, folder = self._attempt, self._folder
        self._writes = self._open and self._rank == 0
        alive_key = attempt_key(attempt, "alive.json")
        self._log = self._stack.enter_context(event_log(folder, attempt, self._rank))
        if self._writes:
            self._stack.enter_context(Heartbeat(lambda data: folder.objects.put(alive_key, data)))
        self._plan = plan_training(self._spec, read_run_data(folder).train)
        self.steps = count_steps(self._spec, self._plan)
        """Finished steps at which the run ends."""
        self.steps_per_epoch = self._plan.steps_per_epoch
        """Steps of a pass over the training data."""
        store = CheckpointStore(
            folder,
            attempt=attempt,
            is_newest_attempt=lambda: folder.is_newest(attempt),
            rank=self._rank,
            world_size=dp_size(),
        )
        self._saver = self._stack.enter_context(
            Saver(store, self._log, job=self._spec, plan=self._plan, writes=self._writes)
        )
        loaded = self._saver.find()
        if loaded is not None:
            others: Any = loaded.facts.get("others")
            self._state.restore(loaded.tensors, loaded.step, others)
        self._records = StepRecords(
            self._log.append if self._writes else None,
            rows_in_step=self._plan.rows_in_step,
            trace_slots=None,
            advice=_ADVICE,
        )
        if self._writes:
            self._watch = self._stack.enter_context(Watch(folder, attempt))
            first = self._state.step
            self._log.append(
                start_event(attempt, first=first, steps=self.steps, device=self._device)
            )
        if self._open and self._state.step >= self.steps:  # killed between its last save and end
            self._end("FINISHED", "all steps done")

    @property
    def step(self) -> int:
        """The number of the step at hand, from 1; before and after the loop, finished steps."""
        return self._state.step + self._at_hand

    @property
    def finished(self) -> bool:
        """Whether all steps are done. A loop can also end because the run was asked to stop."""
        return self._state.step >= self.steps

    def __iter__(self) -> Self:
        """Return the loop itself; its place is kept."""
        return self

    def __next__(self) -> Batch:
        """Finish the step at hand, save if a checkpoint is due, and return the next batch.

        Raises:
            SpecError: The step was not logged.
            NumericsError: Its loss or gradient norm is not finite.
            StorageError: A checkpoint could not be written.
        """
        self._finish_step()
        if not self._open:
            raise StopIteration
        if self._feed is None:
            feeds = Feeds(spec=self._spec, plan=self._plan, rank=self._rank)
            self._feed = self._stack.enter_context(feeds.training(self._state.step, self.steps))
            self._clock.lap("setup_s")
        [share] = on_device(next(self._feed), self._device)
        self._rows, self._lr = share.weight_rows, float(self._state.optimizer.param_groups[0]["lr"])
        self._at_hand = True
        seed_forward(self._spec.seed, step=self._state.step, first_slot=share.first_slot)
        self._clock.lap("data_wait_s")
        return share.columns

    def epochs(self) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Yield (epoch from 0, its batches), for scripts that do something after each epoch.

        A resumed run begins within an epoch, with the batches that are left of it. What the script
        does after an epoch's last batch still belongs to that step, and is in its checkpoint.
        """
        self._finish_step()
        while self._open:
            epoch = self._state.step // self.steps_per_epoch
            yield epoch, self._rest_of_epoch()
            self._finish_step()

    def _rest_of_epoch(self) -> Iterator[Batch]:
        done = False
        while not done and (batch := next(self, None)) is not None:
            yield batch
            done = self.step % self.steps_per_epoch == 0 or self.step == self.steps

    def log(self, *, loss: Tensor | float, grad_norm: Tensor | float | None = None) -> None:
        """Note the numbers of the step at hand; nothing waits for the device. The last call counts.

        Args:
            loss: Mean over the rows of this rank's batch, shape (). The mean over all ranks is
                recorded; ranks that do not log are left out of it.
            grad_norm: L2 norm of the whole gradient, the same on every rank.

        Raises:
            SpecError: There is no batch at hand, or a number is no scalar.
        """
        if not self._at_hand:
            raise SpecError("loop.log(...) without a batch at hand. Call it once in each step.")
        norm = None if grad_norm is None else self._scalar(grad_norm, "grad_norm")
        self._numbers = self._scalar(loss, "loss"), norm

    def _scalar(self, value: Tensor | float, name: str) -> Tensor:
        tensor = torch.as_tensor(value).detach()
        if tensor.numel() != 1:
            raise SpecError(
                f"loop.log({name}=...) was given a tensor of shape {tuple(tensor.shape)}; it has "
                f"to be one number, e.g. {name}.mean()."
            )
        return tensor.reshape(()).to(self._device, torch.float64, copy=True)

    def _finish_step(self) -> None:
        if not self._at_hand:
            return
        self._clock.lap("step_s")
        if self._writes and self._numbers is None:
            raise SpecError(
                f"step {self.step} was not logged, so the run's records would have a gap. Call "
                f"loop.log(loss=...) once in each step."
            )
        self._state.step, self._at_hand = self._state.step + 1, False
        step = self._state.step
        report = self._report()
        self._records.on_step(report, ())
        due = save_due(step, self.steps, self._spec.checkpoint)
        # on a GPU this would wait for the step: looked at only where it may wait anyway
        stopping = (due or self._device.type == "cpu") and report.stop_asked()
        if due or stopping:
            self._records.settle()
        self._clock.lap("log_s")
        if due or stopping:
            self._saver.save(self._state)
            self._clock.lap("save_s")
        if step >= self.steps:
            self._end("FINISHED", "all steps done")
        elif stopping:
            self._end("STOPPED", "asked to stop")

    def _report(self) -> StepReport:
        """Return the step's numbers over all ranks."""
        loss, grad_norm = self._numbers or (torch.zeros((), device=self._device), None)
        rows = self._rows if self._numbers else 0
        self._numbers = None
        asked = self._watch is not None and self._watch.stop_asked()
        totals = torch.zeros(4, dtype=torch.float64, device=self._device)
        totals[0], totals[1], totals[2], totals[3] = loss * rows, rows, float(asked), rows
        return StepReport(
            step=self._state.step,
            totals=sum_over_ranks(totals),
            grad_norm=grad_norm,
            lr=self._lr,
        )

    def _end(self, ending: str, reason: str) -> None:
        """Record an end that all ranks come to together."""
        self._saver.finish()  # may fail, which then is how the run ends
        self._open = False
        sum_over_ranks(torch.zeros(1, device=self._device))  # all have saved by then
        if self._writes:
            write_end(
                self._folder,
                self._log,
                attempt=self._attempt,
                ending=ending,
                reason=reason,
                saved=self._saver.newest,
                clock=self._clock,
                data=waits_record(self._feed.waits()) if self._feed else {},
            )
        self._close()

    def close(self) -> None:
        """End the run here, if it has not ended. A script started again goes on with it."""
        if self._open:
            where = f"in step {self.step}" if self._at_hand else f"after step {self.step}"
            self._end_early("STOPPED", f"the script left its loop {where} of {self.steps}")

    def __enter__(self) -> Self:
        """Return the loop. In a notebook, ``with`` records an error as soon as it happens."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the run, as failed if an error is on its way."""
        if isinstance(error, Exception):
            self._fail(error)
        self.close()

    def _leave(self) -> None:
        """Close the run at the end of the script: Python has kept the error that ended it."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, Exception):
            self._fail(error)
        self.close()

    def _fail(self, error: Exception) -> None:
        """Record an error that this rank alone may have."""
        if not self._open:
            return
        failure = describe_failure(error, rank=self._rank, step=self._state.step)
        self._folder.write(error_key(self._attempt, self._rank), failure.record())
        last = failure.message.strip().splitlines()[-1]
        what = f"the script raised on rank {self._rank}: " if failure.kind == "user" else ""
        self._end_early("FAILED", what + last)

    def _end_early(self, ending: str, reason: str) -> None:
        self._open = False
        if self._writes:
            record: dict[str, Any] = {
                "state": ending,
                "reason": reason,
                "step": self._state.step,
                "clock": self._clock.seconds(),
            }
            self._log.append({"type": "end", **record})
            self._folder.write(attempt_key(self._attempt, "end.json"), record)
        self._close()

    def _close(self) -> None:
        atexit.unregister(self._leave)
        self._stack.close()


def _refuse_unknown(options: Options) -> None:
    known = get_type_hints(Options)
    for name in options:
        if name not in known:
            near = nearest(name, [*known, "steps", "epochs", "checkpoint_every_steps"])
            hint = f"Did you mean {near[0]}? " if near else ""
            raise SpecError(f"OwnLoop has no option {name}. {hint}There are: {', '.join(known)}.")


def _refuse_lone_ranks() -> None:
    if dist.is_available() and dist.is_torchelastic_launched() and not grouped():
        raise SpecError(
            "this script was started by torchrun, and its ranks do not know each other. Call "
            "torch.distributed.init_process_group() before OwnLoop."
        )


def _state(model: nn.Module, optimizer: Optimizer, also: Mapping[str, Stateful]) -> TrainState:
    """Return what is saved: the model without its wrappers, the optimizer, and the rest."""
    bare: Any = model
    while isinstance(bare, DistributedDataParallel) or hasattr(bare, "_orig_mod"):
        bare = bare.module if isinstance(bare, DistributedDataParallel) else bare._orig_mod
    known = set(bare.parameters())
    strange = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
    if strange:
        raise SpecError(
            f"the optimizer holds {len(strange)} parameters that are not the model's, so they "
            f"would not be saved. Put all that is trained into one nn.Module."
        )
    for name in also:
        if not _OTHER_NAME.fullmatch(name) or name == OPTIMIZER_GROUPS:
            raise SpecError(
                f"also={{{name!r}: ...}}: a name is 1 to 64 letters, digits, '_' and '-', and not "
                f"{OPTIMIZER_GROUPS!r}, because it becomes the name of a file."
            )
    others = {OPTIMIZER_GROUPS: OptimizerGroups(optimizer), **also}
    return TrainState(model=bare, replica=model, optimizer=optimizer, others=others)
