import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.data.pack import Packer, pack
from rayway.errors import SpecError

DOCUMENTS = st.lists(st.integers(0, 40), max_size=60)


def documents(sizes: list[int], kind: pa.DataType | None = None) -> pa.Table:
    """Documents whose tokens are all different, from 1 on."""
    ends = np.cumsum([0, *sizes]).tolist()
    lists = [list(range(a + 1, b + 1)) for a, b in itertools.pairwise(ends)]
    return pa.table({"tokens": pa.array(lists, kind or pa.list_(pa.int32())), "other": sizes})


def arrays(packed: pa.Table, length: int) -> list[np.ndarray]:
    return [
        packed[name].combine_chunks().flatten().to_numpy().reshape(-1, length)
        for name in ("tokens", "segment", "position")
    ]


@given(DOCUMENTS, st.integers(1, 17), st.integers(1, 20))
def test_every_token_comes_once_and_documents_stay_whole(
    sizes: list[int], length: int, window: int
) -> None:
    tokens, segment, position = arrays(
        pack(documents(sizes), "tokens", length, window=window), length
    )
    real = segment > 0
    assert sorted(tokens[real].tolist()) == list(range(1, sum(sizes) + 1))
    assert not tokens[~real].any()
    assert not position[~real].any()
    first = np.cumsum([1, *sizes])  # the first token of each document
    pieces = 0
    for row in range(len(tokens)):
        numbers = segment[row][real[row]]
        assert (np.diff(numbers) >= 0).all()
        assert set(numbers.tolist()) == set(range(1, numbers.max() + 1))
        assert real[row].tolist() == sorted(real[row].tolist(), reverse=True)  # padding comes last
        for number in range(1, numbers.max() + 1):
            piece = tokens[row][segment[row] == number]
            assert (position[row][segment[row] == number] == np.arange(len(piece))).all()
            assert (np.diff(piece) == 1).all()
            begin = piece[0] - first[np.searchsorted(first, piece[0], "right") - 1]
            assert begin % length == 0
            pieces += 1
    assert pieces == sum(-(-size // length) for size in sizes)


@given(DOCUMENTS, st.integers(1, 17), st.lists(st.integers(0, 60), max_size=5))
def test_rows_do_not_depend_on_how_documents_come(
    sizes: list[int], length: int, cuts: list[int]
) -> None:
    table = documents(sizes)
    packer = Packer("tokens", length, window=7)
    ends = [0, *sorted(min(cut, len(sizes)) for cut in cuts), len(sizes)]
    parts = []
    for begin, end in itertools.pairwise(ends):
        parts += list(packer.add(table.slice(begin, end - begin)))
    parts += list(packer.finish())
    whole = pack(table, "tokens", length, window=7)
    if parts:
        assert pa.concat_tables(parts).combine_chunks() == whole.combine_chunks()
    assert packer.empty_documents == sizes.count(0)
    assert packer.tokens == sum(sizes)
    assert packer.rows == len(whole)


def test_a_thousand_documents_fill_their_rows() -> None:
    sizes = np.clip(np.random.default_rng(0).lognormal(5.8, 1.1, 1000).astype(int), 1, 3000)
    packed = pack(documents(sizes.tolist()), "tokens", 1024)
    assert sizes.sum() / (len(packed) * 1024) >= 0.98


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.int32(), 3)],
    ids=str,
)
def test_any_list_of_integers_can_be_packed_and_keeps_its_type(kind: pa.DataType) -> None:
    packed = pack(documents([3, 3, 3], kind), "tokens", 4)
    assert packed.schema.field("tokens").type == pa.list_(kind.value_type, 4)
    assert packed.schema.field("segment").type == pa.list_(pa.int32(), 4)
    assert packed["tokens"].to_pylist() == [[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 9, 0]]


def test_documents_without_tokens_give_columns_and_no_row() -> None:
    packed = pack(documents([0, 0]), "tokens", 4)
    assert len(packed) == 0
    assert packed.schema.names == ["tokens", "segment", "position"]


@pytest.mark.parametrize(
    ("column", "length", "words"),
    [
        ("token", 4, "no column 'token' to pack. There are: tokens, other"),
        ("other", 4, "'other' is of type int64 and cannot be packed"),
        ("tokens", 0, "rows of 0 tokens"),
        ("segment", 4, "'segment' cannot be packed"),
    ],
)
def test_what_cannot_be_packed_is_refused(column: str, length: int, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        pack(documents([1, 2]), column, length)


@pytest.mark.parametrize("bad", [[[1], None], [[1, None]]])
def test_nulls_are_refused(bad: list[list[int] | None]) -> None:
    table = pa.table({"tokens": pa.array(bad, pa.list_(pa.int32()))})
    with pytest.raises(SpecError, match="'tokens' has nulls"):
        pack(table, "tokens", 4)
