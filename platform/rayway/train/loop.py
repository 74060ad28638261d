"""The training loop: from the state's step to the run's last, saving and evaluating on the way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rayway.data.feed import MicroBatch
from rayway.train.clock import Clock
from rayway.train.course import Course
from rayway.train.state import TrainState
from rayway.train.step import StepReport, StepSettings, on_device, train_step


class Observer(Protocol):
    """The loop's one extension point. It is handed numbers, never the loop."""

    def on_step(self, report: StepReport, micro_batches: Sequence[MicroBatch]) -> None:
        """Take note of a step. Called on every rank; raising ends the run."""

    def settle(self) -> None:
        """Be done with every step so far: a checkpoint, an evaluation or the end comes next."""


@dataclass(frozen=True, kw_only=True)
class Errands:
    """What the loop has done by others: it decides when, they know how."""

    save: Callable[[TrainState], None]
    evaluate: Callable[[TrainState], None]
    stop_asked: Callable[[], bool]
    """Has this rank seen a request to stop? All ranks stop after the same step."""


def train(
    state: TrainState,
    batches: Iterator[list[MicroBatch]],
    settings: StepSettings,
    course: Course,
    *,
    learning_rate: Callable[[int], float],
    errands: Errands,
    observers: Sequence[Observer],
    clock: Clock,
) -> bool:
    """Train to the end of the course, or to the step after which all ranks stop.

    Args:
        state: Changed in place.
        batches: This rank's micro-batches, a list a step, from ``state.step`` on.
        settings: What stays the same over all steps.
        course: What is due when.
        learning_rate: The rate of the update after so many finished steps.
        errands: How to save, evaluate and learn of a request to stop.
        observers: Are handed each step's numbers.
        clock: Is told where the time goes.

    Returns:
        True if the course is done, False if the run was asked to stop. Either way the state of the
        last step is saved.
    """
    device = next(state.model.parameters()).device
    state.model.train()
    stopping = False
    while state.step < course.steps and not stopping:
        micro_batches = on_device(next(batches), device)
        clock.lap("data_wait_s")
        report = train_step(
            state,
            micro_batches,
            settings,
            rows=course.rows_in_step(state.step),
            lr=learning_rate(state.step),
            stop=errands.stop_asked(),
        )
        clock.lap("step_s")
        for observer in observers:
            observer.on_step(report, micro_batches)
        # on a GPU this would wait for the step: there the request is looked at only where it may
        # wait anyway, which is often enough
        due = course.save_due(state.step) or course.evaluate_due(state.step)
        if device.type == "cpu" or due:
            stopping = report.stop_asked()
        clock.lap("log_s")
        if due or stopping:
            _settle(observers)
            clock.lap("log_s")
        if course.evaluate_due(state.step):
            errands.evaluate(state)
            clock.lap("evaluate_s")
        if course.save_due(state.step) or stopping:
            errands.save(state)
            clock.lap("save_s")
    _settle(observers)
    clock.lap("log_s")
    return state.step >= course.steps


def _settle(observers: Sequence[Observer]) -> None:
    for observer in observers:
        observer.settle()


def device_for(local_rank: int) -> torch.device:
    """Return the device of a rank: its GPU where there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")
