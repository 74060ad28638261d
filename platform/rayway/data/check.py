"""What is wrong with a data set, as far as its index tells: cheap, and done before every training.

:mod:`rayway.data.scan` reads the rows too; it reports in the same words.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayway.data.columns import dense, is_list, lists, whole
from rayway.data.files import explain, filesystem_for
from rayway.data.index import Index
from rayway.errors import DataError
from rayway.units import format_bytes

_READ_AT_ONCE = 2
"""Row groups that one worker holds at the least: one in use and one on its way."""
_MEMORY_BYTES = 2 << 30
"""What row groups may take in all workers together, as in the plan of the order."""
_LARGE_BYTES = 64 << 20
_PREPARE = "rayway data prepare"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One thing to know about a data set."""

    level: Literal["advice", "problem"]
    """A problem ends a training, advice does not."""
    text: str
    """What was found, where, and what to do."""


def check_cheap(
    index: Index,
    *,
    global_batch: int,
    transform: bool,
    invalid: Literal["error", "skip", "fill"],
    pad: Mapping[str, int],
    workers: int,
) -> list[Finding]:
    """Return what can be said against a training without reading the data.

    At most one row group is read for each column of lists or with nulls.

    Args:
        index: The data set, with the columns that are read.
        global_batch: Rows of a step that come from this data set.
        transform: Whether a transform makes the tensors, so that any column may be stored.
        invalid: What becomes of rows with nulls.
        pad: List columns that are padded -> their length.
        workers: Processes that read.

    Raises:
        DataError: A row group cannot be read.
    """
    found: list[Finding | None] = []
    if not transform:
        found += tensor_findings(index.schema, level="problem")
        found += [_pad(index, name) for name in pad]
        found += [_ragged(index, name, padded=name in pad) for name in index.schema.names]
        if invalid == "error":
            found += [_nulls(index, name) for name in index.nulls]
    found += [_too_few(index, global_batch), _too_large(index, max(workers, 1))]
    return [finding for finding in found if finding is not None]


def refuse(findings: list[Finding]) -> list[str]:
    """Return the advice among the findings, if there is no problem.

    Raises:
        DataError: There are problems; it tells all of them.
    """
    problems = [finding.text for finding in findings if finding.level == "problem"]
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        lines = "".join(f"\n  - {text}" for text in problems)
        raise DataError(f"the data cannot be trained on, for {len(problems)} reasons:{lines}")
    return [finding.text for finding in findings]


def tensor_findings(schema: pa.Schema, *, level: Literal["advice", "problem"]) -> list[Finding]:
    """Return a finding for each column that no tensor can be made of."""
    return [
        Finding(
            level,
            f"column {field.name!r} is {field.type}: no tensor can be made of {why}. Leave it out "
            f"with data.columns, or make numbers of it in data.transform or with {_PREPARE}.",
        )
        for field in schema
        if (why := no_tensor(field.type))
    ]


def no_tensor(kind: pa.DataType) -> str | None:
    """Return what in a type no tensor can be made of, in words; ``None``: nothing.

    Lists pass: whether they are of one length, only their values tell.
    """
    if isinstance(kind, pa.FixedShapeTensorType):
        return no_tensor(kind.storage_type)
    if is_list(kind):
        return no_tensor(kind.value_type)
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if number or pa.types.is_fixed_size_binary(kind):
        return None
    words = {
        "text": pa.types.is_string(kind) or pa.types.is_large_string(kind),
        "bytes of any length": pa.types.is_binary(kind) or pa.types.is_large_binary(kind),
        "dates and times": pa.types.is_temporal(kind),
        "decimals, which a float would round": pa.types.is_decimal(kind),
        "categories": pa.types.is_dictionary(kind),
        "nested fields": pa.types.is_struct(kind) or pa.types.is_map(kind),
    }
    return next((word for word, fits in words.items() if fits), "this type")


def _too_few(index: Index, global_batch: int) -> Finding | None:
    if index.total >= global_batch:
        return None
    return Finding(
        "problem",
        f"{index.place.url} has {index.total} rows, which do not fill one global batch of "
        f"{global_batch}. Use batch.global_batch={index.total} or less, or data.cover='all'.",
    )


def _too_large(index: Index, workers: int) -> Finding | None:
    """Tell whether row groups are more than memory holds, or much more than a batch needs."""
    needed = workers * _READ_AT_ONCE * index.group_bytes
    large = index.where(int(index.rows.argmax()))
    said = (
        f"row groups take up to {format_bytes(index.group_bytes)} in memory ({large} has "
        f"{index.rows.max():,} rows)"
    )
    if needed > _MEMORY_BYTES:
        return Finding(
            "problem",
            f"{said}. {workers} worker(s) hold {_READ_AT_ONCE} each, {format_bytes(needed)}, and "
            f"{format_bytes(_MEMORY_BYTES)} is the limit. Write the data with row groups of about "
            f"1 MB: {_PREPARE} {index.place.url} DST. Or choose fewer columns with data.columns.",
        )
    if index.group_bytes > _LARGE_BYTES:
        return Finding(
            "advice",
            f"{said}: few fit in memory, so the order is less mixed and the first batch late. "
            f"Row groups of about 1 MB are best: {_PREPARE} {index.place.url} DST.",
        )
    return None


def _pad(index: Index, name: str) -> Finding | None:
    if name in index.schema.names and is_list(index.schema.field(name).type):
        return None
    what = index.schema.field(name).type if name in index.schema.names else "not there"
    return Finding(
        "problem",
        f"data.pad names column {name!r}, which is {what} in {index.place.url}: only lists can be "
        f"filled up. Take it out of data.pad.",
    )


def _ragged(index: Index, name: str, *, padded: bool) -> Finding | None:
    """Tell whether no tensor can be made of the lists in the first row group."""
    kind = index.schema.field(name).type
    if not is_list(kind) or pa.types.is_fixed_size_list(kind) or no_tensor(kind):
        return None
    column = whole(_read(index, 0, name))
    try:
        lists(column) if padded else dense(column)
    except ValueError as error:
        longest = pc.max(pc.list_value_length(column)).as_py()
        fill = "" if padded else f"Fill them up with data.pad={{{name!r}: {longest}}}, or "
        text = f"column {name!r} {error} in {index.where(0)}, and a tensor needs rows of one length"
        repair = f"{fill or 'Either '}pack them with {_PREPARE}, or leave the column out."
        return Finding("problem", f"{text}. {repair}")
    return None


def _nulls(index: Index, name: str) -> Finding | None:
    """Tell how many nulls the footers count in a column, and where the first is."""
    if no_tensor(index.schema.field(name).type):  # said already
        return None
    counts = index.nulls[name]
    shard = int(np.flatnonzero(counts)[0])
    for group in np.flatnonzero(index.shard == shard):
        column = _read(index, int(group), name)
        if column.null_count:
            row = int(pc.index(pc.is_null(column), True).as_py())
            where = f"{index.where(int(group)).removesuffix(')')}, row {row})"
            break
    else:
        where = f"{index.root}/{index.paths[shard]}"
    return Finding(
        "problem",
        f"column {name!r} has {counts.sum():,} null(s) in {np.count_nonzero(counts)} of "
        f"{len(counts)} file(s), the first in {where}. Mend the data, or say what to do with such "
        f"rows: data.invalid='skip' or 'fill'.",
    )


def _read(index: Index, group: int, name: str) -> pa.ChunkedArray:
    filesystem, root = filesystem_for(index.root)
    path = index.paths[index.shard[group]]
    try:
        with (
            filesystem.open_input_file(f"{root}/{path}") as source,
            pq.ParquetFile(source) as file,
        ):
            table = file.read_row_group(int(index.ordinal[group]), columns=[name])
    except (OSError, pa.ArrowException) as error:
        url = f"{index.root}/{path}"
        raise DataError(f"{index.where(group)} cannot be read: {explain(error, url)}") from error
    return table[name]
