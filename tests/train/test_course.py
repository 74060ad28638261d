"""What is due at which step: pure functions, so a resumed run does the same."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_project import Project, write_rows

from rayway.data.index import Index, build_index
from rayway.errors import DataError, SpecError
from rayway.spec.job import (
    BatchSpec,
    CheckpointSpec,
    DataSpec,
    EvaluateSpec,
    Job,
    ModelSpec,
    OptimSpec,
)
from rayway.train.course import plan_course, plan_training


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return build_index(str(write_rows(tmp_path_factory.mktemp("rows") / "train", 50)))


def job_with(optim: OptimSpec, *, global_batch: int = 8, **changes: object) -> Job:
    sections = {
        "name": "tiny",
        "model": ModelSpec(build="usercode:build"),
        "loss": "usercode:loss",
        "data": DataSpec(train="/rows/train", validation="/rows/validation"),
        "batch": BatchSpec(global_batch=global_batch),
        "optim": optim,
    }
    return Job.model_validate({**sections, **changes})


@given(
    steps=st.integers(1, 200),
    evaluate_every=st.none() | st.integers(1, 60),
    save_every=st.none() | st.integers(1, 60),
)
def test_saves_and_evaluations_come_every_so_often_and_at_the_end(
    index: Index, steps: int, evaluate_every: int | None, save_every: int | None
) -> None:
    job = job_with(
        OptimSpec(lr=0.1, steps=steps),
        evaluate=EvaluateSpec(every_steps=evaluate_every),
        checkpoint=CheckpointSpec(every_steps=save_every),
    )
    course = plan_course(job, plan_training(job, [index]))
    finished = range(1, steps + 1)
    for due, every in ((course.evaluate_due, evaluate_every), (course.save_due, save_every)):
        multiples = set(range(every, steps + 1, every)) if every else set()
        assert {step for step in finished if due(step)} == multiples | {steps}
    assert course.steps == steps


@given(epochs=st.floats(0.01, 40), global_batch=st.integers(1, 50), everything=st.booleans())
def test_epochs_are_counted_in_steps(
    index: Index, epochs: float, global_batch: int, everything: bool
) -> None:
    data = DataSpec(train="/rows/train", cover="all" if everything else "drop")
    job = job_with(OptimSpec(lr=0.1, epochs=epochs), global_batch=global_batch, data=data)
    plan = plan_training(job, [index])
    course = plan_course(job, plan)
    steps_of_an_epoch = -(-50 // global_batch) if everything else 50 // global_batch
    assert plan.steps_per_epoch == steps_of_an_epoch
    assert course.steps >= 1
    assert abs(course.steps - epochs * steps_of_an_epoch) <= max(0.5, 1 - epochs)
    rows = [course.rows_in_step(step) for step in range(steps_of_an_epoch)]
    assert sum(rows) == (50 if everything else 50 - 50 % global_batch)


@pytest.mark.parametrize("due", ["evaluate_due", "save_due"])
def test_nothing_is_evaluated_without_validation_data_but_the_end_is_saved(
    index: Index, due: str
) -> None:
    job = job_with(OptimSpec(lr=0.1, steps=6), data=DataSpec(train="/rows/train"))
    course = plan_course(job, plan_training(job, [index]))
    expected = {"evaluate_due": set(), "save_due": {6}}[due]
    assert {step for step in range(1, 7) if getattr(course, due)(step)} == expected


def test_a_warm_up_longer_than_the_epochs_is_refused(index: Index) -> None:
    job = job_with(OptimSpec(lr=0.1, epochs=2, warmup_steps=13))
    with pytest.raises(
        SpecError, match=r"warmup_steps=13 .*epochs=2 of 6 steps are 12 .*Use 12 or less"
    ):
        plan_course(job, plan_training(job, [index]))
    fits = job_with(OptimSpec(lr=0.1, epochs=2, warmup_steps=12))
    assert plan_course(fits, plan_training(fits, [index])).steps == 12


def test_the_order_is_made_of_what_the_job_says(index: Index) -> None:
    job = job_with(
        OptimSpec(lr=0.1, steps=6),
        seed=7,
        data=DataSpec(train="/rows/train", cover="all", lanes=4, bands=2, window=3),
    )
    state = plan_training(job, [index]).state()
    asked = {"global_batch": 8, "seed": 7, "shuffle": True, "cover": "all"}
    asked |= {"lanes": 4, "bands": 2, "window": 3}
    assert state.items() >= asked.items()


def test_rows_that_fill_no_batch_are_refused(project: Project, tmp_path: Path) -> None:
    few = build_index(str(write_rows(tmp_path / "few", 7)))
    with pytest.raises(DataError, match="7 rows do not fill one global batch of 8"):
        plan_training(job_with(OptimSpec(lr=0.1, steps=6)), [few])
