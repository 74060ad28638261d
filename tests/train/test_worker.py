"""Whole runs, on one rank and on two: a killed one goes on to what it would have been."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from rank_pool import Ranks
from tiny_project import Lives, Project, live
from torch import Tensor

from rayway.checkpoint.store import CheckpointStore, Loaded
from rayway.errors import SpecError
from rayway.spec.job import (
    BatchSpec,
    CheckpointSpec,
    DataSpec,
    EvaluateSpec,
    Job,
    ModelSpec,
    OptimSpec,
)
from rayway.storage.runs import STOP_KEY, RunFolder
from rayway.train.records import NumericsError
from rayway.train.worker import RankTask, run_rank


def rank_task(url: str, attempt: int, rank: int) -> RankTask:
    return RankTask(run_url=url, attempt=attempt, rank=rank, local_rank=rank)


def live_on_a_rank(url: str, attempt: int) -> str:
    import torch.distributed as dist  # noqa: PLC0415 - runs in a rank's process

    try:
        return run_rank(rank_task(url, attempt, dist.get_rank()))
    except ValueError as error:
        return str(error)
    except RuntimeError as error:  # the other rank was quicker to raise, and is gone
        if "gloo" not in str(error):
            raise
        return str(error)


def live_on(ranks: Ranks, lives: Lives, world_size: int) -> list[str]:
    attempt = lives.folder.next_attempt({})
    url = lives.folder.url
    answers: list[str] = ranks.run(live_on_a_rank, url, attempt, world_size=world_size)
    return answers


def newest(lives: Lives) -> Loaded:
    store = CheckpointStore(lives.folder, attempt=99, is_newest_attempt=lambda: False)
    loaded = store.load_newest(on_skip=print)
    assert loaded is not None
    return loaded


def optimizer_steps(lives: Lives) -> set[float]:
    moments: dict[str, Tensor] = newest(lives).tensors["optimizer"]
    return {value.item() for name, value in moments.items() if name.endswith("/step")}


RANDOM: dict[str, JsonValue] = {"dropout": 0.5, "noise": 0.1}
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout and draws": {"model": ModelSpec(build="usercode:build", args=RANDOM)},
    "a transform that draws": {"transform": "usercode:jitter"},
    "bf16 with dropout": {
        "model": ModelSpec(build="usercode:build", args=RANDOM),
        "precision": "bf16",
    },
    "sgd in micro-batches": {
        "optim": OptimSpec(name="sgd", lr=0.05, steps=9, schedule="linear"),
        "batch": BatchSpec(global_batch=8, micro_batch=4),
        "model": ModelSpec(build="usercode:build", args=RANDOM),
    },
}


def job_like(project: Project, kind: str, **more: Any) -> Job:
    changes = {**JOBS[kind], **more}
    transform = changes.pop("transform", None)
    if transform is not None:
        changes["data"] = DataSpec(train=str(project.train), transform=transform)
    return project.job(**changes)


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize(
    ("save_every", "faults"),
    [(3, [5]), (2, [6, 2]), (None, [4])],
    ids=["at an epoch's end", "mid-epoch, twice", "before any"],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    kind: str, save_every: int | None, faults: list[int], project: Project
) -> None:
    accumulation = 2 if "micro" in kind else 1
    job = job_like(project, kind, checkpoint=CheckpointSpec(every_steps=save_every))
    calm = project.run("calm", job)
    killed = project.run("killed", job, faults=[call * accumulation for call in faults])
    assert len(calm.steps()) == 9
    for name in ("loss_hex", "lr", "grad_norm", "rows", "ids"):
        assert killed.steps(name) == calm.steps(name)
    assert killed.end()["weights_sha256"] == calm.end()["weights_sha256"]
    assert newest(killed).weights_sha256 == calm.end()["weights_sha256"]


def test_draws_matter_in_these_jobs(project: Project) -> None:
    curves = {kind: project.run(f"run-{i}", job_like(project, kind)) for i, kind in enumerate(JOBS)}
    losses = [tuple(lives.steps()) for lives in curves.values()]
    assert len(set(losses)) == len(JOBS)


def test_an_epochs_end_is_no_extra_step(project: Project) -> None:
    """24 rows in batches of 8: three steps an epoch, a stop after each, three epochs."""
    job = project.job(optim=OptimSpec(lr=0.01, epochs=3), checkpoint=CheckpointSpec(every_steps=3))
    calm, stopped = project.run("calm", job), project.run("stopped", job, faults=[4, 4])
    assert [stopped.events(n, "start")[0]["from_step"] for n in (1, 2, 3)] == [0, 3, 6]
    logged = [step["step"] for n in (1, 2, 3) for step in stopped.events(n, "step")]
    assert logged == list(range(1, 10))
    assert stopped.steps() == calm.steps()
    assert optimizer_steps(stopped) == {9}
    loaded = newest(stopped)
    assert (loaded.step, loaded.facts["epoch"]) == (9, 3)


@pytest.mark.parametrize("kind", ["plain", "dropout and draws"])
def test_ranks_that_are_killed_go_on_to_the_same_bits(
    kind: str, project: Project, ranks: Ranks
) -> None:
    job = job_like(project, kind)
    calm, killed = project.create("calm", job), project.create("killed", job)
    assert live_on(ranks, calm, 2) == ["FINISHED"] * 2
    project.faults(6, 6)  # a line for each rank's process
    assert "a fault of the test" in live_on(ranks, killed, 2)
    assert live_on(ranks, killed, 2) == ["FINISHED"] * 2
    assert killed.steps() == calm.steps()
    assert killed.steps("ids") == calm.steps("ids")
    assert killed.end()["weights_sha256"] == calm.end()["weights_sha256"]
    kinds = {killed.error(1, rank=rank)["kind"] for rank in (0, 1)}
    assert "user" in kinds <= {"user", "peer"}  # one may only see that the other is gone


def test_rates_losses_and_samples_are_the_same_on_any_shape(project: Project, ranks: Ranks) -> None:
    """Warm-up of 4 to 1e-3, 12 steps; accumulate 1, 2, 4 on 1 and 2 ranks; and after a resume."""
    optim = OptimSpec(lr=1e-3, steps=12, warmup_steps=4, schedule="linear")
    runs = []
    for world_size in (1, 2):
        for accumulation in (1, 2, 4):
            batch = BatchSpec(global_batch=8, micro_batch=8 // world_size // accumulation)
            lives = project.create(
                f"run-{world_size}-{accumulation}", project.job(optim=optim, batch=batch)
            )
            assert set(live_on(ranks, lives, world_size)) == {"FINISHED"}
            runs.append(lives)
    resumed = project.run("resumed", project.job(optim=optim), faults=[8])
    rates = runs[0].steps("lr")
    assert rates[:4] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    assert len(rates) == 12
    for lives in [*runs[1:], resumed]:
        assert lives.steps("lr") == rates
        assert lives.steps("ids") == runs[0].steps("ids")
        assert lives.steps("loss") == pytest.approx(runs[0].steps("loss"), rel=1e-5)


def test_a_run_goes_on_on_another_number_of_ranks(project: Project, ranks: Ranks) -> None:
    lives = project.create("run", project.job())
    calm = project.run("calm", project.job())
    project.faults(6, 6)
    live_on(ranks, lives, 2)
    assert live(lives.folder) == "FINISHED"
    assert lives.steps("ids") == calm.steps("ids")
    assert lives.steps("loss") == pytest.approx(calm.steps("loss"), rel=1e-5)


def test_validation_is_the_same_on_any_number_of_ranks(project: Project, ranks: Ranks) -> None:
    job = project.job(
        data=DataSpec(train=str(project.train), validation=str(project.validation)),
        evaluate=EvaluateSpec(every_steps=4, micro_batch=2),
    )
    runs = [project.create(f"run-{world_size}", job) for world_size in (1, 2)]
    for world_size, lives in enumerate(runs, start=1):
        live_on(ranks, lives, world_size)
    found = [lives.events(1, "evaluate") for lives in runs]
    for one, two in zip(*found, strict=True):
        assert one["rows"] == two["rows"] == 5
        assert one["step"] == two["step"]
        assert one["metrics"] == pytest.approx(two["metrics"], rel=1e-5)
    assert [event["step"] for event in found[0]] == [4, 8, 9]


def test_evaluating_changes_nothing_of_the_training(project: Project) -> None:
    model = ModelSpec(build="usercode:build", args=RANDOM)
    data = DataSpec(train=str(project.train), validation=str(project.validation))
    often = project.job(model=model, data=data, evaluate=EvaluateSpec(every_steps=1))
    calm, watched = project.run("calm", project.job(model=model)), project.run("watched", often)
    assert watched.steps() == calm.steps()
    assert watched.end()["weights_sha256"] == calm.end()["weights_sha256"]


def test_bf16_trains_in_bf16_near_fp32(project: Project) -> None:
    curves = [
        project.run(precision, project.job(precision=precision, loss=loss)).steps("loss")
        for precision, loss in (("fp32", "usercode:loss"), ("bf16", "usercode:in_bf16"))
    ]
    assert curves[0] != curves[1]
    assert curves[1] == pytest.approx(curves[0], rel=2e-2)
    [dtype] = {v.dtype for v in newest(Lives(run_at(project, "bf16"))).tensors["model"].values()}
    assert str(dtype) == "torch.float32"


def run_at(project: Project, run_id: str) -> RunFolder:
    return RunFolder.open(str(project.root / "runs" / run_id))


def test_a_finished_run_that_lost_its_last_word_says_it_again(project: Project) -> None:
    lives = project.run("run", project.job())
    assert live(lives.folder) == "FINISHED"
    assert lives.events(2, "step") == []
    assert lives.end()["step"] == 9
    assert lives.end()["weights_sha256"] == lives.events(1, "end")[0]["weights_sha256"]


def test_a_run_that_is_asked_to_stop_commits_and_goes_on_later(project: Project) -> None:
    job = project.job(optim=OptimSpec(lr=0.01, steps=4000))
    lives = project.create("run", job)
    lives.folder.write(STOP_KEY, {"by": "test"})  # seen within half a second
    assert live(lives.folder) == "STOPPED"
    end = lives.end()
    assert 0 < end["step"] < 4000
    assert newest(lives).step == end["step"]
    assert newest(lives).weights_sha256 == end["weights_sha256"]
    assert (end["state"], end["reason"]) == ("STOPPED", "asked to stop")


def test_the_record_of_an_attempt_says_what_ran_and_where_the_time_went(project: Project) -> None:
    lives = project.run("run", project.job())
    [start] = lives.events(1, "start")
    asked = {"attempt": 1, "world_size": 1, "from_step": 0, "steps": 9, "device": "cpu"}
    assert start.items() >= asked.items()
    assert [event["step"] for event in lives.events(1, "checkpoint")] == [2, 4, 6, 8, 9]
    end = lives.end()
    assert end["state"] == "FINISHED"
    assert end["clock"]["step_s"] > 0
    assert end.items() <= lives.events(1, "end")[0].items()


def test_an_error_of_the_users_is_kept_with_its_step(project: Project) -> None:
    project.faults(4)
    lives = project.create("run", project.job())
    with pytest.raises(ValueError, match="a fault of the test"):
        live(lives.folder)
    error = lives.error(1)
    assert (error["kind"], error["error"], error["step"]) == ("user", "ValueError", 3)
    assert "usercode.py" in error["message"]
    assert str(Path("rayway") / "train") not in error["message"]
    assert len(lives.events(1, "step")) == 3


def test_numbers_that_are_no_numbers_end_the_run_before_a_save(project: Project) -> None:
    lives = project.create("run", project.job(loss="usercode:broken"))
    with pytest.raises(NumericsError, match="step 1: the loss is nan"):
        live(lives.folder)
    assert lives.error(1)["kind"] == "refused"
    with pytest.raises(AssertionError):
        newest(lives)


def test_code_that_is_not_there_is_refused(project: Project) -> None:
    lives = project.create("run", project.job(loss="usercode:lost"))
    with pytest.raises(SpecError, match="usercode:lost"):
        live(lives.folder)
    assert lives.error(1)["exit_code"] == 2
