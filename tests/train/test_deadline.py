"""A rank that hangs ends itself with its stacks; one that gets on does not."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
from rayway.train.deadline import StepDeadline

def stuck():
    time.sleep(30)

with StepDeadline(0.5) as deadline:
    for _ in range(20):
        time.sleep(0.1)
        deadline.on_step(None, [])
    print("got on", flush=True)
    if sys.argv[1] == "hang":
        stuck()
time.sleep(1)
print("done", flush=True)
"""


def run(what: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, what],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_steps_and_the_end_of_training_keep_a_process_alive() -> None:
    done = run("go")
    assert (done.returncode, done.stdout) == (0, "got on\ndone\n"), done.stderr


@pytest.mark.slow
def test_a_hung_process_ends_and_shows_where_it_hung() -> None:
    done = run("hang")
    assert (done.returncode, done.stdout) == (1, "got on\n")
    assert "stuck" in done.stderr
