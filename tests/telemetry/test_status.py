"""Where a run stands, from its events."""

import pytest

from rayway.telemetry.events import Record
from rayway.telemetry.status import WINDOW_S, Status, describe_workers


def start(from_step: int = 0, attempt: int = 1) -> Record:
    return {
        "type": "start",
        "t": 0.0,
        "attempt": attempt,
        "world_size": 2,
        "device": "cpu",
        "from_step": from_step,
        "steps": 1000,
    }


def step(number: int, t: float) -> Record:
    return {"type": "step", "t": t, "step": number, "loss": 1.0 / number, "lr": 0.1, "rows": 8}


def test_speed_and_time_left_come_from_the_last_seconds() -> None:
    status = Status()
    status.take(start())
    t = 0.0
    for number in range(1, 101):  # 1 step a second, then 10
        t += 1.0
        status.take(step(number, t))
    assert status.rows_per_s == pytest.approx(8)
    for number in range(101, 501):
        t += 0.1
        status.take(step(number, t))
    assert WINDOW_S < 400 * 0.1
    assert status.rows_per_s == pytest.approx(80, rel=0.05)
    assert status.eta_s == pytest.approx(50, rel=0.05)
    assert (status.step, status.loss) == (500, 1 / 500)


def test_speed_is_unknown_at_first_and_after_a_restart() -> None:
    status = Status()
    status.take(start())
    assert (status.rows_per_s, status.eta_s) == (None, None)
    status.take(step(1, 1.0))
    assert status.rows_per_s is None
    status.take(step(2, 2.0))
    assert status.rows_per_s == 8
    status.take(start(from_step=1, attempt=2))
    assert (status.rows_per_s, status.step, status.attempt) == (None, 1, 2)


def test_without_a_number_of_steps_there_is_no_eta() -> None:
    status = Status()
    for number in range(1, 5):
        status.take(step(number, float(number)))
    assert (status.eta_s, status.state) == (None, "RUNNING")


def test_the_newest_checkpoint_evaluation_and_end_are_kept() -> None:
    status = Status()
    status.take(start())
    status.take({"type": "checkpoint", "t": 1.0, "step": 5, "bytes": 10})
    status.take({"type": "evaluate", "t": 2.0, "step": 6, "metrics": {"accuracy": 0.5}})
    status.take({"type": "end", "t": 3.0, "state": "STOPPED", "step": 7})
    assert status.checkpoint is not None
    assert status.checkpoint["step"] == 5
    assert (status.metrics, status.metrics_step) == ({"accuracy": 0.5}, 6)
    assert (status.state, status.step, status.heard_at) == ("STOPPED", 7, 3.0)


@pytest.mark.parametrize(
    ("event", "text"),
    [({"world_size": 1}, "1 worker"), ({"world_size": 4, "device": "cuda"}, "4 workers on cuda")],
)
def test_workers_are_counted(event: Record, text: str) -> None:
    assert describe_workers(event) == text
