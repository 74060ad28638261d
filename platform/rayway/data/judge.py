"""What a scan of a data set means for training: problems that end one, and advice."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from rayway.data.check import Finding, check_cheap, no_tensor, tensor_findings
from rayway.data.index import Index, of_footers
from rayway.data.scan import Rules, Scan
from rayway.data.values import Bad
from rayway.errors import DataError
from rayway.units import format_bytes

_SMALL_BYTES, _LARGE_BYTES = 64 << 10, 16 << 20
_PREPARE = "rayway data prepare"
_TWICE = "there more than once"


def judge(scan: Scan, rules: Rules) -> tuple[Index | None, list[Finding]]:
    """Return the data set's index if it is fit for one, and all that is to be said.

    Problems come first; each thing is told once.
    """
    index, reason = _index(scan, rules)
    findings = [*scan.damage, *_drift(scan, rules)]
    if index is None and not findings:
        findings.append(Finding("problem", reason))
    for name in scan.schema.names:
        if name in scan.values:
            findings += _about_column(scan, name, rules)
    if not rules.job:
        findings += tensor_findings(scan.schema, level="advice")
    elif index is not None:
        findings += check_cheap(
            index,
            global_batch=rules.global_batch,
            transform=rules.transform,
            invalid="skip",  # nulls were counted by reading
            pad=rules.pad,
            workers=rules.workers,
        )
    findings += _about_layout(scan)
    return index, sorted(dict.fromkeys(findings), key=lambda each: each.level == "advice")


def _index(scan: Scan, rules: Rules) -> tuple[Index | None, str]:
    files = [scan.files[number] for number in scan.footers]
    try:
        return of_footers(scan.place, files, list(scan.footers.values()), rules.columns), ""
    except DataError as error:
        return None, str(error)


def _drift(scan: Scan, rules: Rules) -> Iterator[Finding]:
    """Tell of columns that are not alike in all files, each once with how many files it is in."""
    real = [number for number, footer in scan.footers.items() if any(footer.rows)]
    first = real[0] if real else next(iter(scan.footers))
    schema = scan.footers[first].schema
    unlike: dict[tuple[str, str], list[int]] = {}
    for number, footer in scan.footers.items():
        for name, found in _differences(footer.schema, schema, rules, empty=number not in real):
            unlike.setdefault((name, found), []).append(number)
    for (name, found), files in unlike.items():
        where = f"{scan.place.folder}/{scan.files[files[0]].path}"
        more = f" and {len(files) - 1} more file(s)" if len(files) > 1 else ""
        if found == _TWICE:
            repair = "Write it with each name once."
            yield Finding("problem", f"column {name!r} is {found} in {where}{more}. {repair}")
            continue
        wanted = schema.field(name).type if name in schema.names else "missing"
        yield Finding(
            "problem",
            f"column {name!r} is {found} in {where}{more} but {wanted} in "
            f"{scan.place.folder}/{scan.files[first].path}. Write them alike, or choose columns "
            f"that agree with data.columns.",
        )


def _differences(
    found: pa.Schema, wanted: pa.Schema, rules: Rules, *, empty: bool
) -> list[tuple[str, str]]:
    """Return (column, what is wrong with it) of a file; in one without rows, types may differ."""
    twice = sorted({name for name in found.names if found.names.count(name) > 1})
    if twice or empty or found is wanted:
        return [(name, _TWICE) for name in twice]
    names = [*wanted.names, *found.names] if rules.columns is None else rules.columns
    before, after = ({f.name: str(f.type) for f in schema} for schema in (wanted, found))
    return [
        (name, after.get(name, "missing"))
        for name in dict.fromkeys(names)
        if after.get(name) != before.get(name)
    ]


def _about_column(scan: Scan, name: str, rules: Rules) -> Iterator[Finding]:
    values, kind = scan.values[name], scan.schema.field(name).type
    strict = rules.invalid == "error" and not rules.transform and not no_tensor(kind)
    repair = "Mend the data, or set data.invalid to 'skip' or 'fill'."
    if rules.transform:
        repair = "The transform has to deal with them."
    elif rules.invalid != "error":
        repair = f"data.invalid={rules.invalid!r} deals with them."
    elif no_tensor(kind):
        repair = "A transform has to deal with them."
    for bad, what in (
        (values.null, "null"),
        (values.nan, "NaN"),
        (values.infinite, "infinite"),
    ):
        if bad.first is not None:
            yield Finding(
                "problem" if strict else "advice",
                f"column {name!r} has {bad.count:,} {what} value(s), {_first(scan, bad)}. {repair}",
            )
    if values.outside.first is not None:
        low, high = rules.ranges[name]
        wanted = f"{'' if low is None else f'{low:g}'}:{'' if high is None else f'{high:g}'}"
        yield Finding(
            "problem",
            f"column {name!r} has {values.outside.count:,} value(s) outside {wanted}, the first "
            f"{values.outside.example} in {scan.where(values.outside.first)}. Mend the data, or "
            f"leave such rows out with {_PREPARE}.",
        )
    if values.long.first is not None:
        yield Finding(
            "problem",
            f"column {name!r} has {values.long.count:,} list(s) longer than data.pad="
            f"{rules.pad[name]}, {_first(scan, values.long)} with {values.long.example} values. "
            f"Raise it to {values.longest}, or cut the lists with {_PREPARE}.",
        )
    ragged = values.shortest != values.longest and name not in rules.pad and not no_tensor(kind)
    if ragged and not rules.job:  # with one, the index tells
        yield Finding(
            "advice",
            f"column {name!r} has lists of {values.shortest} to {values.longest} values, and a "
            f"tensor needs rows of one length. Fill them up with data.pad={{{name!r}: "
            f"{values.longest}}}, or pack them with {_PREPARE}.",
        )


def _about_layout(scan: Scan) -> Iterator[Finding]:
    rows = [count for footer in scan.footers.values() for count in footer.rows]
    sizes = [size for footer in scan.footers.values() for size in footer.group_bytes]
    empty = [number for number, footer in scan.footers.items() if not sum(footer.rows)]
    if empty:
        yield Finding(
            "advice",
            f"{len(empty)} file(s) have no rows, e.g. {scan.files[empty[0]].path}, which does no "
            f"harm.",
        )
    typical = int(np.median(sizes)) if sizes else 0
    if len(rows) > 1 and typical < _SMALL_BYTES:
        why = f"half of the row groups take less than {format_bytes(max(typical, 1))}: many reads"
        yield Finding("advice", f"{why} for little data. {_better(scan)}")
    if sizes and max(sizes) > _LARGE_BYTES:
        why = f"row groups take up to {format_bytes(max(sizes))} in memory: few are mixed at a time"
        yield Finding("advice", f"{why}, and the first batch is late. {_better(scan)}")
    if scan.checksums is False:
        yield Finding(
            "advice",
            f"pages have no checksums, so a bit that flips in the store is trained on. {_PREPARE} "
            f"writes them, as does pyarrow with write_page_checksum=True.",
        )


def _better(scan: Scan) -> str:
    return f"About 1 MB is best: {_PREPARE} {scan.place.url} DST."


def _first(scan: Scan, bad: Bad) -> str:
    assert bad.first is not None
    return f"the first in {scan.where(bad.first)}"
