import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from own_script import SCRIPT, Script, lives, start
from tiny_project import Project, write_rows

from rayway.errors import DataError, SpecError
from rayway.launch.fit import resume
from rayway.report.facts import read_run
from rayway.storage.runs import RUN_KEY, SCHEMA, attempt_key


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A folder with data."""
    write_rows(tmp_path / "train", 30)
    return tmp_path


# Runs the script of each folder in a process of its own that has imported torch already.
FORKED = """
import os, sys
import torch
import rayway.train.own

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()  # imports much, once
for folder in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        exec(open("script.py").read())
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

LEFT = "the script left its loop in step 4 of 20"
ENDINGS = {
    "raise ValueError('odd')": (1, "FAILED", "the script raised on rank 0: ValueError: odd"),
    "sys.exit(3)": (3, "STOPPED", LEFT),
    "raise KeyboardInterrupt": (-signal.SIGINT, "STOPPED", LEFT),
    "loop.close(); break": (0, "STOPPED", LEFT),
    "os.kill(os.getpid(), 9)": (-signal.SIGKILL, "INTERRUPTED", "its process"),
}


@pytest.mark.slow
def test_how_a_script_ended_is_recorded(tmp_path: Path) -> None:
    rooms = [tmp_path / str(number) for number in range(len(ENDINGS))]
    for room, what in zip(rooms, ENDINGS, strict=True):
        write_rows(room / "train", 30)
        (room / "script.py").write_text(SCRIPT.format(what=what))
    (tmp_path / "forked.py").write_text(FORKED)
    codes = start(tmp_path, "forked.py", *rooms).stdout.split()
    found = []
    for room, code in zip(rooms, codes, strict=True):
        facts = read_run(lives(room).folder)
        found.append((int(code), facts.state, str(facts.reason)))
        assert facts.step == 3 or facts.state == "INTERRUPTED"
    for (code, state, reason), wanted in zip(found, ENDINGS.values(), strict=True):
        assert (code, state) == wanted[:2]
        assert reason.startswith(wanted[2])


@pytest.mark.slow
def test_resume_says_to_start_the_script_again(room: Path) -> None:
    (room / "script.py").write_text(SCRIPT.format(what="break"))
    assert start(room, "script.py").returncode == 0
    facts = read_run(lives(room).folder)
    assert (facts.state, facts.reason) == ("STOPPED", LEFT)
    with pytest.raises(SpecError, match=re.escape(f"start {room / 'script.py'} again")):
        resume("mine", storage=str(room / "runs"), show=False)


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
    record = {"schema": SCHEMA, "run_id": "mine", "created_at": 1.0}
    (folder / RUN_KEY).write_text(json.dumps(record))
    assert len(Script(room).train()) == 9


def test_resume_leaves_a_finished_run_as_it_is(room: Path) -> None:
    Script(room).train()
    assert resume("mine", storage=str(room / "runs"), show=False).state == "FINISHED"


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
