"""Packing: documents of any length laid side by side into rows of one length.

Documents are taken in windows of a fixed number, in stored order, and each window is packed for
itself by best fit, longest first. The rows so depend on the documents alone, not on how they came:
in which batches, on how many processes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayway.errors import SpecError

WINDOW_DOCUMENTS = 4096
"""Documents that are packed together. More of them fill rows better and mix a longer stretch."""

_BLOCK_TOKENS = 1 << 16

Ints = npt.NDArray[np.int64]


def pack(
    table: pa.Table, column: str, tokens_per_row: int, *, window: int = WINDOW_DOCUMENTS
) -> pa.Table:
    """Return the documents of a list column in rows of ``tokens_per_row`` tokens.

    A document longer than a row is cut into pieces of a row and a rest. Every token comes once;
    what is left of a row is 0. Documents without a token are left out, and so are other columns.

    Args:
        table: A document a row.
        column: Its tokens: lists of integers.
        tokens_per_row: The length T of a row.
        window: How many documents, in stored order, are packed together.

    Returns:
        ``column``, and two columns of int32: ``segment``, the number of the document in its row,
        from 1, and 0 where there is none; ``position``, the place in the document, or in its
        piece, from 0. Each has T entries a row, as fixed-size lists.

    Raises:
        SpecError: There is no such column, it holds something else, or T is below 1.
    """
    packer = Packer(column, tokens_per_row, window=window)
    parts = [*packer.add(table), *packer.finish()]
    return pa.concat_tables(parts) if parts else packer.empty(table)


class Packer:
    """Packs documents that come table by table; see :func:`pack`.

    Args:
        column: Lists of integers: the tokens of a document.
        tokens_per_row: The length of a row.
        window: How many documents are packed together.
    """

    def __init__(self, column: str, tokens_per_row: int, *, window: int = WINDOW_DOCUMENTS) -> None:
        if tokens_per_row < 1:
            raise SpecError(f"rows of {tokens_per_row} tokens cannot be packed; use 1 or more.")
        if column in {"segment", "position"}:
            raise SpecError(f"a column named {column!r} cannot be packed: packing adds one.")
        self._column, self._tokens_per_row, self._window = column, tokens_per_row, window
        self._held: list[pa.Array] = []
        self._held_documents = 0
        self.empty_documents = 0
        """Documents left out so far, because they had no token."""
        self.tokens = 0
        """Tokens packed so far."""
        self.rows = 0
        """Rows made so far."""

    def add(self, table: pa.Table) -> Iterator[pa.Table]:
        """Take some documents, and yield the rows of each window that is full.

        Raises:
            SpecError: The column is missing or holds no lists of integers.
        """
        for documents in _documents(table, self._column):
            filled = np.diff(documents.offsets.to_numpy()) > 0
            if not filled.all():
                self.empty_documents += int((~filled).sum())
                documents = documents.filter(pa.array(filled))  # noqa: PLW2901 - without the empty
            begin = 0
            while self._held_documents + len(documents) - begin >= self._window:
                end = begin + self._window - self._held_documents
                self._held.append(documents[begin:end])
                yield from self.finish()
                begin = end
            self._held.append(documents[begin:])
            self._held_documents += len(documents) - begin

    def check(self, schema: pa.Schema) -> None:
        """Check that documents in such a table can be packed.

        Raises:
            SpecError: The column is missing or holds no lists of integers.
        """
        _refuse_other(schema, self._column)

    def finish(self) -> Iterator[pa.Table]:
        """Yield the rows of the last documents, too few for a window."""
        held, self._held, self._held_documents = self._held, [], 0
        held = [documents for documents in held if len(documents)]
        if held:
            yield from self._packed(held[0] if len(held) == 1 else pa.concat_arrays(held))

    def empty(self, table: pa.Table) -> pa.Table:
        """Return the columns of the result, without rows, for documents like those of a table."""
        kind = table.schema.field(self._column).type.value_type
        return self._table(np.zeros(0, kind.to_pandas_dtype()), *np.zeros((2, 0), np.int32))

    def _packed(self, documents: pa.Array) -> Iterator[pa.Table]:
        length = self._tokens_per_row
        sizes = np.diff(documents.offsets.to_numpy()).astype(np.int64)
        pieces = piece_lengths(sizes, length)
        row, segment = lay_out(pieces, length)
        self.tokens, rows = self.tokens + int(sizes.sum()), int(row.max()) + 1
        self.rows += rows
        values = documents.flatten().to_numpy(zero_copy_only=False)
        begins = np.cumsum(pieces) - pieces
        # the runs that the rows are made of, row after row: pieces, and what is left as segment 0
        left = length - np.bincount(row, weights=pieces, minlength=rows).astype(np.int64)
        runs = np.lexsort(
            (np.append(segment, np.full(rows, length + 1)), np.append(row, range(rows)))
        )
        sizes = np.append(pieces, left)[runs]
        begins = np.append(begins, np.zeros(rows, np.int64))[runs]
        segment = np.append(segment, np.zeros(rows, np.int64))[runs]
        ends = np.cumsum(sizes)
        few = max(_BLOCK_TOKENS // length, 1)
        for first in range(0, rows, few):  # a few rows at a time stay in the processor's cache
            low, high = np.searchsorted(ends, [first * length, (first + few) * length], "right")
            yield self._block(values, sizes[low:high], begins[low:high], segment[low:high])

    def _block(
        self, values: npt.NDArray[Any], sizes: Ints, begins: Ints, segment: Ints
    ) -> pa.Table:
        """Return some whole rows from their runs."""
        segments = np.repeat(segment.astype(np.int32), sizes)
        places = np.arange(len(segments))
        starts = np.cumsum(sizes) - sizes
        positions = (places - np.repeat(starts, sizes)).astype(np.int32)
        places += np.repeat(begins - starts, sizes)
        padding = segments == 0
        places[padding] = 0
        tokens = values[places]
        tokens[padding], positions[padding] = 0, 0
        return self._table(tokens, segments, positions)

    def _table(self, *columns: npt.NDArray[np.generic]) -> pa.Table:
        names = (self._column, "segment", "position")
        lists = [
            pa.FixedSizeListArray.from_arrays(pa.array(column), self._tokens_per_row)
            for column in columns
        ]
        return pa.table(dict(zip(names, lists, strict=True)))


def piece_lengths(sizes: Ints, length: int) -> Ints:
    """Return the sizes of the pieces when documents are cut to ``length``, in stored order."""
    counts = -(-sizes // length)
    pieces = np.full(counts.sum(), length, dtype=np.int64)
    last = np.cumsum(counts)[counts > 0] - 1
    pieces[last] = (sizes - (counts - 1) * length)[counts > 0]
    return pieces


def lay_out(pieces: Ints, length: int) -> tuple[Ints, Ints]:
    """Return each piece's row, and its number in that row from 1; shapes (pieces,).

    Best fit, longest first. Rows are numbered by their first piece and pieces stand in stored
    order, so that rows of many short documents do not gather at the end.
    """
    found = _best_fit(pieces, length)
    firsts = np.full(found.max() + 1, len(pieces), dtype=np.int64)
    np.minimum.at(firsts, found, np.arange(len(pieces)))
    number = np.empty_like(firsts)
    number[np.argsort(firsts)] = np.arange(len(firsts))
    row = number[found]
    order = np.argsort(row, kind="stable")
    begins = np.flatnonzero(np.diff(row[order], prepend=-1))
    counts = np.diff(np.append(begins, len(order)))
    segment = np.empty_like(pieces)
    segment[order] = np.arange(len(order)) - np.repeat(begins, counts) + 1
    return row, segment


def _best_fit(pieces: Ints, length: int) -> Ints:
    """Return a row for each piece. ``rooms[n]`` are the rows that have n left, ``seen`` its bits.

    The smallest n that is enough is the lowest bit of ``seen`` from the piece's size up: one shift.
    """
    row = np.empty(len(pieces), dtype=np.int64)
    rooms: defaultdict[int, list[int]] = defaultdict(list)
    seen, rows = 0, 0
    longest_first = np.argsort(-pieces, kind="stable")
    for piece, size in zip(longest_first.tolist(), pieces[longest_first].tolist(), strict=True):
        fits = seen >> size
        if fits:
            room = size + (fits & -fits).bit_length() - 1
            which = rooms[room].pop()
            if not rooms[room]:
                seen ^= 1 << room
        else:
            room, which = length, rows
            rows += 1
        row[piece] = which
        if left := room - size:
            rooms[left].append(which)
            seen |= 1 << left
    return row


def _documents(table: pa.Table, column: str) -> Iterable[pa.Array]:
    """Return the column's chunks as lists."""
    _refuse_other(table.schema, column)
    kind = table.schema.field(column).type
    for chunk in table[column].chunks:
        if chunk.null_count or chunk.flatten().null_count:
            raise SpecError(f"column {column!r} has nulls and cannot be packed. Leave them out.")
        yield chunk.cast(pa.large_list(kind.value_type))


def _refuse_other(schema: pa.Schema, column: str) -> None:
    if column not in schema.names:
        raise SpecError(
            f"there is no column {column!r} to pack. There are: {', '.join(schema.names)}."
        )
    kind = schema.field(column).type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (lists or pa.types.is_fixed_size_list(kind)) or not pa.types.is_integer(kind.value_type):
        raise SpecError(
            f"column {column!r} is of type {kind} and cannot be packed: that takes lists of "
            f"integers. Make them with a transform."
        )
