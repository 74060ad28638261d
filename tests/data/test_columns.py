import numpy as np
import pyarrow as pa
import pytest

from rayway.data.columns import to_numpy

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
