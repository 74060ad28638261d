"""Claim: a resume costs what a start costs, memory stays flat, and the number of files is nothing.

``python benchmarks/data_resume.py [--quick]`` takes some 3 minutes on two quiet cores.
"""

import argparse
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from data_sets import GROUP_ROWS, make_set
from measure import note, report, spread
from rayway.data.feed import Feed
from rayway.data.index import Index, build_index
from rayway.data.plan import Plan, plan_order

GLOBAL_BATCH = 256
GOALS = {"resume_over_start": 2.0, "first_batch_s": 0.5, "memory_growth": 1.1}
METHOD = """\
Every figure is of a process of its own, forked from one that has imported torch and rayway. It \
reads the index from a file, makes the plan and opens a feed at a step; first batch: from then \
until the first batch is there. The data are tokens, rows of 516 bytes in row groups of 1.2 MB, \
in the page cache. resume_over_start: at 90 % of an epoch of 1,001,088 rows over at 0 %, of the \
same round. memory: the process's own (USS) above that before the feed was opened, at 10 % and \
100 % of the epoch. files: the first batch of 2,000 row groups of 0.3 MB in 10 and in 2,000 \
files."""


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("data/bench"), help="keeps the data")
    parser.add_argument("--rounds", type=int, help="[5; --quick: 1]")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the rows")
    asked = parser.parse_args()
    multiprocessing.set_forkserver_preload(["rayway.data.feed"])
    rounds = asked.rounds or (1 if asked.quick else 5)
    with tempfile.TemporaryDirectory(prefix="resume-") as scratch:
        sets = made_sets(asked.folder.resolve(), Path(scratch), quick=asked.quick)
        found = measured(sets, rounds)
    report(
        "data_resume",
        method=METHOD,
        packages=["torch", "pyarrow", "numpy"],
        goals=GOALS,
        quick=asked.quick,
        files={name: len(each.paths) for name, (_, each) in sets.items()},
        **found,
    )


def made_sets(folder: Path, scratch: Path, *, quick: bool) -> dict[str, tuple[Path, Index]]:
    """Return name -> the file of an index, and the index; the data are made if they are not there.

    ``few files`` and ``many files`` have the same row groups: in ``many files`` one in each file.
    """
    shapes = {
        "epoch": (4, 2, GROUP_ROWS) if quick else (61, 7, GROUP_ROWS),
        "few files": (2, 4, 586) if quick else (10, 200, 586),
        "many files": (8, 1, 586) if quick else (2000, 1, 586),
    }
    sets = {}
    for name, (shards, groups, rows) in shapes.items():
        place = folder / "resume" / f"{shards}x{groups}x{rows}"
        make_set(place, "tokens", shards=shards, groups_per_shard=groups, group_rows=rows)
        index = build_index(str(place / "tokens"))
        path = scratch / f"{name.replace(' ', '-')}.parquet"
        path.write_bytes(index.to_bytes())
        sets[name] = path, index
    return sets


def measured(sets: dict[str, tuple[Path, Index]], rounds: int) -> dict[str, Any]:
    """Return the figures of all rounds."""
    last = _plan(sets["epoch"][1]).steps_per_epoch
    at = {"start": 0, "resume": last * 9 // 10}
    first: dict[str, list[float]] = {name: [] for name in (*at, "few files", "many files")}
    early: list[float] = []
    late: list[float] = []
    for number in range(rounds):
        todo = [(name, "epoch", step) for name, step in at.items()]
        todo += [(name, name, 0) for name in ("few files", "many files")]
        for name, data, step in reversed(todo) if number % 2 else todo:
            taken = _in_process(sets[data][0], step, step + 1)
            first[name].append(taken["first_batch_s"])
            note(f"{name}: first batch after {taken['first_batch_s']:.3f} s")
        taken = _in_process(sets["epoch"][0], 0, last)
        early.append(taken["memory_mb_at_10"])
        late.append(taken["memory_mb_at_100"])
        note(f"an epoch: {early[-1]:.0f} MB at 10 %, {late[-1]:.0f} MB at 100 %")
    ratios = [b / a for a, b in zip(first["start"], first["resume"], strict=True)]
    many = [b / a for a, b in zip(first["few files"], first["many files"], strict=True)]
    return {
        "resume_over_start": spread(ratios),
        "many_over_few_files": spread(many),
        "first_batch_s": {name: spread(values) for name, values in first.items()},
        "memory_mb": {"at_10_percent": spread(early), "at_100_percent": spread(late)},
        "memory_growth": spread([b / a for a, b in zip(early, late, strict=True)]),
    }


def consume(index: Path, step: int, last: int) -> dict[str, float]:
    """Take the steps [step, last) in this process."""
    torch.set_num_threads(1)
    own, begin = psutil.Process(), time.perf_counter()
    before = own.memory_full_info().uss
    plan = _plan(Index.from_bytes(index.read_bytes()))
    taken: dict[str, float] = {}
    with Feed(
        plan, rank=0, world_size=1, micro_batch=GLOBAL_BATCH, start_step=step, stop_step=last
    ) as feed:
        for number, _ in enumerate(feed):
            if number == 0:
                taken["first_batch_s"] = time.perf_counter() - begin
            if number == (last - step) // 10:
                taken["memory_mb_at_10"] = (own.memory_full_info().uss - before) / 1e6
        taken["memory_mb_at_100"] = (own.memory_full_info().uss - before) / 1e6
    return taken


def _plan(index: Index) -> Plan:
    return plan_order(index, global_batch=GLOBAL_BATCH, seed=1)


def _in_process(index: Path, step: int, last: int) -> dict[str, float]:
    """Return what a process takes that was made for this, from one that has imported all."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as process:
        return process.submit(consume, index, step, last).result()


if __name__ == "__main__":
    main()
