"""JSON as rayway stores it: one object, nothing silently lost, nothing lenient.

Python's own reader takes the last of two equal keys and accepts ``NaN``; its writer turns the key
``1`` into ``"1"``. Each of these can change a record without a word, so all are refused here.
"""

import json
from collections.abc import Mapping
from typing import NoReturn

from pydantic import JsonValue

from rayway.errors import StorageError

Record = dict[str, JsonValue]


def encode_record(record: Mapping[str, JsonValue], *, name: str) -> bytes:
    """Return ``record`` as indented UTF-8 JSON that reads back equal.

    Args:
        record: JSON values only: no tuples, no keys other than text, no NaN or infinity.
        name: What the record is, for the error message.

    Raises:
        StorageError: The record would not read back as it is.
    """
    try:
        text = json.dumps(record, allow_nan=False, ensure_ascii=False, indent=1)
        same = json.loads(text) == record
        data = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(
            f"{name} cannot be stored as JSON: {error}. Use text, numbers, lists and dictionaries; "
            "store a non-finite number as text."
        ) from error
    if not same:
        raise StorageError(
            f"{name} would read back changed from JSON. Use text as keys and lists, not tuples."
        )
    return data + b"\n"


def decode_record(data: bytes, *, name: str) -> Record:
    """Return the one JSON object in ``data``.

    Raises:
        StorageError: It is not strict JSON in UTF-8, repeats a key, or is no object.
    """
    try:
        record = json.loads(
            data.decode(), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{name} is not valid JSON: {error}.") from error
    if not isinstance(record, dict):
        raise StorageError(f"{name} holds a JSON {type(record).__name__}, not an object.")
    return record


def _without_repeats(pairs: list[tuple[str, JsonValue]]) -> Record:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} is given twice")
    return record


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
