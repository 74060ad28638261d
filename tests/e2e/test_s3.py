"""Whole runs whose folder is in a bucket, also while the store stumbles."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, curve, kill_and_wait, wait_until
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))  # fault_proxy, s3_server

from fault_proxy import FaultProxy, refuse, reset
from rayway.cli.main import rayway
from rayway.storage.objects import Objects
from rayway.storage.runs import RunFolder
from s3_server import new_bucket, point_at, s3_server

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SLOW = ("--set", "model.args.sleep_s=0.1")


def read(*words: str) -> str:
    """Return what a command prints, without a process of its own."""
    done = CliRunner().invoke(rayway, words)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def steps(run: str, storage: str) -> list[dict[str, Any]]:
    lines = read("metrics", run, "--json", "--storage", storage).splitlines()
    return [json.loads(line) for line in lines]


def facts(run: str, storage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read("show", run, "--json", "--storage", storage))
    return found


@dataclass
class Bucket:
    """A storage in a bucket, the bench beside it, and the proxy between the two."""

    bench: Bench
    proxy: FaultProxy
    url: str

    def rayway(self, *words: str) -> Any:
        """Run a command on this storage."""
        return self.bench.rayway(*words, "--storage", self.url)

    def steps(self, run: str) -> list[dict[str, Any]]:
        """Return the steps of a run."""
        return steps(run, self.url)

    def facts(self, run: str) -> dict[str, Any]:
        """Return what ``rayway show`` says of a run."""
        return facts(run, self.url)

    def saved(self, run: str) -> set[str]:
        """Return the checkpoints of a run that are committed, without starting a process."""
        objects = RunFolder(Objects(self.url).at(run)).checkpoints
        return {i.key.split("/")[0] for i in objects.list() if i.key.endswith("/COMMITTED")}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(bench: Bench, address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with FaultProxy(address, seed=3) as proxy:
        point_at(monkeypatch, proxy.url)
        yield Bucket(bench, proxy, f"s3://{new_bucket(address)}/runs")


def test_a_run_without_workers_is_the_same_in_a_bucket_and_every_command_reads_it(
    bucket: Bucket,
) -> None:
    here = bucket.bench.rayway("run", "tiny.py", "--workers", "0", "--run-id", "r")
    assert here.returncode == 0, here.stderr
    done = bucket.rayway("run", "tiny.py", "--workers", "0", "--run-id", "r")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "r\n"
    assert "FINISHED r" in done.stderr
    runs = str(bucket.bench.folder / "runs")
    assert curve(bucket.steps("r")) == curve(steps("r", runs))
    mine, other = facts("r", runs), bucket.facts("r")
    for name in ["state", "step", "attempts", "weights_sha256", "metrics", "best", "warnings"]:
        assert other[name] == mine[name], name
    assert other["url"] == f"{bucket.url}/r"
    listed = read("runs", "--json", "--storage", bucket.url)
    assert [json.loads(line)["run_id"] for line in listed.splitlines()] == ["r"]
    checkpoints = read("checkpoints", "r", "--storage", bucket.url)
    assert all(f" {step} " in checkpoints for step in (15, 20, 24))
    again = bucket.rayway("resume", "r")
    assert (again.returncode, again.stdout) == (0, "r\n")
    taken = bucket.rayway("run", "tiny.py", "--workers", "0", "--run-id", "r")
    assert taken.returncode == 2
    assert "exists already" in taken.stderr


def test_workers_train_on_through_bursts_of_errors_and_the_loss_of_one(
    bucket: Bucket, undisturbed: dict[str, Any]
) -> None:
    proxy = bucket.proxy
    bursts = [
        proxy.add(refuse(503), method="PUT", path="checkpoints/step-.*safetensors", times=5),
        proxy.add(refuse(503), method="PUT", path="COMMITTED", times=3),
        proxy.add(reset(after=True), method="PUT", path="COMMITTED", after=1, times=1),
        proxy.add(reset(after=True), method="PUT", path="attempt.json", times=1),
        proxy.add(refuse(500), method="PUT", path="events-", after=2, times=3),
        proxy.add(refuse(503), probability=0.05),
    ]
    fault = {"kind": "kill", "rank": 1, "call": 13, "once": str(bucket.bench.folder / "fault")}
    setting = f"model.args.faults={json.dumps([fault])}"
    done = bucket.rayway("run", "tiny.py", "--run-id", "r", "--set", setting)
    assert done.returncode == 0, done.stderr
    assert curve(bucket.steps("r")) == curve(undisturbed["steps"])
    told = bucket.facts("r")
    assert told["weights_sha256"] == undisturbed["facts"]["weights_sha256"]
    assert (told["state"], told["attempts"]) == ("FINISHED", 2)
    assert all(rule.hits for rule in bursts), [rule.hits for rule in bursts]


def test_a_run_that_was_killed_goes_on_from_the_bucket(bucket: Bucket) -> None:
    words = ("run", "tiny.py", "--workers", "0", "--run-id", "r", *SLOW)
    driver = bucket.bench.start(*words, "--storage", bucket.url)
    wait_until(lambda: len(bucket.saved("r")) >= 2, timeout_s=90)
    kill_and_wait(driver)
    done = bucket.bench.rayway("resume", f"{bucket.url}/r")  # by its URL
    assert done.returncode == 0, done.stderr
    assert [each["step"] for each in bucket.steps("r")] == list(range(1, 25))
    assert bucket.facts("r")["attempts"] == 2


@pytest.mark.parametrize(
    ("code", "words"),
    [("InvalidAccessKeyId", "access key"), ("AccessDenied", "s3:PutObject")],
)
def test_wrong_credentials_end_the_command_before_anything_is_started(
    bucket: Bucket, code: str, words: str
) -> None:
    bucket.proxy.add(refuse(403, code))
    done = bucket.rayway("run", "tiny.py", "--workers", "0")
    assert done.returncode == 5
    assert words in done.stderr
    assert code in done.stderr
    assert "CANARY" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
