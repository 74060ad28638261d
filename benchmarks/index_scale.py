"""A data index at scale, simulated: 100,000 shards, a million row groups, a billion rows.

Prints one JSON object: bytes of the index, seconds to load it and to plan, memory of the process.
Run it as: python benchmarks/index_scale.py [--shards N]. No data is read; it takes ten seconds.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import TypeVar

import numpy as np
import psutil
import pyarrow as pa

from measure import report
from rayway.data.index import Index
from rayway.data.plan import plan_order

GROUPS = 10
GLOBAL_BATCH = 4096
UNITS = 64
T = TypeVar("T")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--child", action="store_true", help="Load the index from stdin.")
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(measure(sys.stdin.buffer.read())))
        return

    made = simulate(asked.shards)
    data, write_s = timed(made.to_bytes)
    child = [sys.executable, __file__, "--child"]
    told = subprocess.run(child, input=data, stdout=subprocess.PIPE, check=True).stdout
    report(
        "index_scale",
        method="a made-up index goes as bytes to a fresh process, which loads it and plans from it",
        packages=("numpy", "pyarrow"),
        shards=asked.shards,
        row_groups=len(made.rows),
        rows=made.total,
        index_bytes=len(data),
        write_s=round(write_s, 3),
        **json.loads(told),
    )


def simulate(shards: int) -> Index:
    """Return the index of ``shards`` files of about 10,000 rows with stamps as S3 has them."""
    rng = np.random.default_rng(0)
    digests = [bytes(row).hex() for row in rng.integers(0, 256, (shards, 8), dtype=np.uint8)]
    etags = [bytes(row).hex() for row in rng.integers(0, 256, (shards, 16), dtype=np.uint8)]
    schema = pa.schema({"image": pa.list_(pa.uint8(), 784), "label": pa.int64()})
    return Index(
        root="s3://bucket/set",
        paths=tuple(f"part-{i:06d}.parquet" for i in range(shards)),
        sizes=tuple(rng.integers(7_000_000, 9_000_000, shards).tolist()),
        stamps=tuple(etags),
        digests=tuple(digests),
        rows=rng.integers(900, 1101, shards * GROUPS),
        shard=np.repeat(np.arange(shards), GROUPS),
        ordinal=np.tile(np.arange(GROUPS), shards),
        group_bytes=1_000_000,
        column_bytes={"image": 992_000, "label": 8_000},
        schema=schema,
    )


def measure(data: bytes) -> dict[str, float]:
    """Return how long an index takes to load and to plan from, and what it holds in memory."""
    before = psutil.Process().memory_info().rss
    index, load_s = timed(lambda: Index.from_bytes(data))
    loaded = psutil.Process().memory_info().rss
    facts = {"load_s": load_s, "fingerprint_s": timed(lambda: index.fingerprint)[1]}
    plan, facts["plan_s"] = timed(
        lambda: plan_order(index, global_batch=GLOBAL_BATCH, seed=1, shuffle=True)
    )
    for world in (8, 512):
        step = int(plan.steps_per_epoch * 0.9)
        units = plan.units(3, world, step)
        facts[f"resume_at_90_percent_first_{UNITS}_units_s_of_{world}_ranks"] = timed(
            lambda units=units: list(islice(units, UNITS))  # type: ignore[misc]
        )[1]
    facts = {name: round(value, 3) for name, value in facts.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        **facts,
        "index_in_memory_mb": round((loaded - before) / 1e6),
        "process_peak_mb": round(peak / 1e6),
    }


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return what ``work`` returns and the seconds it took."""
    begin = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begin


if __name__ == "__main__":
    main()
