"""One consumer of data, in a process of its own: what all tools compared by data_rate.py share.

A script gives :func:`serve` a generator of its batches. It is started with one JSON argument (see
:class:`Asked`), prints ``ready`` once everything is imported, waits for a line on stdin, takes
batches until it was told enough, and prints what that took as JSON. It runs in the environment of
its tool, so nothing here may need rayway.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import torch

Arrays = dict[str, npt.NDArray[Any]]
Batch = Sequence[torch.Tensor]

TOKENS, PIXELS = 129, 3072
SHUFFLE_ROWS = 10_000
"""The buffer of tools that shuffle by one."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a consumer is to do."""

    source: str
    """Folder or S3 URL of the Parquet files."""
    own: str
    """Folder or S3 URL of the tool's own format."""
    scratch: str
    """An empty folder of this run."""
    images: bool
    """Rows are pictures with labels; else tokens."""
    rank: int = 0
    world: int = 1
    batch: int = 256
    """Rows of a batch of one consumer."""
    rows: int = 0
    """A consumer may end after so many rows, and a Ray Data set has so many for each consumer."""
    least_s: float = 0.0
    """Seconds after the first batch before which it goes on all the same."""
    most_s: float = 60.0
    """Seconds after the first batch when it ends whatever it has."""
    core_each: bool = False
    """Keep to one core, another for each consumer."""
    convert: bool = False
    """Only write the tool's own format, to ``own``."""
    how: str = ""
    """A variant of the tool."""


@dataclass
class Taken:
    """What one consumer took. Times are seconds since 1970; CPU is of all processes below."""

    go: float
    first: float = 0.0
    end: float = 0.0
    rows: int = 0
    first_rows: int = 0
    cpu_go: float = 0.0
    cpu_first: float = 0.0
    cpu_end: float = 0.0


def serve(
    batches: Callable[[Asked], Iterable[Batch]], convert: Callable[[Asked], None] | None = None
) -> None:
    """Do what the command line asks, as this module's docstring says."""
    asked = read_asked()
    if asked.convert:
        if convert is not None:
            convert(asked)
        return
    torch.set_num_threads(1)
    if asked.core_each:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[asked.rank % len(cores)]})
    wait_for_go()
    finish([drain(lambda: batches(asked), asked)])


def read_asked() -> Asked:
    """Return what the command line asks for."""
    return Asked(**json.loads(sys.argv[1]))


def wait_for_go() -> None:
    """Say that everything is imported, and wait for the others."""
    print("ready", flush=True)
    sys.stdin.readline()


def finish(taken: Sequence[Taken]) -> None:
    """Print what was taken and leave, waiting for no thread of a tool."""
    print(json.dumps([asdict(each) for each in taken]), flush=True)
    os._exit(0)


def drain(batches: Callable[[], Iterable[Batch]], asked: Asked, family: int = 0) -> Taken:
    """Take batches until ``asked`` is met, or they end.

    Args:
        batches: Opens the data.
        asked: When to end.
        family: The process whose descendants' CPU counts too. 0: this one.
    """
    taken = Taken(go=time.time(), cpu_go=family_cpu_s(family))
    for batch in batches():
        for tensor in batch:
            tensor[:, 0].sum() if tensor.ndim > 1 else tensor.sum()  # a look at each row
        taken.rows += len(batch[0])
        now = time.time()
        if not taken.first:
            taken.first, taken.first_rows = now, taken.rows
            taken.cpu_first = family_cpu_s(family)
        if now - taken.first > (asked.least_s if taken.rows >= asked.rows else asked.most_s):
            break
    taken.end, taken.cpu_end = time.time(), family_cpu_s(family)
    return taken


def family_cpu_s(root: int = 0) -> float:
    """Return the CPU seconds of a process and all below it, the ended ones included."""
    own, ticks = root or os.getpid(), os.sysconf("SC_CLK_TCK")
    used: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            used[int(name)] = sum(map(int, fields[11:15])) / ticks
            children.setdefault(int(fields[1]), []).append(int(name))
    if own == os.getpid():  # finer than ticks
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        used[own] = time.process_time() + ended.ru_utime + ended.ru_stime
    family = [own]
    for pid in family:
        family += children.get(pid, [])
    return sum(used.get(pid, 0.0) for pid in family)


def filesystem_of(source: str) -> tuple[pafs.FileSystem, str]:
    """Return the filesystem of a folder or S3 URL, and the path on it."""
    if not source.startswith("s3://"):
        return pafs.LocalFileSystem(), source
    scheme, _, host = os.environ["AWS_ENDPOINT_URL"].partition("://")
    store = pafs.S3FileSystem(endpoint_override=host, scheme=scheme, region="us-east-1")
    return store, source.removeprefix("s3://")


def parquet_files(asked: Asked) -> tuple[pafs.FileSystem, list[str]]:
    """Return the filesystem and the paths of the source's shards on it."""
    filesystem, folder = filesystem_of(asked.source)
    found = filesystem.get_file_info(pafs.FileSelector(folder))
    return filesystem, sorted(each.path for each in found if each.path.endswith(".parquet"))


def arrays_of(table: pa.Table) -> Arrays:
    """Return a table's columns as arrays of shape (rows, ...), without a copy."""
    return {name: _array(table.column(name).combine_chunks()) for name in table.column_names}


def tensors_of(arrays: Arrays) -> Batch:
    """Return columns as tensors."""
    return [torch.from_numpy(array) for array in arrays.values()]


def stored_arrays(asked: Asked) -> Iterator[Arrays]:
    """Yield the source's row groups in stored order, for a conversion."""
    filesystem, paths = parquet_files(asked)
    for path in paths:
        file = pq.ParquetFile(path, filesystem=filesystem)
        for group in range(file.num_row_groups):
            yield arrays_of(file.read_row_group(group))


def _array(column: pa.Array) -> npt.NDArray[Any]:
    if pa.types.is_fixed_size_binary(column.type):
        width = column.type.byte_width
        begin = column.offset * width
        data = np.frombuffer(column.buffers()[1], np.uint8, len(column) * width, begin)
        rows = data.reshape(len(column), width)
        return rows if width == PIXELS else rows.view(np.int32)
    if pa.types.is_list(column.type):
        values: npt.NDArray[Any] = column.flatten().to_numpy()
        return values.reshape(len(column), -1)
    numbers: npt.NDArray[Any] = column.to_numpy()
    return numbers
