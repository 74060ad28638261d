"""When things happen: saves, evaluations, the end, and an end that was asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayway.data.feed import MicroBatch
from rayway.train.clock import Clock
from rayway.train.course import Course
from rayway.train.loop import Errands, device_for, train
from rayway.train.loss import Batch, Loss
from rayway.train.ranks import grouped
from rayway.train.state import TrainState
from rayway.train.step import StepReport, StepSettings


def squares(model: nn.Module, batch: Batch) -> Loss:
    return Loss(sum=model(batch["x"]).square().sum(), weight=len(batch["x"]))


@dataclass
class Diary:
    """Writes down what the loop does, as an observer and as its errands."""

    lines: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def on_step(self, report: StepReport, micro_batches: Sequence[MicroBatch]) -> None:
        self.lines.append(f"step {report.step}")
        self.rates.append(report.lr)

    def settle(self) -> None:
        self.lines.append("settle")

    def save(self, state: TrainState) -> None:
        self.lines.append(f"save {state.step}")

    def evaluate(self, state: TrainState) -> None:
        self.lines.append(f"evaluate {state.step}")


def batches() -> Iterator[list[MicroBatch]]:
    while True:
        yield [MicroBatch({"x": torch.ones(2, 3)}, np.arange(2), 2, 0)]


def new_state(step: int = 0) -> TrainState:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    replica = DistributedDataParallel(model) if grouped() else model
    return TrainState(model, replica, torch.optim.SGD(model.parameters(), lr=0.1), step)


def run(
    steps: int = 6,
    *,
    save: tuple[int, ...] = (6,),
    evaluate: tuple[int, ...] = (),
    state: TrainState | None = None,
    stop_at: int | None = None,
    diary: Diary | None = None,
) -> tuple[bool, Diary, TrainState]:
    """Run the loop; a request to stop is seen once ``stop_at`` steps are done."""
    diary, state = diary or Diary(), state or new_state()
    done = train(
        state,
        batches(),
        StepSettings(loss_function=squares, seed=0, max_norm=None),
        Course(
            steps=steps,
            rows_in_step=lambda step: 2,
            save_due=lambda step: step in save,
            evaluate_due=lambda step: step in evaluate,
        ),
        learning_rate=lambda step: 0.001 * (step + 1),
        errands=Errands(
            save=diary.save,
            evaluate=diary.evaluate,
            stop_asked=lambda: stop_at is not None and state.step >= stop_at,
        ),
        observers=[diary],
        clock=Clock(),
    )
    return done, diary, state


def without_settling(diary: Diary) -> list[str]:
    return [line for line in diary.lines if line != "settle"]


def test_it_saves_and_evaluates_when_due_and_evaluates_first() -> None:
    done, diary, state = run(save=(2, 4, 6), evaluate=(3, 6))
    assert done
    assert state.step == 6
    assert without_settling(diary) == [
        *("step 1", "step 2", "save 2", "step 3", "evaluate 3", "step 4", "save 4"),
        *("step 5", "step 6", "evaluate 6", "save 6"),
    ]


def test_records_are_settled_before_every_save_and_evaluation_and_at_the_end() -> None:
    _, diary, _ = run(save=(2, 6), evaluate=(3,))
    for due in ("save 2", "evaluate 3", "save 6"):
        assert diary.lines[diary.lines.index(due) - 1] == "settle"
    assert diary.lines[-1] == "settle"


def test_a_run_that_begins_later_goes_on_with_the_next_step_and_its_rate() -> None:
    _, diary, _ = run(state=new_state(step=4))
    assert without_settling(diary) == ["step 5", "step 6", "save 6"]
    assert diary.rates == pytest.approx([0.005, 0.006])


def test_a_run_that_is_done_already_does_nothing() -> None:
    done, diary, _ = run(state=new_state(step=6))
    assert done
    assert without_settling(diary) == []


@pytest.mark.parametrize("stop_at", range(6))
def test_a_request_to_stop_ends_it_after_the_step_with_a_save(stop_at: int) -> None:
    done, diary, state = run(stop_at=stop_at)
    assert state.step == stop_at + 1
    assert done is (state.step == 6)
    assert without_settling(diary)[-1] == f"save {state.step}"
    assert sum(line.startswith("save") for line in diary.lines) == 1


def test_the_model_trains_in_train_mode() -> None:
    state = new_state()
    state.model.eval()
    run(state=state)
    assert state.model.training


def test_a_failing_observer_ends_the_run_before_the_save() -> None:
    class Refusing(Diary):
        def settle(self) -> None:
            raise ArithmeticError("nan")

    diary = Refusing()
    with pytest.raises(ArithmeticError):
        run(save=(2,), diary=diary)
    assert diary.lines == ["step 1", "step 2"]


def stops_on_a_rank(asking: int, stop_at: int) -> tuple[bool, int, list[str]]:
    asked = torch.distributed.get_rank() == asking
    done, diary, state = run(steps=9, stop_at=stop_at if asked else None)
    return done, state.step, [line for line in diary.lines if line.startswith("save")]


@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("stop_at", [0, 3])
def test_all_ranks_stop_after_the_step_in_which_one_is_asked(
    asking: int, stop_at: int, ranks: Ranks
) -> None:
    stopped = (False, stop_at + 1, [f"save {stop_at + 1}"])
    assert ranks.run(stops_on_a_rank, asking, stop_at, world_size=2) == [stopped] * 2


def test_time_is_given_to_parts() -> None:
    clock = Clock()
    state, diary = new_state(), Diary()
    parts: dict[str, Any] = {"save_due": lambda step: True, "evaluate_due": lambda step: False}
    train(
        state,
        batches(),
        StepSettings(loss_function=squares, seed=0, max_norm=None),
        Course(steps=3, rows_in_step=lambda step: 2, **parts),
        learning_rate=lambda step: 0.1,
        errands=Errands(save=diary.save, evaluate=diary.evaluate, stop_asked=lambda: False),
        observers=[],
        clock=clock,
    )
    assert clock.seconds()["step_s"] > 0
    assert clock.seconds()["evaluate_s"] == 0


# with a GPU there is nothing to see here: device_for then gives the GPU
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_gpus_every_rank_is_on_the_cpu() -> None:
    assert [device_for(rank).type for rank in range(3)] == ["cpu"] * 3
