import difflib
import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from own_script import start

from rayway.report.facts import read_run, steps_merged
from rayway.storage.runs import RunFolder

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
@pytest.mark.timeout(600)
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
@pytest.mark.timeout(600)
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
