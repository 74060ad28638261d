"""A run that is killed anywhere goes on as if nothing had happened: to the last bit."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, curve, family, kill_and_wait, listening, runs, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def faults(folder: Path, *those: tuple[str, int, int]) -> str:
    """Return the setting that makes ranks die: (kind, rank, training call)."""
    return "model.args.faults=" + json.dumps(
        [
            {"kind": kind, "rank": rank, "call": call, "once": str(folder / f"fault-{i}")}
            for i, (kind, rank, call) in enumerate(those)
        ]
    )


def assert_same_as(undisturbed: dict[str, Any], bench: Bench, run: str) -> None:
    assert curve(bench.metrics(run)) == curve(undisturbed["steps"])
    facts = bench.show(run)
    assert facts["weights_sha256"] == undisturbed["facts"]["weights_sha256"]
    assert facts["metrics"] == undisturbed["facts"]["metrics"]
    assert facts["state"] == "FINISHED"


def test_an_undisturbed_run_tells_what_it_did(undisturbed: dict[str, Any]) -> None:
    facts, steps = undisturbed["facts"], undisturbed["steps"]
    assert undisturbed["done"].stdout == "calm\n"
    assert (facts["state"], facts["step"], facts["steps"], facts["attempts"]) == (
        "FINISHED",
        24,
        24,
        1,
    )
    assert [each["step"] for each in facts["checkpoints"]] == [15, 20, 24]
    assert [each["step"] for each in steps] == list(range(1, 25))
    first_epoch = [sample for each in steps[:15] for sample in each["ids"]]
    assert sorted(first_epoch) == list(range(120))
    assert "FINISHED calm" in undisturbed["done"].stderr


def test_workers_that_die_at_random_steps_are_replaced(
    bench: Bench, undisturbed: dict[str, Any]
) -> None:
    draw = random.Random(7)
    first, second = draw.randint(2, 9), draw.randint(2, 9)
    setting = faults(bench.folder, ("kill", 1, first), ("kill", 0, second))
    done = bench.rayway("run", "tiny.py", "--run-id", "r", "--set", setting)
    assert done.returncode == 0, done.stderr
    assert_same_as(undisturbed, bench, "r")
    assert bench.show("r")["attempts"] == 3
    assert "died (killed, crashed, or out of memory)" in done.stderr


def test_a_killed_driver_leaves_nothing_running_and_is_resumed(
    bench: Bench, undisturbed: dict[str, Any]
) -> None:
    slow = ("--set", "model.args.sleep_s=0.1")
    driver = bench.start("run", "tiny.py", "--run-id", "r", *slow)
    wait_until(lambda: bench.step("r") >= 12, timeout_s=90)
    processes = family(driver.pid)
    assert listening(processes) <= {"127.0.0.1", "::1"}
    kill_and_wait(driver)
    wait_until(lambda: not any(runs(each) for each in processes), timeout_s=15)
    assert bench.show("r")["state"] == "INTERRUPTED"
    done = bench.rayway("resume", "r")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "r\n"
    assert_same_as(undisturbed, bench, "r")
    again = bench.rayway("resume", "r")
    assert (again.returncode, bench.show("r")["attempts"]) == (0, 2)


def test_driver_and_worker_killed_at_once(bench: Bench, undisturbed: dict[str, Any]) -> None:
    setting = faults(bench.folder, ("kill", 1, 14))
    slow = ("--set", "model.args.sleep_s=0.1")
    driver = bench.start("run", "tiny.py", "--run-id", "r", "--set", setting, *slow)
    wait_until((bench.folder / "fault-0").exists, timeout_s=90)
    kill_and_wait(driver)
    done = bench.rayway("resume", "r")
    assert done.returncode == 0, done.stderr
    assert_same_as(undisturbed, bench, "r")


def test_three_ranks_resume_to_the_bit(bench: Bench) -> None:
    """With three ranks the order of additions depends on DDP's buckets: see replicate."""
    shape = (
        "--workers",
        "3",
        "--set",
        "scale.cpus_per_worker=0.5",
        "--set",
        "batch.global_batch=9",
    )
    calm = bench.rayway("run", "tiny.py", "--run-id", "calm", *shape)
    assert calm.returncode == 0, calm.stderr
    setting = faults(bench.folder, ("kill", 2, 13))
    done = bench.rayway("run", "tiny.py", "--run-id", "r", "--set", setting, *shape)
    assert done.returncode == 0, done.stderr
    assert curve(bench.metrics("r")) == curve(bench.metrics("calm"))
    assert bench.show("r")["weights_sha256"] == bench.show("calm")["weights_sha256"]


def test_another_number_of_workers_keeps_the_order_and_the_losses_up_to_rounding(
    bench: Bench, undisturbed: dict[str, Any]
) -> None:
    done = bench.rayway("run", "tiny.py", "--run-id", "one", "--workers", "1")
    assert done.returncode == 0, done.stderr
    alone = bench.rayway("run", "tiny.py", "--run-id", "zero", "--workers", "0")
    assert alone.returncode == 0, alone.stderr
    assert curve(bench.metrics("one")) == curve(bench.metrics("zero"))
    assert bench.show("one")["weights_sha256"] == bench.show("zero")["weights_sha256"]
    for mine, two in zip(bench.metrics("one"), undisturbed["steps"], strict=True):
        assert mine["ids"] == two["ids"]
