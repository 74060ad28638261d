"""A saver commits whole states beside training, finds them again, and refuses those of another
order. What goes wrong in its thread is told, and ends the run if it has to."""

import threading
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import Ranks
from tiny_project import Lives, Project, write_rows
from torch import Tensor, nn

from rayway.checkpoint.share import plan_share
from rayway.checkpoint.store import CheckpointStore
from rayway.checkpoint.tensors import weights_sha256
from rayway.data.index import build_index
from rayway.errors import CheckpointError, DataError, StorageError
from rayway.spec.code import enter_code_root
from rayway.spec.job import BatchSpec, CheckpointSpec, DataSpec, Job
from rayway.spec.load import job_from_json, job_hash
from rayway.storage.objects import Objects
from rayway.storage.runs import RunFolder, events_key
from rayway.telemetry.events import EventLog
from rayway.train.build import build_state
from rayway.train.course import plan_training
from rayway.train.records import NumericsError
from rayway.train.saver import MAX_FAILED_SAVES, STATE_VERSION, Saver
from rayway.train.state import TrainState
from rayway.train.stateful import OptimizerGroups, pack


class Desk:
    """One attempt's saver with its state and log."""

    moods: "Moods"

    def __init__(
        self, lives: Lives, job: Job, *, writes: bool = True, moody: "Moody | None" = None
    ) -> None:
        self.lives, self.job = lives, job
        self.attempt = lives.folder.next_attempt({})
        key = events_key(self.attempt, 0)
        self.log = EventLog(lambda data: lives.folder.objects.append(key, data), flush_s=60)
        self.plan = plan_training(job, [build_index(place) for place in job.data.sources])
        self.store = CheckpointStore(
            RunFolder(moody) if moody is not None else lives.folder,
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

    def train(self, steps: int, *, save_at: Container[int] = ()) -> None:
        """Train on as a loop does, with weights and buffers that tell the step."""
        for _ in range(steps):
            for value in self.state.model.parameters():
                value.grad = torch.full_like(value, self.state.step)
            self.state.optimizer.step()
            self.state.step += 1
            if self.state.step in save_at:
                self.saver.save(self.state)

    def steps(self) -> list[int]:
        return [each.step for each in self.store.committed()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        self.log.flush()
        return self.lives.events(self.attempt, kind)


class Moody(Objects):
    """A storage that fails, or waits, when it is told to."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.moods = Moods()

    def put(self, key: str, data: Any) -> None:
        if key.endswith(".safetensors"):
            self.moods.puts.append(key)
            if self.moods.error is not None:
                raise self.moods.error
            assert self.moods.go_on.wait(20)
        super().put(key, data)


class Moods:
    """Common to all objects that are made from one by ``at``."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.puts: list[str] = []


@pytest.fixture
def desk(project: Project) -> Callable[..., Desk]:
    enter_code_root(project.code)
    made: list[Desk] = []

    def desk(job: Job | None = None, *, writes: bool = True, moody: bool = False) -> Desk:
        job = job or project.job()
        lives = made[0].lives if made else project.create("run", job)
        objects = Moody(lives.folder.url) if moody else None
        made.append(Desk(lives, job, writes=writes, moody=objects))
        made[-1].moods = objects.moods if objects is not None else Moods()
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
    assert 0 < event["stall_s"] < event["seconds"]
    assert event["behind_s"] >= 0


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


def with_buffers(one: Desk) -> None:
    model = one.state.model
    model.register_buffer("seen", torch.zeros(3))
    model.register_parameter("frozen", nn.Parameter(torch.zeros(3), requires_grad=False))


def test_a_checkpoint_holds_the_state_of_its_step_whatever_training_does_next(
    desk: Callable[..., Desk],
) -> None:
    """The weights are large enough that training is at the next update before they are copied."""
    one = desk()
    with_buffers(one)
    wide = nn.Parameter(torch.zeros(4_000_000))
    one.state.model.register_parameter("wide", wide)
    one.state.optimizer.add_param_group({"params": [wide]})
    kept = {}
    for step in range(1, 6):
        one.train(1)
        kept[step] = copy_of(one.state)
        one.saver.save(one.state)
        with torch.no_grad():  # as a forward pass may
            one.state.model.seen.add_(1)  # type: ignore[operator]
            one.state.model.frozen.add_(1)  # type: ignore[operator]
    one.saver.finish()
    assert one.steps() == [3, 4, 5]
    for step in (3, 4, 5):
        loaded = one.store.load(step).tensors
        for stem, part in kept[step].items():
            assert loaded[stem].keys() == part.keys()
            for name, value in part.items():
                assert torch.equal(loaded[stem][name], value), (step, name)


def test_training_goes_on_while_a_checkpoint_is_written(desk: Callable[..., Desk]) -> None:
    one = desk(moody=True)
    one.moods.go_on.clear()
    one.train(2, save_at=[1])
    assert one.state.step == 2
    assert one.steps() == []
    one.moods.go_on.set()
    one.saver.finish()
    assert one.steps() == [1]


def test_one_save_is_under_way_at_a_time_and_the_wait_is_told(desk: Callable[..., Desk]) -> None:
    one = desk(moody=True)
    one.moods.go_on.clear()
    one.train(1, save_at=[1])
    threading.Timer(0.3, one.moods.go_on.set).start()
    one.train(1, save_at=[2])
    assert one.steps() == [1]
    one.saver.finish()
    first, second = one.events("checkpoint")
    assert (first["step"], second["step"]) == (1, 2)
    assert first["behind_s"] < 0.1 < second["behind_s"] <= second["stall_s"]


def test_a_save_that_does_not_end_holds_training_up_only_so_long(
    desk: Callable[..., Desk],
) -> None:
    one = desk(moody=True)
    one.store.patience_s = 0.1
    one.moods.go_on.clear()
    began = time.monotonic()
    one.train(2, save_at=[1, 2])
    assert 0.1 <= time.monotonic() - began < 5
    one.moods.go_on.set()
    with pytest.raises(StorageError, match="step 2 could not be saved"):
        one.saver.finish()
    one.train(1, save_at=[3])
    one.saver.finish()
    assert one.steps() == [1, 3]
    [failed] = one.events("save_failed")
    assert failed["step"] == 2
    assert "the save of step 1 was still under way, after 0 s" in failed["reason"]


def test_a_save_that_fails_is_told_and_training_goes_on(desk: Callable[..., Desk]) -> None:
    one = desk(moody=True)
    one.train(1, save_at=[1])
    one.saver.finish()
    one.moods.error = StorageError("503 from the store")
    one.train(2, save_at=[2, 3])
    with pytest.raises(StorageError, match="step 3 could not be saved; the newest checkpoint is"):
        one.saver.finish()
    one.moods.error = None
    one.train(1, save_at=[4])
    one.saver.finish()
    assert one.steps() == [1, 4]
    failed = one.events("save_failed")
    assert [(event["step"], event["in_a_row"]) for event in failed] == [(2, 1), (3, 2)]
    assert failed[0]["reason"] == "503 from the store"


def test_too_many_failed_saves_in_a_row_end_the_run(desk: Callable[..., Desk]) -> None:
    one = desk(moody=True)
    one.train(1, save_at=[1])
    one.saver.finish()
    for _ in range(2):  # a good one between them begins the count anew
        one.moods.error = StorageError("no permission")
        one.train(MAX_FAILED_SAVES - 1, save_at=range(1000))
        one.moods.go_on.wait()
        with pytest.raises(StorageError):
            one.saver.finish()
        one.moods.error = None
        one.train(1, save_at=range(1000))
        one.saver.finish()
    good = one.state.step
    one.moods.error = StorageError("no permission")
    with pytest.raises(
        StorageError,
        match=f"3 saves in a row failed, the last at step {good + 3}; the newest checkpoint is "
        f"that of step {good}: no permission",
    ):
        one.train(1000, save_at=range(1000))
    assert one.state.step - good <= MAX_FAILED_SAVES + 1
    assert one.steps()[-1] == good


def test_a_run_that_never_saved_says_so(desk: Callable[..., Desk]) -> None:
    one = desk(moody=True)
    one.moods.error = StorageError("no permission")
    with pytest.raises(StorageError, match="there is no checkpoint yet"):
        one.train(10, save_at=range(10))


@pytest.mark.parametrize(
    "act",
    [
        lambda one: one.train(1),
        lambda one: one.saver.save(one.state),
        lambda one: one.saver.finish(),
        lambda one: one.saver.__exit__(None, None, None),
    ],
    ids=["update", "save", "finish", "exit"],
)
def test_an_error_in_the_thread_never_disappears(act: Any, desk: Callable[..., Desk]) -> None:
    one = desk(moody=True)
    one.moods.error = RuntimeError("a bug")
    one.train(1, save_at=[1])
    time.sleep(0.2)
    with pytest.raises(RuntimeError, match="a bug"):
        act(one)


def fail_while_saving(one: Desk) -> None:
    with one.saver:
        one.train(1, save_at=[1])
        raise ValueError("the user's")


def test_an_error_behind_another_one_is_a_warning(desk: Callable[..., Desk]) -> None:
    one = desk(moody=True)
    one.moods.error = RuntimeError("a bug")
    with pytest.raises(ValueError, match="the user's"):
        fail_while_saving(one)
    assert [event["message"] for event in one.events("warning")] == ["a save failed, too: a bug"]


def test_a_save_under_way_is_committed_though_the_rank_failed(desk: Callable[..., Desk]) -> None:
    one = desk(moody=True)
    one.moods.go_on.clear()
    threading.Timer(0.2, one.moods.go_on.set).start()
    with pytest.raises(ValueError, match="the user's"):
        fail_while_saving(one)
    assert one.steps() == [1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_that_are_not_finite_are_never_committed(
    value: float, dtype: torch.dtype, desk: Callable[..., Desk]
) -> None:
    one = desk()
    one.train(1, save_at=[1])
    bad = nn.Parameter(torch.zeros(5, dtype=dtype))
    one.state.model.register_parameter("bad", bad)
    one.state.optimizer.add_param_group({"params": [bad]})
    one.train(1)
    with torch.no_grad():
        bad[3] = value
    one.saver.save(one.state)
    with pytest.raises(NumericsError, match=r"step 2: 1 weights hold .* not finite: bad\. Nothing"):
        one.saver.finish()
    assert one.steps() == [1]


def test_large_weights_are_finite_and_buffers_may_be_what_they_like(
    desk: Callable[..., Desk],
) -> None:
    one = desk()
    with_buffers(one)
    one.state.model.register_buffer("mask", torch.full((3,), -float("inf")))
    with torch.no_grad():
        for value in one.state.model.parameters():
            value.fill_(3e38)
    one.save(1)
    assert one.steps() == [1]


def test_weights_that_change_outside_of_updates_make_later_saves_copy_at_once(
    desk: Callable[..., Desk],
) -> None:
    one = desk()
    wide = nn.Parameter(torch.zeros(20_000_000))
    one.state.model.register_parameter("wide", wide)
    one.state.optimizer.add_param_group({"params": [wide]})
    one.saver.save(one.state)
    with torch.no_grad():
        wide[-1] = 1
    with pytest.raises(StorageError, match="changed between a save and the next update"):
        one.saver.finish()
    one.state.step = 1
    one.saver.save(one.state)
    with torch.no_grad():
        wide[-1] = 2
    one.saver.finish()
    assert one.steps() == [1]
    assert one.store.load(1).tensors["model"]["wide"][-1] == 1
    [warning] = one.events("warning")
    assert "copied before training goes on" in warning["message"]


def test_a_replaced_attempt_ends_at_its_next_update(desk: Callable[..., Desk]) -> None:
    one = desk()
    desk()  # a newer attempt
    one.train(1, save_at=[1])
    time.sleep(0.2)
    with pytest.raises(CheckpointError, match="a newer attempt has begun"):
        one.train(1)


def test_the_newest_checkpoint_is_known(desk: Callable[..., Desk]) -> None:
    one = desk()
    assert one.saver.newest is None
    one.save(2)
    assert one.saver.newest is not None
    assert (one.saver.newest.step, one.saver.newest.weights_sha256) == (
        2,
        weights_sha256(one.state.tensors()["model"]),
    )
    again = desk()
    again.saver.find()
    assert again.saver.newest == one.saver.newest


class Blind(Objects):
    """A storage on a node that does not see some of the files."""

    hidden = ""

    def folders(self, prefix: str = "") -> list[str]:
        return [name for name in super().folders(prefix) if name not in self.hidden.split()]


def find_on_a_rank(url: str, hidden: list[str]) -> int | str:
    objects = Blind(url)
    objects.hidden = hidden[dist.get_rank()]
    resolved = job_from_json(objects.get("job.json").decode())
    enter_code_root(resolved.code_root)
    job = resolved.job
    plan = plan_training(job, [build_index(place) for place in job.data.sources])
    store = CheckpointStore(RunFolder(objects), attempt=9, is_newest_attempt=lambda: True)
    with EventLog(lambda data: None) as log:
        saver = Saver(store, log, job=job, plan=plan, writes=False)
        try:
            loaded = saver.find()
        except CheckpointError as error:
            return str(error)
        return loaded.step if loaded else 0


def test_all_ranks_begin_at_the_same_checkpoint(desk: Callable[..., Desk], ranks: Ranks) -> None:
    one = desk()
    one.save(2, 4)
    url, newest = one.lives.folder.url, "step-00000004.attempt-001"
    for hidden, wanted in [(["", ""], 4), (["", newest], 2), ([newest, ""], 2)]:
        assert ranks.run(find_on_a_rank, url, hidden, world_size=2) == [wanted] * 2


def test_a_rank_that_sees_no_checkpoint_does_not_begin_anew(
    desk: Callable[..., Desk], ranks: Ranks
) -> None:
    one = desk()
    one.save(2)
    one.lives.folder.objects.delete(["checkpoints/newest.json"])
    hidden = ["", "step-00000002.attempt-001"]
    answers = ranks.run(find_on_a_rank, one.lives.folder.url, hidden, world_size=2)
    assert all("rank 1 finds no checkpoint, and others do" in answer for answer in answers)
