"""Commands as users type them, in a folder of their own, on real Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

JOBS = Path(__file__).parent / "jobs"
RAYWAY = [sys.executable, "-c", "from rayway.cli.main import main; main()"]


@dataclass
class Bench:
    """A folder with the test's job in it, and the commands to run there."""

    folder: Path

    def rayway(self, *words: str, timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [*RAYWAY, *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command and let it run; its output goes to files."""
        with (self.folder / "stdout").open("w") as out, (self.folder / "stderr").open("w") as err:
            return subprocess.Popen(
                [*RAYWAY, *words],
                cwd=self.folder,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )

    def show(self, run: str) -> dict[str, Any]:
        """Return what ``rayway show`` says of a run."""
        return json.loads(self.rayway("show", run, "--json").stdout)

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """Return the steps of a run."""
        lines = self.rayway("metrics", run, "--json").stdout.splitlines()
        return [json.loads(line) for line in lines]

    def step(self, run: str) -> int:
        """Return how far a run's events are, without starting a process."""
        steps = [0]
        for log in (self.folder / "runs" / run).glob("attempts/*/events-00000.jsonl"):
            for line in log.read_text().splitlines():
                if '"type":"step"' in line and line.endswith("}"):
                    steps.append(json.loads(line)["step"])
        return max(steps)


def wait_until(true: Callable[[], bool], *, timeout_s: float) -> None:
    """Wait for something that has to become true."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(f"it did not become true within {timeout_s:g} s")
        time.sleep(0.05)


def family(pid: int) -> list[psutil.Process]:
    """Return a process's descendants."""
    return psutil.Process(pid).children(recursive=True)


def runs(process: psutil.Process) -> bool:
    """Is a process there, and not only waiting for its parent to take note of its end?"""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listening(processes: list[psutil.Process]) -> set[str]:
    """Return the addresses that processes accept connections at."""
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def kill_and_wait(process: "subprocess.Popen[str]") -> None:
    """SIGKILL a command that the test started."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)


def curve(steps: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what has to be equal to the last bit in two runs."""
    return [
        (each["step"], each["loss_hex"], each["grad_norm"], each["lr"], tuple(each["ids"]))
        for each in steps
    ]
