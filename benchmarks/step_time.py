"""Claim: a step of rayway takes at most 1.02 times that of a hand-written DDP loop.

``python benchmarks/step_time.py [--quick]`` takes some 6 minutes on two quiet cores. Both loops log
every step.
"""

import argparse
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from loops import BareLoop, OurLoop, Pair, in_processes, new_run, take_turns
from measure import note, report, spread
from rayway import BatchSpec, DataSpec, Job, ModelSpec, OptimSpec
from rayway.spec.code import enter_code_root
from rayway.spec.load import import_object
from rayway.storage.runs import RunFolder

JOBS = Path(__file__).parent.parent / "jobs"
GOAL = 1.02
METHOD = """\
Each rank is a process of a gloo group with one thread. In each, rayway's loop and a hand-written \
DDP loop train equal models on the same rows in alternating blocks; the hand-written one has its \
data in memory. Both log loss, gradient norm and rate of every step; neither saves or evaluates. \
A repeat is a pair of neighbouring blocks; its ratio is rayway's time per step over the other's. \
wall: of the slowest rank. cpu: of all threads of all ranks' processes, background work included. \
at_best: the ratio of the fastest blocks; trust it on a busy machine, as what disturbs a block \
only ever adds to it."""

STEPS = 10**6  # the length of the run, of which only the first steps are taken


def gpt(folder: Path, *, quick: bool) -> Job:
    """Return the byte GPT of jobs/stdlib_lm.py."""
    width, layers = (32, 1) if quick else (128, 4)
    return Job(
        name="gpt",
        model=ModelSpec(build="models.gpt:build", args={"width": width, "layers": layers}),
        loss="models.gpt:loss",
        data=DataSpec(train=f"{folder}/stdlib/train", prepare="sources.stdlib:prepare"),
        batch=BatchSpec(global_batch=16),
        optim=OptimSpec(lr=1e-3, weight_decay=0.1, warmup_steps=50, schedule="cosine", steps=STEPS),
    )


def resnet(folder: Path, *, quick: bool) -> Job:
    """Return the small network of jobs/digits.py: steps so short that the loop itself shows."""
    channels: JsonValue = [8] if quick else [32, 64]
    return Job(
        name="resnet",
        model=ModelSpec(build="models.resnet:build", args={"channels": channels}),
        loss="models.resnet:loss",
        data=DataSpec(train=f"{folder}/digits/train", prepare="sources.digits:prepare"),
        batch=BatchSpec(global_batch=64),
        optim=OptimSpec(lr=4e-3, weight_decay=0.01, schedule="cosine", steps=STEPS),
    )


def prepare_data(job: Job) -> None:
    """Write the job's data if it is not there."""
    enter_code_root(JOBS)
    folder = Path(next(iter(job.data.sources))).parent
    if not folder.exists() and job.data.prepare is not None:
        import_object(job.data.prepare)(str(folder))


def measure(job: Job, pairs: int, steps: int, rank: int, ranks: int, folder: Path) -> list[Pair]:
    """Let the two loops take turns. Called in each rank's process."""
    enter_code_root(JOBS)
    with ExitStack() as stack:
        run = RunFolder.open(f"{folder}/{job.name}")
        bare = BareLoop(job, folder / "bare.jsonl", rank=rank, world_size=ranks)
        ours = OurLoop(job, run, stack, rank=rank)
        return take_turns(bare, ours, pairs=pairs, steps=steps)


def figures(pairs: list[Pair]) -> dict[str, Any]:
    """Return the ratios of all pairs, and the times for proportion."""
    at_best = {
        f"{kind}_ratio_at_best": round(
            min(getattr(pair.ours, f"{kind}_s") for pair in pairs)
            / min(getattr(pair.bare, f"{kind}_s") for pair in pairs),
            4,
        )
        for kind in ("wall", "cpu")
    }
    return {
        "wall_ratio": spread([pair.ours.wall_s / pair.bare.wall_s for pair in pairs]),
        "cpu_ratio": spread([pair.ours.cpu_s / pair.bare.cpu_s for pair in pairs]),
        **at_best,
        "bare_wall_ms": spread([1e3 * pair.bare.wall_s for pair in pairs]),
        "rayway_wall_ms": spread([1e3 * pair.ours.wall_s for pair in pairs]),
    }


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny models, few steps")
    parser.add_argument("--pairs", type=int, help="pairs of blocks [11; --quick: 2]")
    asked = parser.parse_args()
    pairs = asked.pairs or (2 if asked.quick else 11)
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for make, steps in ((gpt, 20), (resnet, 200)):
            job = make(Path(scratch, "data"), quick=asked.quick)
            prepare_data(job)
            for ranks in (1, 2):
                name = f"{job.name}_x{ranks}"
                folder = Path(scratch, name)
                folder.mkdir()
                new_run(job, folder)
                work = partial(measure, job, pairs, 5 if asked.quick else steps)
                results[name] = figures(in_processes(work, ranks=ranks, folder=folder))
                note(f"{name}: {results[name]}")
    report("step_time", method=METHOD, packages=["torch"], goal=GOAL, quick=asked.quick, **results)


if __name__ == "__main__":
    main()
