"""Saving a run's state, and taking it up again."""

import time
from typing import Any

import torch

from rayway.checkpoint.store import CheckpointStore, Loaded
from rayway.checkpoint.tensors import weights_sha256
from rayway.data.plan import Plan
from rayway.errors import CheckpointError
from rayway.spec.job import Job
from rayway.spec.load import job_hash
from rayway.spec.own import OwnSpec
from rayway.telemetry.events import EventLog
from rayway.train.ranks import dp_size
from rayway.train.state import TrainState, to_host

STATE_VERSION = 1


class Saver:
    """Writes the state of a run as checkpoints. Every rank has one, rank 0 writes.

    Everything that a resumed run needs is in a checkpoint. Random draws are not among it: they are
    a function of the job's seed and of the step (``draws.py``), and so is the learning rate.
    """

    def __init__(
        self, store: CheckpointStore, log: EventLog, *, job: Job | OwnSpec, plan: Plan, writes: bool
    ) -> None:
        self._store = store
        self._log = log
        self._job = job
        self._plan = plan
        self._writes = writes
        self._in_use: int | None = None

    def warn(self, message: str) -> None:
        """Put a warning into the event log, once: of all ranks the one that writes says it."""
        if self._writes:
            self._log.append({"type": "warning", "message": message})

    def find(self) -> Loaded | None:
        """Return the newest sound checkpoint, checked against the job; ``None`` before the first.

        Raises:
            CheckpointError: There were checkpoints and none is sound, or it is not of this job.
            DataError: It was made under another order of samples.
        """
        loaded = self._store.load_newest(on_skip=self.warn)
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
        return loaded

    def save(self, state: TrainState) -> None:
        """Commit the state as it is now, and retire older checkpoints by the job's rule.

        Raises:
            StorageError: It could not be written. Older checkpoints are untouched.
        """
        if not self._writes:
            return
        began = time.perf_counter()
        self._log.flush()  # whoever resumes from this checkpoint finds the steps before it
        tensors = to_host(state.tensors())
        committed = self._store.save(
            state.step, tensors, self._facts(state), weights_sha256(tensors["model"])
        )
        keep = self._job.checkpoint
        self._store.prune(keep.keep_last, keep.keep_every_steps, self._in_use, on_skip=self.warn)
        self._log.append(
            {
                "type": "checkpoint",
                "step": committed.step,
                "bytes": committed.bytes,
                "committed_at": committed.committed_at,
                "weights_sha256": committed.weights_sha256,
                "seconds": round(time.perf_counter() - began, 4),
            }
        )

    def _facts(self, state: TrainState) -> dict[str, Any]:
        others = state.facts()
        return {
            "state_version": STATE_VERSION,
            "step": state.step,
            "epoch": state.step // self._plan.steps_per_epoch,
            "order": self._plan.state(),
            "job_hash": job_hash(self._job),
            "seed": self._job.seed,
            "world_size": dp_size(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            **({"others": others} if others else {}),
        }
