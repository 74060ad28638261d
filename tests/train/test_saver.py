"""A saver commits whole states, finds them again, and refuses those of another order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_project import Lives, Project, write_rows
from torch import Tensor

from rayway.checkpoint.share import plan_share
from rayway.checkpoint.store import CheckpointStore
from rayway.checkpoint.tensors import weights_sha256
from rayway.data.index import build_index
from rayway.errors import CheckpointError, DataError
from rayway.spec.code import enter_code_root
from rayway.spec.job import BatchSpec, CheckpointSpec, DataSpec, Job
from rayway.spec.load import job_hash
from rayway.storage.runs import events_key
from rayway.telemetry.events import EventLog
from rayway.train.build import build_state
from rayway.train.course import plan_training
from rayway.train.saver import STATE_VERSION, Saver
from rayway.train.state import TrainState
from rayway.train.stateful import OptimizerGroups, pack


class Desk:
    """One attempt's saver with its state and log."""

    def __init__(self, lives: Lives, job: Job, *, writes: bool = True) -> None:
        self.lives, self.job = lives, job
        self.attempt = lives.folder.next_attempt({})
        key = events_key(self.attempt, 0)
        self.log = EventLog(lambda data: lives.folder.objects.append(key, data), flush_s=60)
        self.plan = plan_training(job, [build_index(place) for place in job.data.sources])
        self.store = CheckpointStore(
            lives.folder,
            attempt=self.attempt,
            is_newest_attempt=lambda: lives.folder.is_newest(self.attempt),
        )
        self.saver = Saver(self.store, self.log, job=job, plan=self.plan, writes=writes)
        self.state: TrainState = build_state(job, torch.device("cpu"))

    def save(self, *steps: int) -> None:
        """Save at each step, with weights that tell which."""
        for step in steps:
            self.state.step = step
            for value in self.state.model.parameters():
                value.grad = torch.full_like(value, step)
            self.state.optimizer.step()
            self.saver.save(self.state)
        self.saver.finish()

    def steps(self) -> list[int]:
        return [each.step for each in self.store.committed()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        self.log.flush()
        return self.lives.events(self.attempt, kind)


@pytest.fixture
def desk(project: Project) -> Callable[..., Desk]:
    enter_code_root(project.code)
    made: list[Desk] = []

    def desk(job: Job | None = None, *, writes: bool = True) -> Desk:
        job = job or project.job()
        lives = made[0].lives if made else project.create("run", job)
        made.append(Desk(lives, job, writes=writes))
        return made[-1]

    return desk


def copy_of(state: TrainState) -> dict[str, dict[str, Tensor]]:
    return {s: {n: v.clone() for n, v in part.items()} for s, part in state.tensors().items()}


def test_before_the_first_save_there_is_nothing(desk: Callable[..., Desk]) -> None:
    assert desk().saver.find() is None


def test_a_saved_state_is_found_whole_with_all_facts(desk: Callable[..., Desk]) -> None:
    first = desk()
    first.save(2, 4)
    saved = copy_of(first.state)
    second = desk()
    loaded = second.saver.find()
    assert loaded is not None
    assert loaded.step == 4
    groups = pack(OptimizerGroups(first.state.optimizer).state_dict(), name="optimizer-groups")[0]
    assert loaded.facts == {
        "others": {"optimizer-groups": groups},
        "state_version": STATE_VERSION,
        "step": 4,
        "epoch": 1,  # 24 rows in batches of 8
        "order": first.plan.state(),
        "job_hash": job_hash(first.job),
        "seed": 0,
        "world_size": 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    second.state.restore(loaded.tensors, loaded.step, loaded.facts["others"])
    for stem, part in copy_of(second.state).items():
        assert part.keys() == saved[stem].keys()
        assert all(torch.equal(value, saved[stem][name]) for name, value in part.items())


def test_a_save_is_told_after_the_commit(desk: Callable[..., Desk]) -> None:
    one = desk()
    one.log.append({"type": "step", "step": 2, "loss": 1.0})
    one.save(2)
    [event] = one.events("checkpoint")
    [committed] = one.store.committed()
    assert event["step"] == 2
    assert event["weights_sha256"] == weights_sha256(one.state.tensors()["model"])
    assert (event["bytes"], event["committed_at"]) == (committed.bytes, committed.committed_at)
    assert event["seconds"] > 0


def test_the_steps_before_a_checkpoint_are_stored_before_it(desk: Callable[..., Desk]) -> None:
    one = desk()
    one.log.append({"type": "step", "step": 2, "loss": 1.0})
    one.save(2)
    assert [event["step"] for event in one.lives.events(one.attempt, "step")] == [2]


def test_only_the_rank_that_writes_speaks(desk: Callable[..., Desk]) -> None:
    silent = desk(writes=False)
    silent.save(2)
    silent.saver.warn("nobody hears this")
    assert silent.steps() == [2]
    silent.log.append({"type": "warning", "message": "the only line"})
    assert [event["message"] for event in silent.events("warning")] == ["the only line"]
    assert silent.events("checkpoint") == []


def test_older_ones_retire_by_the_jobs_rule(desk: Callable[..., Desk], project: Project) -> None:
    rule = CheckpointSpec(every_steps=2, keep_last=2, keep_every_steps=4)
    one = desk(project.job(checkpoint=rule))
    one.save(2, 4, 6, 8, 10)
    assert one.steps() == [4, 8, 10]


def test_the_one_resumed_from_stays(desk: Callable[..., Desk], project: Project) -> None:
    job = project.job(checkpoint=CheckpointSpec(every_steps=2, keep_last=1))
    desk(job).save(2)
    second = desk(job)
    assert second.saver.find() is not None
    second.save(4, 6)
    assert second.steps() == [2, 6]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"batch": BatchSpec(global_batch=4)}, "global_batch was 8 and is now 4"),
        ({"data": "unshuffled"}, "shuffle was True and is now False"),
        ({"data": "other rows"}, "fingerprint was"),
    ],
)
def test_a_checkpoint_of_another_order_is_refused(
    changes: dict[str, Any], field: str, desk: Callable[..., Desk], project: Project, tmp_path: Path
) -> None:
    desk().save(2)
    if changes.get("data") == "unshuffled":
        changes = {"data": DataSpec(train=str(project.train), shuffle=False)}
    elif "data" in changes:
        changes = {"data": DataSpec(train=str(write_rows(tmp_path / "other", 24, seed=5)))}
    with pytest.raises(DataError, match=f"another order of samples: {field}"):
        desk(project.job(**changes)).saver.find()


@pytest.mark.parametrize("facts", [{"state_version": 99}, {"order": None}, {}])
def test_a_checkpoint_of_another_version_is_refused(
    facts: dict[str, Any], desk: Callable[..., Desk]
) -> None:
    one = desk()
    whole = {"state_version": STATE_VERSION, "order": one.plan.state(), **facts}
    one.store.save(2, plan_share(one.state.tensors()), whole if facts else {})
    with pytest.raises(CheckpointError, match=r"step 2 has state version .*reads 1"):
        desk().saver.find()


def test_a_damaged_one_is_skipped_with_a_warning(desk: Callable[..., Desk]) -> None:
    one = desk()
    one.save(2, 4)
    path = one.lives.folder.checkpoints.local_path(
        "step-00000004.attempt-001/rank-00000.model-0.safetensors"
    )
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    second = desk()
    loaded = second.saver.find()
    assert loaded is not None
    assert loaded.step == 2
    [warning] = second.events("warning")
    assert "step-00000004.attempt-001 is skipped" in warning["message"]
