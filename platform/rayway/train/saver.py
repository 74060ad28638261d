"""Saving a run's state beside training, and taking it up again.

A save copies the state, and a thread of its own writes the copy. Most of the copy is made during
the next forward and backward pass, since weights change in the optimizer's update only; the update
waits for it. So training stands still for next to nothing.

One save is under way at a time. One that is due earlier waits, and with it training, but not for
ever: a storage that is too slow for the job's rule slows the job down, and fills no memory.
"""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rayway.checkpoint.load import Like
from rayway.checkpoint.share import WEIGHTS, Share
from rayway.checkpoint.snapshot import HostBuffers, Snapshot, TornCopy
from rayway.checkpoint.store import AttemptReplaced, CheckpointStore, Loaded
from rayway.checkpoint.tensors import Unstorable
from rayway.data.plan import Plan
from rayway.errors import CheckpointError, StorageError
from rayway.spec.job import Job
from rayway.spec.load import job_hash
from rayway.spec.own import OwnSpec
from rayway.telemetry.events import EventLog
from rayway.train.ranks import dp_size, grouped, sum_over_ranks
from rayway.train.records import NumericsError
from rayway.train.state import TrainState

STATE_VERSION = 1
MAX_FAILED_SAVES = 3
"""So many saves that fail one after the other end the run."""

_GRACE_S = 10.0  # for a save that is under way when its rank has failed
_ATTEMPTS = 10**9  # more than there ever are
_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Newest:
    """The newest checkpoint that is known to be committed."""

    step: int
    weights_sha256: str


@dataclass(kw_only=True, slots=True)
class _Flight:
    """A save under way."""

    step: int
    snapshot: Snapshot
    facts: dict[str, Any]
    trained: frozenset[str]
    """What the optimizer changes. Weights among it have to be finite."""

    began: float
    behind_s: float
    """How long it waited for the save before it, in seconds."""

    called_s: float = 0.0
    """How long ``save`` took, that wait included, in seconds."""

    thread: threading.Thread = field(init=False)


class Saver:
    """Writes the state of a run as checkpoints. Every rank has one, and writes its share.

    Everything that a resumed run needs is in a checkpoint. Random draws are not among it: they are
    a function of the job's seed and of the step (``draws.py``), and so is the learning rate.

    Args:
        store: This rank's store.
        log: Is told of checkpoints, if this rank ``writes``.
        job: What is trained.
        plan: The order of its samples.
        writes: Whether this rank speaks for all in the log.
        max_failed: So many saves that fail one after the other end the run.
    """

    def __init__(
        self,
        store: CheckpointStore,
        log: EventLog,
        *,
        job: Job | OwnSpec,
        plan: Plan,
        writes: bool,
        max_failed: int = MAX_FAILED_SAVES,
    ) -> None:
        self._store = store
        self._log = log
        self._job = job
        self._job_hash = job_hash(job)
        self._plan = plan
        self._writes = writes
        self._max_failed = max_failed
        self._in_use: int | None = None
        self._buffers = HostBuffers()
        self._blocking = False
        self._flight: _Flight | None = None
        self._failures: list[tuple[int, str]] = []
        self._error: BaseException | None = None
        self._raised = False
        self._hooks: dict[Optimizer, RemovableHandle] = {}
        self.newest: Newest | None = None
        """The newest checkpoint that is known to be committed: rank 0 knows of those it made."""

    def warn(self, message: str) -> None:
        """Put a warning into the event log, once: of all ranks the one that writes says it."""
        if self._writes:
            self._log.append({"type": "warning", "message": message})

    def find(self, like: Like | None = None) -> Loaded | None:
        """Return the newest sound checkpoint, checked against the job; ``None`` before the first.

        All ranks return the same one.

        Args:
            like: What is to be filled, if the model is cut over ranks: ``TrainState.like``.

        Raises:
            CheckpointError: There were checkpoints and none is sound, or it is not of this job.
            DataError: It was made under another order of samples.
        """
        loaded = self._agree(self._store.load_newest(on_skip=self.warn, like=like), like)
        if loaded is None:
            return None
        version, order = loaded.facts.get("state_version"), loaded.facts.get("order")
        if version != STATE_VERSION or not isinstance(order, dict):
            raise CheckpointError(
                f"the checkpoint of step {loaded.step} has state version {version}, this rayway "
                f"reads {STATE_VERSION}. Resume with the rayway that wrote it."
            )
        self._plan.check_state(order)
        self._in_use = loaded.step
        self.newest = Newest(step=loaded.step, weights_sha256=loaded.weights_sha256)
        return loaded

    def save(self, state: TrainState) -> None:
        """Begin to save the state as it is now. All ranks call it at the same step.

        From now on the optimizer's next update waits until the state is copied.

        Raises:
            StorageError: Too many saves in a row have failed, or a newer attempt has begun.
            NumericsError: The weights of the save before were not finite.
        """
        began = time.perf_counter()
        if not self._land(within_s=self._store.patience_s):
            self._leave_out(state.step)
            return
        behind_s = time.perf_counter() - began
        self._watch(state.optimizer)
        tensors = state.tensors()
        trained = state.changed_by_updates(tensors)
        snapshot = self._buffers.begin(
            tensors,
            constant=() if self._blocking else trained,
            replicated=trained,
            rank=self._store.rank,
            world_size=self._store.world_size,
        )
        flight = self._flight = _Flight(
            step=state.step,
            snapshot=snapshot,
            facts=self._facts(state) if self._store.rank == 0 else {},
            trained=trained,
            began=began,
            behind_s=behind_s,
        )
        flight.thread = threading.Thread(
            target=self._carry_out, args=(flight,), name=f"save-{state.step}", daemon=True
        )
        flight.thread.start()
        flight.called_s = time.perf_counter() - began

    def before_update(self) -> None:
        """Wait until the state may change. The optimizer calls it before each update.

        Raises:
            StorageError: Too many saves in a row have failed, or a newer attempt has begun.
            NumericsError: The weights of the save before were not finite.
        """
        if self._flight is not None:
            self._flight.snapshot.wait()
        self._raise()

    def finish(self) -> None:
        """Wait for the save under way. At the end of a run its last state is stored then.

        Raises:
            StorageError: The newest save failed.
            NumericsError: Its weights were not finite.
        """
        self._land()
        if self._failures:
            step, reason = self._failures[-1]
            raise StorageError(f"step {step} could not be saved{self._last_good()}: {reason}")

    def __enter__(self) -> Self:
        """Return the saver."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let a save that is under way come to its end, if that is soon.

        Raises:
            Exception: What ended it, if nobody was told and no other error is on its way.
        """
        for hook in self._hooks.values():
            hook.remove()
        if self._flight is not None:
            self._store.hurry(_GRACE_S)
            self._flight.thread.join(_GRACE_S)
        if self._error is not None and not self._raised:
            if kind is None:
                self._raise()
            self.warn(f"a save failed, too: {self._error}")

    def _land(self, *, within_s: float | None = None) -> bool:
        """Wait for the save under way; raise what ended it, if it has to end the run.

        Returns:
            Whether it is done.
        """
        if self._flight is not None:
            self._flight.thread.join(within_s)
            if self._flight.thread.is_alive():
                return False
            self._flight = None
        self._raise()
        return True

    def _leave_out(self, step: int) -> None:
        """Do without a save, since the one before it does not come to its end."""
        assert self._flight is not None, "there is one before it"
        error = StorageError(
            f"the save of step {self._flight.step} was still under way, after "
            f"{time.perf_counter() - self._flight.began:.0f} s. Save less often, or to a faster "
            "storage."
        )
        tell = partial(self._tell_failure, step, error)
        threading.Thread(target=tell, name=f"no-save-{step}", daemon=True).start()
        self._note_failure(step, error)
        self._raise()

    def _tell_failure(self, step: int, error: Exception) -> None:
        with suppress(StorageError):  # the first error is the one to report
            self._store.tell_failure(step, error)

    def _raise(self) -> None:
        if self._error is not None:
            self._raised = True
            raise self._error

    def _watch(self, optimizer: Optimizer) -> None:
        """Let the optimizer wait for copies; a script of the user's own calls it, too."""
        if optimizer not in self._hooks:
            self._hooks[optimizer] = optimizer.register_step_pre_hook(
                lambda *_: self.before_update()
            )

    def _carry_out(self, flight: _Flight) -> None:
        """Save a copy of the state. Runs in a thread of its own."""
        try:
            try:
                share = flight.snapshot.finish()
                _check_finite(share, flight.trained, step=flight.step)
            except Exception as error:
                self._tell_failure(flight.step, error)
                raise
            self._log.flush()  # whoever resumes from this checkpoint finds the steps before it
            self._commit(flight, share)
        except (AttemptReplaced, Unstorable) as error:
            self._error = error
        except TornCopy as error:
            self._blocking = True
            self._note_failure(flight.step, error)
            self.warn(
                "From now on the state is copied before training goes on, which takes longer."
            )
        except StorageError as error:
            self._note_failure(flight.step, error)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that trains
            self._error = error

    def _commit(self, flight: _Flight, share: Share) -> None:
        committed = self._store.save(flight.step, share, flight.facts)
        self._failures = [failure for failure in self._failures if failure[0] > flight.step]
        if committed is None:
            return
        self.newest = Newest(step=committed.step, weights_sha256=committed.weights_sha256)
        if self._writes:
            self._log.append(
                {
                    "type": "checkpoint",
                    "step": committed.step,
                    "bytes": committed.bytes,
                    "committed_at": committed.committed_at,
                    "weights_sha256": committed.weights_sha256,
                    "seconds": round(time.perf_counter() - flight.began, 4),
                    "stall_s": round(flight.called_s + flight.snapshot.waited_s, 4),
                    "behind_s": round(flight.behind_s, 4),
                    "update_waited_s": round(flight.snapshot.waited_s, 4),
                }
            )
        keep = self._job.checkpoint
        self._store.prune(keep.keep_last, keep.keep_every_steps, self._in_use, on_skip=self.warn)

    def _note_failure(self, step: int, error: StorageError) -> None:
        self._failures.append((step, str(error)))
        failed = len(self._failures)
        if self._writes:
            self._log.append(
                {"type": "save_failed", "step": step, "reason": str(error), "in_a_row": failed}
            )
        if failed >= self._max_failed:
            self._error = StorageError(
                f"{failed} saves in a row failed, the last at step {step}{self._last_good()}: "
                f"{error}"
            )

    def _last_good(self) -> str:
        if self.newest is None:
            return ", and there is no checkpoint yet"
        return f"; the newest checkpoint is that of step {self.newest.step}"

    def _agree(self, loaded: Loaded | None, like: Like | None) -> Loaded | None:
        """Return the checkpoint that all ranks can load: the oldest that any of them found."""
        if not grouped():
            return loaded
        found = 0 if loaded is None else loaded.step * _ATTEMPTS + loaded.attempt
        keys = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        keys[dist.get_rank()] = found
        sum_over_ranks(keys)
        oldest = int(keys.min())
        if oldest == 0 < int(keys.max()):
            raise CheckpointError(
                f"rank {int(keys.argmin())} finds no checkpoint, and others do. Check that all "
                "nodes see the same storage."
            )
        if oldest == found:
            return loaded
        step, attempt = divmod(oldest, _ATTEMPTS)
        self.warn(f"not all ranks can read a newer checkpoint than that of step {step}.")
        return self._store.load(step, attempt=attempt, like=like)

    def _facts(self, state: TrainState) -> dict[str, Any]:
        others = state.facts()
        return {
            "state_version": STATE_VERSION,
            "step": state.step,
            "epoch": state.step // self._plan.steps_per_epoch,
            "order": self._plan.state(),
            "job_hash": self._job_hash,
            "seed": self._job.seed,
            "world_size": dp_size(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            **({"others": others} if others else {}),
        }


def _check_finite(share: Share, trained: frozenset[str], *, step: int) -> None:
    """Refuse weights that are not finite: nobody could go on from them.

    Raises:
        NumericsError: Some are not; the message names them.
    """
    odd = sorted(
        name
        for name, tensor in share.tensors.items()
        if name in trained and name.startswith(WEIGHTS) and not _is_finite(tensor)
    )
    if odd:
        more = ", …" if len(odd) > _SHOWN else ""
        shown = ", ".join(name.removeprefix(WEIGHTS) for name in odd[:_SHOWN])
        raise NumericsError(
            f"step {step}: {len(odd)} weights hold values that are not finite: {shown}{more}. "
            "Nothing of it was saved. Lower the learning rate, warm it up, or clip the gradient."
        )


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.itemsize < torch.float32.itemsize:
        tensor = tensor.float()
    # a sum is not finite if a part is not, and takes a twentieth of looking at each
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
