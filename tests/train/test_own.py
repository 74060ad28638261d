import difflib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import Ranks
from tiny_project import Lives, Project, write_rows
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from rayway import OwnLoop
from rayway.checkpoint.tensors import weights_sha256
from rayway.data.index import build_index
from rayway.data.plan import plan_order
from rayway.errors import CheckpointError, DataError, SpecError
from rayway.launch.fit import resume
from rayway.report.facts import read_run, steps_merged
from rayway.storage.runs import RUN_KEY, STOP_KEY, RunFolder, attempt_key
from rayway.train.records import NumericsError

ROOT = Path(__file__).parents[2]
PLAIN, PORTED = ROOT / "jobs/own_loop/plain.py", ROOT / "jobs/own_loop/ported.py"
PAGE = ROOT / "docs/how-to/own-loop.md"
# torchrun's own restart is not used: in torch 2.13 the next life's gloo connects to the addresses
# of the life before, whatever the rendezvous.
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--master-addr", "127.0.0.1", "--master-port"]

# Runs a script, and kills one rank in the middle of a step, between its update and its log.
KILLED_IN_STEP = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

script, at, rank = sys.argv[1], int(sys.argv[2]), sys.argv[3]
steps = []


def count(*_):
    steps.append(1)
    if len(steps) == at:
        os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("RANK", "0") == rank:
    register_optimizer_step_post_hook(count)
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder data/digits of the example."""
    from sources.digits import prepare  # noqa: PLC0415 - ranks import this file without jobs/

    folder = tmp_path_factory.mktemp("data") / "digits"
    prepare(str(folder))
    return folder


@pytest.fixture
def desk(tmp_path: Path, digits: Path) -> Path:
    """A folder to start scripts in."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(digits)
    (tmp_path / "killed.py").write_text(KILLED_IN_STEP)
    return tmp_path


def start(desk: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python to its end."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=desk,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def told(desk: Path, run: str = "mine") -> dict[str, Any]:
    """Return what a run's folder says: the curve to the last bit, and its facts."""
    folder = RunFolder.open(str(desk / "runs" / run))
    facts = json.loads(read_run(folder).to_json())
    curve = [(each["step"], each["loss_hex"], each["lr"]) for each in steps_merged(folder)]
    return {"curve": curve, **facts}


# --- the example -----------------------------------------------------------------------------


def test_the_example_is_ported_in_at_most_ten_new_or_changed_lines() -> None:
    plain, ported = PLAIN.read_text().splitlines(), PORTED.read_text().splitlines()
    changed = [line for line in difflib.ndiff(plain, ported) if line.startswith("+ ")]
    assert 0 < len(changed) <= 10


def test_the_page_shows_the_example_as_it_is() -> None:
    plain, ported = (path.read_text().splitlines(keepends=True) for path in (PLAIN, PORTED))
    names = (str(path.relative_to(ROOT)) for path in (PLAIN, PORTED))
    diff = "".join(difflib.unified_diff(plain, ported, *names, n=len(plain) + len(ported)))
    assert f"```diff\n{diff}```" in PAGE.read_text()


@pytest.mark.slow
def test_the_plain_script_runs(desk: Path) -> None:
    done = start(desk, PLAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("epoch 11: loss")


@pytest.mark.slow
def test_a_script_that_is_killed_and_started_again_ends_in_the_same_bits(
    desk: Path, tmp_path_factory: pytest.TempPathFactory, digits: Path
) -> None:
    calm = tmp_path_factory.mktemp("calm")
    (calm / "data").mkdir()
    (calm / "data" / "digits").symlink_to(digits)
    undisturbed = start(calm, PORTED)
    assert undisturbed.returncode == 0, undisturbed.stderr

    killed = start(desk, "killed.py", PORTED, "137", "0")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    seen = told(desk)
    assert seen["state"] == "INTERRUPTED"
    assert [each["step"] for each in seen["checkpoints"]] == [50, 100]

    again = start(desk, PORTED)
    assert again.returncode == 0, again.stderr
    was, now = told(calm), told(desk)
    assert now["curve"] == was["curve"]
    assert [step for step, *_ in now["curve"]] == list(range(1, 265))
    assert now["weights_sha256"] == was["weights_sha256"]
    assert now["state"] == "FINISHED"
    assert [each["from_step"] for each in now["starts"]] == [0, 100]
    assert not now["warnings"]
    # what the resumed script prints is the tail of what the undisturbed one printed
    assert undisturbed.stdout.endswith(again.stdout)
    assert again.stdout.startswith("epoch 4:")


@pytest.mark.slow
def test_two_ranks_under_torchrun_go_on_to_the_bit_after_the_kill_of_one(
    desk: Path, tmp_path_factory: pytest.TempPathFactory, digits: Path
) -> None:
    calm = tmp_path_factory.mktemp("calm")
    (calm / "data").mkdir()
    (calm / "data" / "digits").symlink_to(digits)
    undisturbed = start(calm, *TORCHRUN, free_port(), PORTED)
    assert undisturbed.returncode == 0, undisturbed.stderr
    killed = start(desk, *TORCHRUN, free_port(), "killed.py", PORTED, "137", "1")
    assert killed.returncode == 1, killed.stderr
    assert told(desk)["state"] in ("INTERRUPTED", "FAILED")  # who was faster, torchrun or rank 0
    again = start(desk, *TORCHRUN, free_port(), PORTED)
    assert again.returncode == 0, again.stderr

    was, now = told(calm), told(desk)
    assert (was["attempts"], now["attempts"]) == (1, 2)
    assert now["state"] == was["state"] == "FINISHED"
    assert now["curve"] == was["curve"]
    assert len(now["curve"]) == 264
    assert now["weights_sha256"] == was["weights_sha256"]
    assert [each["from_step"] for each in now["starts"]] == [0, 100]
    assert [each["world_size"] for each in now["starts"]] == [2, 2]
    logs = (desk / "runs" / "mine").glob("attempts/*/events-*.jsonl")
    assert {log.name for log in logs} == {"events-00000.jsonl"}


# --- one process, small ----------------------------------------------------------------------


class Net(nn.Module):
    """Draws from torch, numpy and Python in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + 0.1 * (random.random() + np.random.random()))


class Script:
    """A script of the user's: all it makes before its loop."""

    def __init__(self, root: Path, **changes: Any) -> None:
        torch.manual_seed(1)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 7], gamma=0.5)
        self.average = AveragedModel(self.model)
        settings: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "train": str(root / "train"),
            "global_batch": 8,
            "steps": 9,
            "checkpoint_every_steps": 2,
            "also": {"schedule": self.schedule, "average": self.average},
        }
        self.loop = OwnLoop(str(root / "runs" / "mine"), **{**settings, **changes})

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = functional.cross_entropy(self.model(batch["x"]), batch["y"])
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.average.update_parameters(self.model)
        return loss.detach()

    def train(self, steps: int = 1000) -> list[tuple[str, ...]]:
        """Train so many steps; return in hex what each batch held, its loss and its rate."""
        seen = []
        for batch in self.loop:
            if len(seen) == steps:
                break
            rate = self.optimizer.param_groups[0]["lr"]
            loss = self.step(batch)
            self.schedule.step()
            self.loop.log(loss=loss)
            x = batch["x"].numpy().tobytes().hex()
            seen.append((x, float(loss).hex(), float(rate).hex()))
        return seen

    def weights(self) -> tuple[str, str]:
        return weights_sha256(self.model.state_dict()), weights_sha256(self.average.state_dict())


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A folder with data."""
    write_rows(tmp_path / "train", 30)
    return tmp_path


def lives(room: Path) -> Lives:
    return Lives(RunFolder.open(str(room / "runs" / "mine")))


@pytest.mark.parametrize("after", [0, 1, 2, 5, 6, 8])
def test_a_run_that_goes_on_is_the_undisturbed_one_to_the_bit(
    after: int, room: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm = tmp_path_factory.mktemp("calm")
    write_rows(calm / "train", 30)
    undisturbed = Script(calm)
    curve = undisturbed.train()

    first = Script(room)
    begun = first.train(after)
    first.loop.close()
    random.seed(99), np.random.seed(99), torch.manual_seed(99)  # the next life is another process
    second = Script(room)
    saved = after - after % 2
    assert second.loop.step == saved
    went_on = second.train()

    assert begun == curve[:after]
    assert went_on == curve[saved:]
    assert second.weights() == undisturbed.weights()
    assert lives(room).steps() == [loss for _, loss, _ in curve]
    assert lives(room).steps("lr") == [float.fromhex(rate) for *_, rate in curve]


def test_a_batch_holds_the_rows_of_the_plan(room: Path) -> None:
    index = build_index(str(room / "train"))
    plan = plan_order(index, global_batch=8, seed=5)
    everything = Script(room, global_batch=30, shuffle=False, steps=1, seed=0)
    [stored] = list(everything_of(everything))
    loop = Script(room / "..", train=str(room / "train"), seed=5).loop
    for step, batch in enumerate(loop):
        torch.testing.assert_close(batch["x"], stored[plan.ids(step)], rtol=0, atol=0)
        loop.log(loss=0.0)


def everything_of(script: Script) -> Iterator[Tensor]:
    for batch in script.loop:
        yield batch["x"]
        script.loop.log(loss=0.0)


def test_a_run_looks_like_any_other(room: Path) -> None:
    script = Script(room)
    script.train()
    facts = read_run(lives(room).folder)
    assert (facts.state, facts.step, facts.steps, facts.name) == ("FINISHED", 9, 9, "mine")
    assert [each.step for each in facts.checkpoints] == [6, 8, 9]
    assert facts.weights_sha256 == script.weights()[0]
    assert facts.starts[0]["world_size"] == 1
    assert not facts.warnings
    assert facts.clock["step_s"] > 0
    assert script.loop.finished


def test_columns_that_are_not_asked_for_are_not_read(room: Path) -> None:
    script = Script(room, columns=["y"])
    assert set(next(script.loop)) == {"y"}
    script.loop.close()


def test_a_finished_script_started_again_gets_its_weights_and_no_batch(room: Path) -> None:
    first = Script(room)
    first.train()
    second = Script(room)
    assert second.train() == []
    assert second.loop.finished
    assert second.weights() == first.weights()
    assert lives(room).folder.attempts() == [1]


def test_a_finished_script_with_more_steps_goes_on(
    room: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm = tmp_path_factory.mktemp("calm")
    write_rows(calm / "train", 30)
    whole = Script(calm, steps=12)
    curve = whole.train()
    Script(room).train()
    longer = Script(room, steps=12)
    assert longer.train() == curve[9:]
    assert longer.weights() == whole.weights()
    assert read_run(lives(room).folder).steps == 12


def test_killed_between_the_last_save_and_the_end_is_finished_when_started_again(
    room: Path,
) -> None:
    script = Script(room)
    script.train()
    folder = lives(room).folder
    folder.objects.delete([attempt_key(1, "end.json"), attempt_key(1, "alive.json")])
    assert Script(room).train() == []
    facts = read_run(folder)
    assert (facts.state, facts.step, facts.attempts) == ("FINISHED", 9, 2)
    assert facts.weights_sha256 == script.weights()[0]


def test_a_folder_made_but_without_its_job_is_taken_up(room: Path) -> None:
    folder = room / "runs" / "mine"
    folder.mkdir(parents=True)
    record = {"schema": 1, "run_id": "mine", "created_at": 1.0}
    (folder / RUN_KEY).write_text(json.dumps(record))
    assert len(Script(room).train()) == 9


# --- epochs ----------------------------------------------------------------------------------


def train_epochs(script: Script, *, until: int | None = None) -> list[tuple[int, int, str]]:
    """Train in epochs of 3 steps; the rate falls, and a draw is made, after each of them."""
    seen = []
    for epoch, batches in script.loop.epochs():
        for batch in batches:
            if script.loop.step == until:
                return seen
            script.loop.log(loss=script.step(batch))
            rate = script.optimizer.param_groups[0]["lr"]
            seen.append((epoch, script.loop.step, float(rate).hex()))
        for group in script.optimizer.param_groups:
            group["lr"] *= 0.5 + random.random()
    return seen


@pytest.mark.parametrize("until", [2, 3, 4, 5, 6, 7, 10])
def test_what_is_done_after_an_epoch_belongs_to_its_last_step(
    until: int, room: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm = tmp_path_factory.mktemp("calm")
    write_rows(calm / "train", 30)
    settings = {"steps": None, "epochs": 4, "checkpoint_every_steps": 3}
    undisturbed = Script(calm, **settings)
    whole = train_epochs(undisturbed)
    assert [epoch for epoch, *_ in whole] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]

    first = Script(room, **settings)
    assert train_epochs(first, until=until) == whole[: until - 1]
    first.loop.close()
    second = Script(room, **settings)
    saved = (until - 1) // 3 * 3
    assert train_epochs(second) == whole[saved:]
    assert second.weights() == undisturbed.weights()
    assert undisturbed.loop.finished


def test_an_epoch_may_be_cut_short_by_the_number_of_steps(room: Path) -> None:
    script = Script(room, steps=None, epochs=1.7)
    assert [step for _, step, _ in train_epochs(script)] == [1, 2, 3, 4, 5]
    assert lives(room).end()["state"] == "FINISHED"


# --- endings ---------------------------------------------------------------------------------


def test_a_request_to_stop_saves_the_step_and_ends_the_loop(room: Path) -> None:
    script = Script(room, checkpoint_every_steps=None, steps=10**9)
    for batch in script.loop:
        if script.loop.step == 3:
            script.loop._folder.write(STOP_KEY, {})
        script.loop.log(loss=script.step(batch))
    assert not script.loop.finished
    end = lives(room).end()
    assert end["state"] == "STOPPED"
    assert [each.step for each in read_run(lives(room).folder).checkpoints] == [end["step"]]
    again = Script(room, checkpoint_every_steps=None, steps=10**9)  # the request is not for it
    assert again.loop.step == end["step"]
    next(again.loop)
    again.loop.close()


def test_an_error_inside_with_is_recorded(room: Path) -> None:
    def fail() -> None:
        with Script(room).loop as loop:
            next(loop)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    end = lives(room).end()
    assert (end["state"], end["step"]) == ("FAILED", 0)
    assert "ZeroDivisionError" in end["reason"]
    assert lives(room).error(1)["kind"] == "user"


SCRIPT = """
import sys
import torch
from rayway import OwnLoop

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loop = OwnLoop(
    "runs/mine", model=model, optimizer=optimizer, train="train", global_batch=8, steps=20
)
for batch in loop:
    loop.log(loss=1.0)
    if loop.step == 4:
        {what}
"""


@pytest.mark.parametrize(
    ("what", "code", "state", "reason"),
    [
        ("raise ValueError('odd')", 1, "FAILED", "the script raised on rank 0: ValueError: odd"),
        ("break", 0, "STOPPED", "the script left its loop in step 4 of 20"),
        ("sys.exit(3)", 3, "STOPPED", "the script left its loop in step 4 of 20"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "STOPPED", "the script left its loop in step"),
        ("loop.close(); break", 0, "STOPPED", "the script left its loop in step 4 of 20"),
    ],
)
def test_how_a_script_ended_is_recorded(
    what: str, code: int, state: str, reason: str, room: Path
) -> None:
    (room / "script.py").write_text(SCRIPT.format(what=what))
    assert start(room, "script.py").returncode == code
    facts = read_run(lives(room).folder)
    assert (facts.state, facts.step) == (state, 3)
    assert str(facts.reason).startswith(reason)


def test_resume_says_to_start_the_script_again(room: Path) -> None:
    (room / "script.py").write_text(SCRIPT.format(what="break"))
    start(room, "script.py")
    with pytest.raises(SpecError, match=re.escape(f"start {room / 'script.py'} again")):
        resume("mine", storage=str(room / "runs"), show=False)


def test_resume_leaves_a_finished_run_as_it_is(room: Path) -> None:
    Script(room).train()
    assert resume("mine", storage=str(room / "runs"), show=False).state == "FINISHED"


# --- refusals --------------------------------------------------------------------------------


def test_a_run_that_is_running_is_refused(room: Path) -> None:
    script = Script(room)
    with pytest.raises(SpecError, match="still running"):
        Script(room)
    script.loop.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, r"was begun with seed=0, and the script now has 2"),
        ({"global_batch": 6}, r"was begun with batch.global_batch=8, and the script now has 6"),
        ({"shuffle": False}, r"was begun with data.shuffle=True"),
        ({"columns": ["x", "y"]}, r"was begun with data.columns=None"),
    ],
)
def test_a_script_that_decides_other_numbers_is_refused(
    change: dict[str, Any], message: str, room: Path
) -> None:
    script = Script(room)
    script.train(1)  # before its first checkpoint
    script.loop.close()
    with pytest.raises(SpecError, match=message):
        Script(room, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": None}, r"test_own.py:\d+: neither of steps and epochs"),
        ({"epochs": 2}, r"both of steps and epochs"),
        ({"global_batch": 0}, r"batch.global_batch=0"),
        ({"checkpoint_every_steps": 0}, r"checkpoint.every_steps=0"),
        ({"sed": 1}, r"no option sed. Did you mean seed\?"),
        ({"also": {"a b": nn.Linear(1, 1)}}, r"also=\{'a b': ...\}"),
    ],
)
def test_a_wrong_setting_is_refused_and_leaves_nothing(
    change: dict[str, Any], message: str, room: Path
) -> None:
    with pytest.raises(SpecError, match=message):
        Script(room, **change)
    assert not (room / "runs").exists()


def test_data_that_is_missing_or_too_small_is_refused_and_leaves_nothing(room: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        Script(room, train=str(room / "trian"))
    with pytest.raises(DataError, match="30 rows do not fill one global batch of 31"):
        Script(room, global_batch=31)
    assert not (room / "runs").exists()


def test_other_data_is_refused_and_the_same_data_elsewhere_is_not(room: Path) -> None:
    script = Script(room)
    script.train(3)
    script.loop.close()
    write_rows(room / "other", 30, seed=1)
    with pytest.raises(DataError, match="does not hold the data that this run began with"):
        Script(room, train=str(room / "other"))
    (room / "train").rename(room / "moved")
    moved = Script(room, train=str(room / "moved"))
    assert len(moved.train()) == 7
    (room / "moved" / "part-0.parquet").unlink()
    with pytest.raises(DataError, match=r"missing: part-0\.parquet"):
        Script(room, train=str(room / "moved"), steps=20)


def test_the_run_of_a_job_is_refused(project: Project) -> None:
    project.create("mine", project.job())
    with pytest.raises(SpecError, match="the run of a job"):
        Script(project.root)


def test_a_parameter_outside_the_model_is_refused(room: Path) -> None:
    model, other = nn.Linear(4, 3), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(SpecError, match="2 parameters that are not the model's"):
        Script(room, model=model, optimizer=optimizer)


def test_other_companions_than_those_saved_are_refused(room: Path) -> None:
    script = Script(room)
    script.train(3)
    script.loop.close()
    with pytest.raises(CheckpointError, match="'average', 'optimizer-groups', 'schedule'"):
        Script(room, also={})
    end = lives(room).end()
    assert (end["state"], lives(room).error(2)["kind"]) == ("FAILED", "refused")


def test_a_step_that_is_not_logged_is_refused(room: Path) -> None:
    loop = Script(room).loop
    next(loop)
    with pytest.raises(SpecError, match="step 1 was not logged"):
        next(loop)
    loop.close()


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_numbers_that_are_not_finite_end_the_run_and_are_not_saved(name: str, room: Path) -> None:
    script = Script(room, checkpoint_every_steps=1)
    script.train(1)
    script.loop.log(**{"loss": 1.0, name: torch.tensor(float("nan"))})

    def ask() -> None:
        with script.loop as loop:
            next(loop)

    with pytest.raises(NumericsError, match=r"step 2: .* nan. Lower the learning rate"):
        ask()
    assert [each.step for each in read_run(lives(room).folder).checkpoints] == [1]
    assert lives(room).end()["state"] == "FAILED"


def test_the_gradient_norm_is_recorded(room: Path) -> None:
    script = Script(room, steps=1)
    for batch in script.loop:
        script.step(batch)
        norm = nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
        script.loop.log(loss=0.5, grad_norm=norm)
    assert lives(room).steps("grad_norm") == [float(norm)]


def test_a_log_that_makes_no_sense_is_refused(room: Path) -> None:
    loop = Script(room).loop
    with pytest.raises(SpecError, match="without a batch at hand"):
        loop.log(loss=1.0)
    next(loop)
    with pytest.raises(SpecError, match=r"shape \(8,\).*loss.mean\(\)"):
        loop.log(loss=torch.zeros(8))
    loop.close()


# --- ranks -----------------------------------------------------------------------------------


def train_as_a_rank(root: str, breaks_at: int | None) -> dict[str, Any]:
    """Train as one of the ranks, dropout off; return what this rank saw."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    replica = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    loop = OwnLoop(
        f"{root}/runs/mine",
        model=replica,
        optimizer=optimizer,
        train=f"{root}/train",
        global_batch=8,
        steps=9,
        checkpoint_every_steps=2,
    )
    rows = []
    for batch in loop:
        loss = functional.cross_entropy(replica(batch["x"]), batch["y"])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        loop.log(loss=loss)
        rows.append(batch["x"])
        if loop.step == breaks_at:
            break
    loop.close()
    return {"rows": rows, "weights": weights_sha256(model.state_dict())}


def test_ranks_share_a_global_batch_and_one_run(
    ranks: Ranks, room: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = tmp_path_factory.mktemp("alone")
    write_rows(alone / "train", 30)
    whole = train_as_a_rank(str(alone), None)
    pair = ranks.run(train_as_a_rank, str(room), None, world_size=2)

    for step, rows in enumerate(whole["rows"]):
        assert torch.equal(torch.cat([each["rows"][step] for each in pair]), rows)
    assert pair[0]["weights"] == pair[1]["weights"] == read_run(lives(room).folder).weights_sha256
    losses = [[float.fromhex(each) for each in lives(folder).steps()] for folder in (room, alone)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert lives(room).events(1, "start")[0]["world_size"] == 2


def test_ranks_that_go_on_end_in_the_same_bits(
    ranks: Ranks, room: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm = tmp_path_factory.mktemp("calm")
    write_rows(calm / "train", 30)
    ranks.run(train_as_a_rank, str(calm), None, world_size=2)
    ranks.run(train_as_a_rank, str(room), 6, world_size=2)
    ranks.run(train_as_a_rank, str(room), None, world_size=2)
    assert lives(room).end()["weights_sha256"] == lives(calm).end()["weights_sha256"]
    assert lives(room).steps() == lives(calm).steps()


def refused_as_a_rank(root: str) -> str:
    try:
        train_as_a_rank(root, None)
    except (SpecError, DataError) as error:
        return str(error)
    return "not refused"


def test_a_refusal_on_rank_0_ends_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(refused_as_a_rank, str(tmp_path), world_size=2)
    assert "does not exist" in first
    assert "rank 0 could not begin" in second
