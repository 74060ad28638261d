"""Claim: rayway adds at most 0.10 ms of CPU to a logged step, background threads included.

``python benchmarks/log_cost.py [--quick]`` takes some 2 minutes on one quiet core. The model is so
small (a step of about 1.5 ms) that the loop itself shows.
"""

import argparse
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loops import BareLoop, OurLoop, Pair, in_processes, new_run, take_turns
from measure import note, report, spread
from rayway import BatchSpec, DataSpec, Job, ModelSpec, OptimSpec
from rayway.spec.code import enter_code_root
from step_time import JOBS, STEPS, prepare_data

GOAL_MS = 0.10
METHOD = """\
One process, one thread. rayway's loop and a hand-written loop train equal models on the same rows \
in alternating blocks, and log loss, gradient norm and rate of every step; see loops.py. A repeat \
is a pair of neighbouring blocks; added is rayway's time per step less the other's. cpu: of all \
threads of the process, those of the event log, the data feed and the watch included; on a busy \
machine trust added_cpu_ms_at_best, the difference of the cheapest blocks: what disturbs a block \
only ever adds to it. alone: no process group, as with --workers 0; group: a group of one rank, as \
with --workers 1, and DDP in both loops."""


def microscope(folder: Path) -> Job:
    """Return a job whose step is next to nothing: 8 x 8 images, 16 a step."""
    return Job(
        name="microscope",
        model=ModelSpec(build="models.resnet:build", args={"channels": [16]}),
        loss="models.resnet:loss",
        data=DataSpec(train=f"{folder}/digits/train", prepare="sources.digits:prepare"),
        batch=BatchSpec(global_batch=16),
        optim=OptimSpec(lr=4e-3, weight_decay=0.01, schedule="cosine", steps=STEPS),
    )


def measure(job: Job, pairs: int, steps: int, rank: int, ranks: int, folder: Path) -> list[Pair]:
    """Let the two loops take turns."""
    enter_code_root(JOBS)
    with ExitStack() as stack:
        bare = BareLoop(job, folder / "bare.jsonl", rank=rank, world_size=ranks)
        ours = OurLoop(job, new_run(job, folder), stack, rank=rank)
        return take_turns(bare, ours, pairs=pairs, steps=steps)


def figures(pairs: list[Pair]) -> dict[str, Any]:
    """Return what a step costs more, and what it takes."""
    bare_cpu_ms = [1e3 * pair.bare.cpu_s for pair in pairs]
    ours_cpu_ms = [1e3 * pair.ours.cpu_s for pair in pairs]
    return {
        "added_cpu_ms": spread([1e3 * (pair.ours.cpu_s - pair.bare.cpu_s) for pair in pairs]),
        "added_cpu_ms_at_best": round(min(ours_cpu_ms) - min(bare_cpu_ms), 4),
        "added_wall_ms": spread([1e3 * (pair.ours.wall_s - pair.bare.wall_s) for pair in pairs]),
        "bare_cpu_ms": spread(bare_cpu_ms),
        "rayway_cpu_ms": spread(ours_cpu_ms),
    }


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--pairs", type=int, help="pairs of blocks [31; --quick: 2]")
    asked = parser.parse_args()
    pairs = asked.pairs or (2 if asked.quick else 31)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        job = microscope(Path(scratch, "data"))
        prepare_data(job)
        work = partial(measure, job, pairs, 20 if asked.quick else 300)
        alone, group = Path(scratch, "alone"), Path(scratch, "group")
        alone.mkdir()
        group.mkdir()
        results = {"alone": figures(work(0, 1, alone))}
        note(f"alone: {results['alone']}")
        results["group"] = figures(in_processes(work, ranks=1, folder=group))
        note(f"group: {results['group']}")
    report(
        "log_cost",
        method=METHOD,
        packages=["torch"],
        goal_ms=GOAL_MS,
        quick=asked.quick,
        **results,
    )


if __name__ == "__main__":
    main()
