"""The data sets that the data benchmarks read: tokens in two layouts, and pictures.

Ordinary Parquet in 64 shards with row groups of about 1 MB, about 150 MB of values each.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from measure import note

SHARDS = 64
TOKENS = 129
PIXELS = 3072
GROUP_ROWS = 2344
"""Of tokens, in a row group."""


def token_table(rows: int, shard: int) -> pa.Table:
    """Return rows of 129 int32, most of them small, as fixed-size binary of 516 bytes."""
    tokens = _tokens(rows, shard)
    column = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(tokens.shape[1] * 4), rows, [None, pa.py_buffer(tokens)]
    )
    return pa.table({"tokens": column})


def token_list_table(rows: int, shard: int) -> pa.Table:
    """Return the rows of :func:`token_table` as lists of int32, as most tools write them."""
    tokens = _tokens(rows, shard)
    offsets = np.arange(rows + 1, dtype=np.int32) * TOKENS
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens.ravel()))
    return pa.table({"tokens": column})


def image_table(rows: int, shard: int) -> pa.Table:
    """Return pictures of 3072 bytes and their labels."""
    draws = np.random.default_rng((1, shard))
    pixels = draws.integers(0, 256, (rows, PIXELS), dtype=np.uint8)
    image = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(PIXELS), rows, [None, pa.py_buffer(pixels)]
    )
    return pa.table({"image": image, "label": pa.array(draws.integers(0, 10, rows))})


MAKERS: dict[str, tuple[Callable[[int, int], pa.Table], int, dict[str, object]]] = {
    "tokens": (token_table, GROUP_ROWS, {"compression": "none", "use_dictionary": False}),
    "tokens_list": (token_list_table, GROUP_ROWS, {}),
    "images": (image_table, 391, {"compression": "none", "use_dictionary": False}),
}
"""Name -> what makes a shard of so many rows, the rows of a row group, how it is written."""


def make_set(
    folder: Path,
    name: str,
    *,
    shards: int = SHARDS,
    groups_per_shard: int = 2,
    group_rows: int | None = None,
) -> int:
    """Make a data set in ``folder/name`` unless it is there, and return its rows."""
    make, usual_rows, how = MAKERS[name]
    group_rows = group_rows or usual_rows
    rows = group_rows * groups_per_shard
    place = folder / name
    if not place.exists():
        note(f"making {place}")
        scratch = folder / f"{name}.making"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        for shard in range(shards):
            path = scratch / f"part-{shard:05d}.parquet"
            pq.write_table(make(rows, shard), path, row_group_size=group_rows, **how)
        os.rename(scratch, place)
    found = len(list(place.glob("*.parquet")))
    if found != shards:
        raise SystemExit(f"{place} has {found} shards and not {shards}: delete it to make it anew.")
    return rows * shards


def link_copies(folder: Path, name: str, copies: int) -> None:
    """Make ``folder/name_copies``: every shard so many times, as links to it."""
    place = folder / f"{name}_copies"
    place.mkdir(exist_ok=True)
    for path in (folder / name).glob("*.parquet"):
        for number in range(copies):
            copy = place / f"{path.stem}-{number}.parquet"
            if not copy.exists():
                os.link(path, copy)


def _tokens(rows: int, shard: int) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
    draws = np.random.default_rng((0, shard)).pareto(0.7, (rows, TOKENS))
    return np.minimum(draws * 8, 31_999).astype(np.int32)
