"""Ctrl-C saves and stops; what was stopped goes on."""

import os
import signal
from typing import Any

import pytest
from bench import Bench, curve, family, runs, wait_until

SLOW = ("--set", "model.args.sleep_s=0.1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_in_this_process_with_a_checkpoint(bench: Bench, number: int) -> None:
    driver = bench.start("run", "tiny.py", "--run-id", "r", "--workers", "0", *SLOW)
    wait_until(lambda: bench.step("r") >= 3, timeout_s=60)
    os.kill(driver.pid, number)
    assert driver.wait(timeout=30) == 130
    facts = bench.show("r")
    assert facts["state"] == "STOPPED"
    assert facts["checkpoints"][-1]["step"] == facts["step"] < 24


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_on_ray_goes_on_to_the_same_numbers(
    bench: Bench, undisturbed: dict[str, Any], number: int
) -> None:
    driver = bench.start("run", "tiny.py", "--run-id", "r", *SLOW)
    wait_until(lambda: bench.step("r") >= 7, timeout_s=90)
    processes = family(driver.pid)
    os.kill(driver.pid, number)
    assert driver.wait(timeout=30) == 130
    assert not [each for each in processes if runs(each)]
    stopped = bench.show("r")
    assert stopped["state"] == "STOPPED"
    assert "rayway resume" in (bench.folder / "stderr").read_text()
    done = bench.rayway("resume", "r")
    assert done.returncode == 0, done.stderr
    assert curve(bench.metrics("r")) == curve(undisturbed["steps"])
    assert bench.show("r")["weights_sha256"] == undisturbed["facts"]["weights_sha256"]


def test_a_second_signal_aborts_and_says_from_where_to_go_on(bench: Bench) -> None:
    driver = bench.start(
        "run", "tiny.py", "--run-id", "r", "--workers", "0", "--set", "model.args.sleep_s=2.0",
        "--set", "checkpoint.every_steps=1",
    )  # fmt: skip
    wait_until(lambda: bench.step("r") >= 2, timeout_s=60)
    os.kill(driver.pid, signal.SIGINT)
    wait_until((bench.folder / "runs/r/stop.json").exists, timeout_s=10)
    os.kill(driver.pid, signal.SIGINT)
    assert driver.wait(timeout=30) == 130
    stderr = (bench.folder / "stderr").read_text()
    assert "run r was aborted. Its newest checkpoint is of step" in stderr
    assert "rayway resume r" in stderr
    assert "Traceback" not in stderr
    assert bench.show("r")["state"] == "STOPPED"


def test_a_running_run_cannot_be_resumed_as_well(bench: Bench) -> None:
    driver = bench.start("run", "tiny.py", "--run-id", "r", "--workers", "0",
                         "--set", "model.args.sleep_s=2.0")  # fmt: skip
    wait_until(lambda: bench.step("r") >= 2, timeout_s=60)
    second = bench.rayway("resume", "r")
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait(timeout=30)
    assert second.returncode == 2
    assert "still running" in second.stderr
