import numpy as np
import pyarrow as pa
import pytest

from rayway.data.columns import dense, to_numpy, whole

FIXED = pa.list_(pa.int16(), 3)


@pytest.mark.parametrize(
    ("column", "want"),
    [
        (pa.array([1, 2, 3], pa.uint8()), np.array([1, 2, 3], np.uint8)),
        (pa.array([1.5, 2, 3], pa.float16()), np.array([1.5, 2, 3], np.float16)),
        (pa.array([True, False, True]), np.array([True, False, True])),
        (pa.array([[1, 2, 3]] * 3, FIXED), np.array([[1, 2, 3]] * 3, np.int16)),
        (pa.array([[1, 2], [3, 4], [5, 6]]), np.array([[1, 2], [3, 4], [5, 6]])),
        (
            pa.array([[[1], [2]], [[3], [4]], [[5], [6]]], pa.large_list(pa.list_(pa.int64(), 1))),
            np.array([[[1], [2]], [[3], [4]], [[5], [6]]]),
        ),
        (
            pa.array([b"ab", b"cd", b"ef"], pa.binary(2)),
            np.array([[97, 98], [99, 100], [101, 102]], np.uint8),
        ),
        (
            pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12).reshape(3, 2, 2)),
            np.arange(12).reshape(3, 2, 2),
        ),
    ],
    ids=lambda x: str(x.type) if isinstance(x, pa.Array) else "",
)
def test_fixed_width_columns_become_arrays_also_when_sliced(
    column: pa.Array, want: np.ndarray
) -> None:
    for part in (slice(None), slice(1, 3), slice(2, 3)):
        got = to_numpy(column[part])
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want[part])


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array(["a", "b"]), "is of type string"),
        (pa.array([1, None, None]), r"has 2 null\(s\)"),
        (pa.array([[1], [2, 3, 4]]), "has lists of 1 to 4 values|has lists of 1 to 3 values"),
        (pa.array([[1, None]], pa.list_(pa.int64(), 2)), "null"),
        (pa.array([["a", "b"]]), "is of type string"),
        (pa.array([0, 1], pa.timestamp("s")), "timestamp"),
        (pa.array([{"a": 1}]), "struct"),
        (pa.array([b"ab", b"c"]), "is of type binary"),
        (pa.array(["a", "a"]).dictionary_encode(), "dictionary"),
    ],
)
def test_other_columns_are_refused_with_the_reason(column: pa.Array, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        to_numpy(column)


def test_numbers_are_not_copied() -> None:
    column = pa.array(range(100), pa.int64())
    assert to_numpy(column).ctypes.data == column.buffers()[1].address


def test_lists_without_a_value_have_length_zero() -> None:
    assert to_numpy(pa.array([[], []], pa.list_(pa.list_(pa.int64())))).shape == (2, 0, 0)
    assert to_numpy(pa.array([], pa.list_(pa.int64()))).shape == (0, 0)


def test_a_tensors_axes_come_in_their_logical_order() -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0])
    storage = pa.array([list(range(i, i + 6)) for i in (0, 10)], pa.list_(pa.int32(), 6))
    column = pa.ExtensionArray.from_storage(kind, storage)
    assert to_numpy(column).shape == (2, 3, 2)
    np.testing.assert_array_equal(to_numpy(column), column.to_numpy_ndarray())


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (pa.int64(), 2**63 - 1),
        (pa.uint64(), 2**64 - 1),
        (pa.bool_(), True),
        (pa.float16(), np.float16(1.5)),
        (pa.binary(2), b"ab"),
        (pa.list_(pa.int32(), 2), [1, 2]),
        (pa.list_(pa.int16()), [1, 2]),
        (pa.large_list(pa.list_(pa.float32(), 1)), [[1.0], [2.0]]),
    ],
    ids=str,
)
def test_nulls_change_neither_the_type_nor_the_other_rows(kind: pa.DataType, row: object) -> None:
    whole, holed = pa.array([row] * 5, kind), pa.array([None, row, None, row, None], kind)
    want, nothing = dense(whole)
    assert nothing is None
    for part in (slice(None), slice(1, 4), slice(2, 5)):
        got, nulls = dense(holed[part])
        assert nulls is not None
        assert got.dtype == want.dtype
        assert got.shape == nulls.shape == want[part].shape
        there = [at for at, value in enumerate(holed[part].to_pylist()) if value is not None]
        np.testing.assert_array_equal(got[there], want[part][: len(there)])
        assert not nulls[there].any()
        assert nulls.reshape(len(nulls), -1).all(axis=1).sum() == len(nulls) - len(there)


def test_what_lies_in_a_list_under_a_null_is_left_out() -> None:
    offsets, values = pa.array([0, 2, 5, 7], pa.int32()), pa.array(range(7))
    column = pa.ListArray.from_arrays(offsets, values, mask=pa.array([False, True, False]))
    got, nulls = dense(column)
    assert got[[0, 2]].tolist() == [[0, 1], [5, 6]]
    assert nulls is not None
    assert nulls.all(axis=1).tolist() == [False, True, False]


def test_a_chunk_of_its_own_is_not_copied() -> None:
    column = pa.chunked_array([pa.array(range(100))])
    assert whole(column).buffers()[1].address == column.chunk(0).buffers()[1].address
    assert whole(pa.chunked_array([[1], [2]])).to_pylist() == [1, 2]
    assert whole(pa.chunked_array([], pa.int64())).to_pylist() == []
