"""Where a run stands, gathered from its events as they come."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayway.telemetry.events import Record

WINDOW_S = 20.0
"""Speed is the mean over this many seconds."""

_SAMPLE_S = 0.25


@dataclass(kw_only=True, slots=True)
class Status:
    """The newest of everything a run has said."""

    steps: int | None = None
    """Steps of the whole run; None until it is known."""

    state: str = "STARTING"
    """STARTING, RUNNING, then the state the run ends in."""

    attempt: int | None = None
    """The life of the worker group that is being watched."""

    workers: str = ""
    """How many workers on what, e.g. ``2 workers on cpu``."""

    step: int = 0
    """Finished steps."""

    loss: float | None = None
    """Mean loss of the newest step."""

    lr: float | None = None
    """Learning rate of the newest step."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the newest evaluation found."""

    metrics_step: int | None = None
    """The step of the newest evaluation."""

    checkpoint: Record | None = None
    """The event of the newest committed checkpoint."""

    heard_at: float | None = None
    """Time of the newest event, unix seconds by the run's clock."""

    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)
    _rows: int = 0

    def take(self, record: Record) -> None:
        """Take note of one event."""
        self.heard_at = record.get("t", self.heard_at)
        match record["type"]:
            case "step":
                self._take_step(record)
            case "start":
                self._take_start(record)
            case "evaluate":
                self.metrics, self.metrics_step = record.get("metrics", {}), record.get("step")
            case "checkpoint":
                self.checkpoint = record
            case "end":
                self.state = record.get("state", "ENDED")
                self.step = record.get("step", self.step)

    def _take_start(self, record: Record) -> None:
        self.state = "RUNNING"
        self.attempt = record.get("attempt", self.attempt)
        self.steps = record.get("steps", self.steps)
        self.step = record.get("from_step", self.step)
        self.workers = describe_workers(record)
        self._samples.clear()

    def _take_step(self, record: Record) -> None:
        self.state = "RUNNING"
        self.step = record["step"]
        self.loss, self.lr = record.get("loss"), record.get("lr")
        self._rows += record.get("rows", 0)
        t = record.get("t", 0.0)
        if not self._samples or t - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((t, self.step, self._rows))
            while t - self._samples[0][0] > WINDOW_S and len(self._samples) > 2:
                self._samples.popleft()

    def _per_second(self, which: int) -> float | None:
        if len(self._samples) < 2:
            return None
        first, last = self._samples[0], self._samples[-1]
        return (last[which] - first[which]) / (last[0] - first[0])

    @property
    def rows_per_s(self) -> float | None:
        """Rows of the global batch trained on per second; None until it is known."""
        return self._per_second(2)

    @property
    def eta_s(self) -> float | None:
        """Seconds left, at the present speed; None if not known."""
        per_s = self._per_second(1)
        if self.steps is None or not per_s or per_s < 0:
            return None
        return max(self.steps - self.step, 0) / per_s


def describe_workers(start: Mapping[str, Any]) -> str:
    """Return who trains in a ``start`` event, e.g. ``2 workers on cpu``."""
    count = start.get("world_size", 1)
    device = f" on {start['device']}" if start.get("device") else ""
    return f"{count} worker{'' if count == 1 else 's'}{device}"
