"""CSV and JSON lines: their columns' types, found by reading all of the files once, and their rows.

Arrow decides on a type by the first block it reads and fails where a later one does not agree. Here
every block is looked at before the first row is written, so that a column has one type in all
shards: the narrowest that holds all of its values.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.json as pajson

from rayway.data.source_rows import (
    BLOCK_BYTES,
    BYTE_ORDER_MARK,
    Opened,
    Rows,
    line_blocks,
    unreadable,
)
from rayway.data.sources import Piece, merge
from rayway.errors import DataError, SpecError

_EXACT = 1 << 53  # the largest range of integers that a float64 holds
_TRUTHS = pa.array(["true", "True", "TRUE", "false", "False", "FALSE"])
_LONG_INTEGER = r"^[ \t]*[+-]?\d{16,}[ \t]*$"


@dataclass(frozen=True, slots=True)
class Found:
    """What a column's values allow."""

    type: pa.DataType
    file: str
    """The first file in which it was of that type."""
    long: bool = False
    """Whether it has integers that a float64 does not hold."""


Columns = dict[str, Found]


def find_types(
    place: Opened,
    format: str,  # noqa: A002 - as the option
    pieces: Sequence[Piece],
    meter: Callable[[int], None] = lambda _: None,
) -> Columns:
    """Return the types of the columns in some pieces; ``meter`` is told the bytes read, about.

    Raises:
        DataError: A file cannot be parsed, or holds values that no type has in common.
    """
    look = _csv_types if format == "csv" else _json_types
    found: Columns = {}
    for piece in merge(pieces):
        found = join([found, look(place, piece, meter)], texts=format == "csv")
    return found


def join(parts: Sequence[Columns], *, texts: bool) -> Columns:
    """Return the types that hold the values of all parts.

    Args:
        parts: Columns by name; a part without columns says nothing.
        texts: Whether the values are texts, as in CSV: then text holds them all where no other
            type does, and each part has to have all columns.

    Raises:
        DataError: No type holds all values of a column, or it is missing somewhere.
    """
    whole: Columns = {}
    for part in parts:
        if texts and whole and part:
            _refuse_missing(whole, part)
        for name, found in part.items():
            before = whole.get(name)
            whole[name] = _join_columns(name, before, found, texts) if before else found
    return whole


def settle(found: Columns, given: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the schema to read with: what was found, but for what the user gives.

    Raises:
        SpecError: A given column does not exist.
        DataError: A column holds nulls only.
    """
    for name in given:
        if name not in found:
            raise SpecError(
                f"--types names the column {name!r}. There are: {', '.join(sorted(found))}."
            )
    types = {name: given.get(name, each.type) for name, each in found.items()}
    for name, kind in types.items():
        if pa.types.is_null(kind):
            raise DataError(
                f"column {name!r} holds nothing in all of its rows, so its type cannot be told. "
                f"Give it with --types {name}:float64 or the like."
            )
    return pa.schema(list(types.items()))


def parse_types(texts: Sequence[str]) -> dict[str, pa.DataType]:
    """Return the types of ``column:type`` texts, e.g. ``tokens:list<int32>``.

    Raises:
        SpecError: A text is of another form or names no type.
    """
    given = {}
    for text in texts:
        column, colon, kind = text.rpartition(":")
        if not colon or not column:
            raise SpecError(f"--types {text}: write column:type, e.g. price:float32.")
        try:
            given[column] = _type_of(kind)
        except ValueError:
            raise SpecError(
                f"--types {text}: no type is called {kind!r}. There are int8 to int64, uint8 to "
                f"uint64, float32, float64, bool, string, and list<...> of them."
            ) from None
    return given


def _type_of(kind: str) -> pa.DataType:
    inner = re.fullmatch(r"list<(.+)>", kind)
    return pa.list_(_type_of(inner[1])) if inner else pa.type_for_alias(kind)


def _refuse_missing(one: Columns, other: Columns) -> None:
    for name in [*one, *other]:
        if name not in one or name not in other:
            has, lacks = (one, other) if name in one else (other, one)
            place = next(iter(lacks.values())).file
            raise DataError(
                f"column {name!r} is in {has[name].file} but missing in {place}. Give all files "
                f"the same columns, or prepare them apart."
            )


def _join_columns(name: str, one: Found, other: Found, texts: bool) -> Found:
    long = one.long or other.long
    kind = _join_types(one.type, other.type)
    if texts and (kind is None or (long and kind == pa.float64())):
        kind = pa.string()
    if kind is None:
        raise DataError(
            f"column {name!r} is {one.type} in {one.file} but {other.type} in {other.file}. Write "
            f"them alike, or give the type with --types {name}:TYPE."
        )
    return Found(kind, one.file if kind == one.type else other.file, long)


def _join_types(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the narrowest type for the values of both, or none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(one) and pa.types.is_list(other):
        value = _join_types(one.value_type, other.value_type)
        return None if value is None else pa.list_(value)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            kind = _join_types(fields.get(field.name, pa.null()), field.type)
            if kind is None:
                return None
            fields[field.name] = kind
        return pa.struct(list(fields.items()))
    return None


def _csv_types(place: Opened, piece: Piece, meter: Callable[[int], None]) -> Columns:
    name = place.name(piece.path)
    found: dict[str, _Text] = {}
    for batch in _open_csv(place, piece, None):
        for column, values in zip(batch.schema.names, batch.columns, strict=True):
            found.setdefault(column, _Text()).take(values)
        meter(batch.nbytes)
    return {column: Found(each.type(), name, each.long) for column, each in found.items()}


class _Text:
    """What the texts of one column have been so far: all truths, all integers, all numbers."""

    def __init__(self) -> None:
        self.long = False
        self._can_be: list[pa.DataType] = [pa.bool_(), pa.int64(), pa.float64()]
        self._seen = False

    def take(self, texts: pa.Array) -> None:
        texts = texts.drop_null()
        self._seen = self._seen or len(texts) > 0
        if len(texts) and self._can_be:
            texts = pc.utf8_trim_whitespace(texts)
            before, self._can_be = self._can_be, []
            for kind in before:
                if self._are(texts, kind):
                    self._can_be.append(kind)

    def type(self) -> pa.DataType:
        if not self._seen:
            return pa.null()
        kind = (self._can_be or [pa.string()])[0]
        return pa.string() if kind == pa.float64() and self.long else kind

    def _are(self, texts: pa.Array, kind: pa.DataType) -> bool:
        if kind == pa.bool_():
            return bool(pc.all(pc.is_in(texts, _TRUTHS)).as_py())
        try:
            numbers = texts.cast(kind)
        except pa.ArrowInvalid:
            numbers = None
        if kind == pa.int64() and numbers is not None:
            ends = pc.min_max(numbers).as_py()
            self.long = self.long or max(abs(ends["min"]), abs(ends["max"])) > _EXACT
        elif kind == pa.float64() and numbers is not None and pa.int64() not in self._can_be:
            self.long = self.long or bool(
                pc.any(pc.match_substring_regex(texts, _LONG_INTEGER)).as_py()
            )
        return numbers is not None


def csv_rows(place: Opened, pieces: Sequence[Piece], schema: pa.Schema) -> Iterator[Rows]:
    """Yield the rows of CSV files with a header; columns come in the schema's order.

    Raises:
        DataError: A file cannot be parsed; file and row are named.
    """
    for piece in merge(pieces):
        row = 0
        for batch in _open_csv(place, piece, schema):
            if len(batch):  # a file without rows may lack columns
                table = pa.Table.from_batches([batch]).select(schema.names)
                yield Rows(table, (place.name(piece.path),), first=row, weight=batch.nbytes)
            row += len(batch)


def _open_csv(place: Opened, piece: Piece, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:
    """Yield a file's blocks with the given types, or as texts and nulls."""
    name = place.name(piece.path)
    try:
        with place.stream(piece.path) as stream:
            header = _header(stream, piece.path)
        if twice := {each for each in header if header.count(each) > 1}:
            raise DataError(f"{name} has more than one column {min(twice)!r}. Name each once.")
        types: Any = schema or dict.fromkeys(header, pa.string())
        options = pacsv.ConvertOptions(column_types=types, strings_can_be_null=schema is None)
        with place.stream(piece.path) as stream:
            yield from pacsv.open_csv(
                stream,
                read_options=pacsv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
                parse_options=pacsv.ParseOptions(
                    delimiter=_delimiter(piece.path), newlines_in_values=True
                ),
                convert_options=options,
            )
    except (OSError, pa.ArrowException) as error:
        raise unreadable(name, error) from error


def _delimiter(path: str) -> str:
    return "\t" if ".tsv" in path.lower().rpartition("/")[2] else ","


def _header(stream: Any, path: str) -> list[str]:
    """Return the names of the columns."""
    begin = stream.read(1 << 20)
    first = pacsv.open_csv(
        io.BytesIO(begin[: begin.find(b"\n") + 1] or begin),
        parse_options=pacsv.ParseOptions(delimiter=_delimiter(path)),
        read_options=pacsv.ReadOptions(use_threads=False),
    )
    return list(first.schema.names)


def _json_types(place: Opened, piece: Piece, meter: Callable[[int], None]) -> Columns:
    name = place.name(piece.path)
    found: Columns = {}
    row = 0
    for at, block in line_blocks(place, piece):
        table = _parse_json(block, at, name, (row, piece.first), None)
        row += block.count(b"\n")
        meter(len(block))
        if table is not None:
            part = {field.name: Found(_plain(field.type), name) for field in table.schema}
            found = join([found, part], texts=False)
    return found


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type without dates: Arrow takes texts for them that need not be meant so."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain(field.type)) for field in kind])
    return kind


def json_rows(place: Opened, pieces: Sequence[Piece], schema: pa.Schema) -> Iterator[Rows]:
    """Yield the rows of files with a JSON object a line; what an object lacks is null.

    Raises:
        DataError: A file cannot be parsed; file and row are named.
    """
    for piece in merge(pieces):
        name, row = place.name(piece.path), 0
        for at, block in line_blocks(place, piece):
            table = _parse_json(block, at, name, (row, piece.first), schema)
            if table is not None:
                yield Rows(
                    table.select(schema.names),
                    (name,),
                    first=row,
                    byte=piece.first,
                    weight=len(block),
                )
            row += block.count(b"\n")


def _parse_json(
    block: bytes, at: int, name: str, before: tuple[int, int], schema: pa.Schema | None
) -> pa.Table | None:
    block = block.removeprefix(BYTE_ORDER_MARK) if at == 0 else block
    if not block.strip():
        return None
    if at == 0 and block.lstrip()[:1] == b"[":
        raise DataError(f"{name} is one JSON array. Write one object a line, without the brackets.")
    try:
        return pajson.read_json(
            pa.BufferReader(block),
            read_options=pajson.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pajson.ParseOptions(
                explicit_schema=schema,
                newlines_in_values=False,
                unexpected_field_behavior="infer" if schema is None else "ignore",
            ),
        )
    except pa.ArrowException as error:
        row, byte = before
        after = f" after byte {byte}" if byte else ""
        text = re.sub(
            r"in row (\d+)", lambda found: f"in row {row + int(found[1])}{after}", str(error)
        )
        raise unreadable(name, text) from error
