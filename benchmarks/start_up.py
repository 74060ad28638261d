"""Claim: from the command to the first step, rayway takes at most 0.6 of what Ray Train takes.

And at most 1 s from the end of training to the prompt. ``python benchmarks/start_up.py [--quick]``
takes some 3 minutes on two quiet cores.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from measure import note, report, spread

JOBS = Path(__file__).parent / "start_up_jobs"
RAYWAY = [sys.executable, "-c", "from rayway.cli.main import main; main()"]
GOALS = {"first_step_wall_ratio": 0.6, "exit_wall_s": 1.0}
METHOD = """\
A 20-step job of 2 workers, started cold: as a job of `rayway run`, and as a script for Ray Train \
with ray.init() and default settings; both train the same model from benchmarks/start_up_jobs and \
save one checkpoint at the end. They run in turn, the first pair is not counted (it warms the page \
cache). first_step: from the start of the command until rank 0 begins its second step. exit: from \
the beginning of the last step until the command has ended. cpu: CPU seconds of the command and \
all its descendants, Ray's daemons included, sampled every 50 ms until the first step. A ratio is \
rayway's figure over Ray Train's of the same pair."""
_POLL_S = 0.05
_TIMEOUT_S = 180.0
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


@dataclass(frozen=True)
class Start:
    """What one start of a command took."""

    first_step_wall_s: float
    first_step_cpu_s: float
    exit_wall_s: float
    processes: int
    """The most processes at one time, until the first step."""


class Family:
    """The CPU seconds of all that this process started, the ended ones included."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, float], float] = {}
        self.most = 0

    def look(self) -> None:
        """Note what each process has used so far."""
        # orphans are handed to this process, see adopt_orphans
        alive = psutil.Process().children(recursive=True)
        self.most = max(self.most, len(alive))
        for process in alive:
            try:
                times = process.cpu_times()
                self._seconds[process.pid, process.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:
                continue  # its last figure stands

    def cpu_s(self) -> float:
        """Return the seconds of all processes seen."""
        return sum(self._seconds.values())


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none is lost (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def time_start(command: Sequence[str], *, folder: Path, env: dict[str, str]) -> Start:
    """Run a command to its end and return when it did its first step.

    Raises:
        RuntimeError: It failed, or was not through in time.
    """
    stamps = folder / "stamps"
    stamps.mkdir()
    log = folder / "output"
    began = time.time()
    # settings of a Ray that may be about are not for these
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={**plain, **env}, stdout=output, stderr=output
        )
    family, cpu_s, most = Family(), None, 0
    try:
        while process.poll() is None:
            if cpu_s is None:
                family.look()
                if (stamps / "first_step").exists():
                    cpu_s, most = family.cpu_s(), family.most
            if time.time() - began > _TIMEOUT_S:
                raise RuntimeError(f"{command} was not through after {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S if cpu_s is None else 0.01)
        ended = time.time()
    finally:
        end_descendants()
    if process.returncode or cpu_s is None:
        raise RuntimeError(f"{command} exited {process.returncode}:\n{log.read_text()[-4000:]}")
    first, last = (float((stamps / name).read_text()) for name in ("first_step", "last_step"))
    return Start(first - began, cpu_s, ended - last, most)


def end_descendants() -> None:
    """End what a command left behind: its processes became ours."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=10)


def start_rayway() -> Start:
    """Time ``rayway run``."""
    with tempfile.TemporaryDirectory(prefix="ry-") as scratch:
        folder = Path(scratch)
        shutil.copytree(JOBS, folder, dirs_exist_ok=True)
        change = f"model.args.stamps={folder}/stamps"
        return time_start([*RAYWAY, "run", "on_rayway.py", "--set", change], folder=folder, env={})


def start_ray_train() -> Start:
    """Time the script for Ray Train, in a Ray of its own."""
    # Ray's sockets lie in here, and their paths must be short
    with tempfile.TemporaryDirectory(prefix="rt-") as scratch:
        folder = Path(scratch)
        shutil.copytree(JOBS, folder, dirs_exist_ok=True)
        command = [sys.executable, "on_ray_train.py", f"{folder}/stamps", f"{folder}/storage"]
        return time_start(command, folder=folder, env={"RAY_TMPDIR": f"{folder}/r"})


def figures(starts: Sequence[Start]) -> dict[str, Any]:
    """Return the figures of one side."""
    return {
        "first_step_wall_s": spread([each.first_step_wall_s for each in starts]),
        "first_step_cpu_s": spread([each.first_step_cpu_s for each in starts]),
        "exit_wall_s": spread([each.exit_wall_s for each in starts]),
        "processes": max(each.processes for each in starts),
    }


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one pair, counted though cold")
    parser.add_argument("--pairs", type=int, help="pairs of starts [5; --quick: 1]")
    asked = parser.parse_args()
    adopt_orphans()
    pairs = asked.pairs or (1 if asked.quick else 5)
    ours: list[Start] = []
    theirs: list[Start] = []
    for number in range(pairs + (not asked.quick)):
        sides = [(start_rayway, ours), (start_ray_train, theirs)]
        for start, taken in sides if number % 2 else reversed(sides):
            taken.append(start())
            note(f"{start.__name__}: {taken[-1]}")
    if not asked.quick:
        del ours[0], theirs[0]
    both = list(zip(ours, theirs, strict=True))
    report(
        "start_up",
        method=METHOD,
        packages=["torch", "ray"],
        goals=GOALS,
        quick=asked.quick,
        first_step_wall_ratio=spread([a.first_step_wall_s / b.first_step_wall_s for a, b in both]),
        first_step_cpu_ratio=spread([a.first_step_cpu_s / b.first_step_cpu_s for a, b in both]),
        rayway=figures(ours),
        ray_train=figures(theirs),
    )


if __name__ == "__main__":
    main()
