import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.errors import StorageError
from rayway.storage.records import decode_record, encode_record

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_a_record_reads_back_equal_or_is_refused(record: dict[str, Any]) -> None:
    try:
        data = encode_record(record, name="r.json")
    except StorageError:
        assert any("\ud800" <= character <= "\udfff" for character in repr_deep(record))
    else:
        assert decode_record(data, name="r.json") == record


def repr_deep(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(key + repr_deep(item) for key, item in value.items())
    if isinstance(value, list):
        return "".join(map(repr_deep, value))
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(
    "record",
    [{"a": float("nan")}, {"a": float("inf")}, {"a": (1,)}, {1: 2}, {"a": b"1"}, {"a": {1}}],
)
def test_what_json_would_change_is_refused(record: Any) -> None:
    with pytest.raises(StorageError, match=r"r\.json"):
        encode_record(record, name="r.json")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1}{}', "not valid JSON"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "no JSON number"),
        (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
        (b'{"b": {"a": 1, "a": 1}}', "given twice"),
        (b"[1]", "holds a JSON list"),
        (b"\xff{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (pickle.dumps({"a": 1}), "not valid JSON"),
    ],
)
def test_anything_but_one_strict_object_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(StorageError, match=reason):
        decode_record(data, name="r.json")
