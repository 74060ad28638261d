import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rayway.checkpoint.manifest import Alias, FileEntry, Manifest, Marker
from rayway.errors import CheckpointError

ALIAS = Alias(of="a", shape=(2, 3), stride=(3, 1), offset=0)
MANIFEST = Manifest(
    run_id="a-1",
    step=5,
    attempt=1,
    files=(FileEntry(name="model.safetensors", bytes=9, sha256="a" * 64, aliases={"b": ALIAS}),),
    facts={"lr": 0.1, "nested": {"list": [1, None, "ü"]}},
    weights_sha256="b" * 64,
    created_at=1.5,
)
MARKER = Marker(
    step=5,
    attempt=1,
    manifest_sha256=MANIFEST.digest(),
    total_bytes=9,
    weights_sha256="b" * 64,
    committed_at=2.5,
    writer="c" * 32,
)


def test_a_manifest_and_a_marker_read_back_equal() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert Marker.from_json(MARKER.to_json()) == MARKER
    assert MANIFEST.total_bytes == 9


@pytest.mark.parametrize(
    "name",
    ["../m.safetensors", "/etc/m.safetensors", "a/m.safetensors", "a\\m.safetensors", "m.pkl", "..",
     ".safetensors", "m.safetensors\n", "", "m.safetensors/..", "a\0.safetensors", "~.safetensors"],
)  # fmt: skip
def test_a_file_name_cannot_leave_the_folder(name: str) -> None:
    record = json.loads(MANIFEST.to_json())
    record["files"][0]["name"] = name
    with pytest.raises(CheckpointError, match=r"manifest\.json is not as written: files\.0\.name"):
        Manifest.from_json(json.dumps(record).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [("schema", 2), ("step", -1), ("step", "5"), ("step", 5.5), ("attempt", 0), ("files", None),
     ("weights_sha256", "B" * 64), ("created_at", None), ("facts", []), ("surplus", 1),
     ("run_id", 3), ("step", True)],
)  # fmt: skip
def test_a_field_that_is_not_as_written_is_named(field: str, value: Any) -> None:
    record = json.loads(MANIFEST.to_json()) | {field: value}
    with pytest.raises(CheckpointError, match=rf"manifest\.json is not as written: {field}"):
        Manifest.from_json(json.dumps(record).encode())


def test_a_key_given_twice_is_refused() -> None:
    data = MANIFEST.to_json().replace(b'"step": 5', b'"step": 4, "step": 5')
    with pytest.raises(CheckpointError, match="'step' is given twice"):
        Manifest.from_json(data)


def test_a_marker_vouches_for_its_own_bytes() -> None:
    data = MARKER.to_json()
    for i in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[i] ^= 1 << bit
            with pytest.raises(CheckpointError, match="COMMITTED"):
                Marker.from_json(bytes(flipped))
    for damaged in (data + b" ", data[:-1], b"", b"{}"):
        with pytest.raises(CheckpointError, match="COMMITTED"):
            Marker.from_json(damaged)


@pytest.mark.parametrize("facts", [{"a": (1,)}, {1: 2}, {"a": b"1"}, {"a": {1}}])
def test_facts_are_json_values(facts: Any) -> None:
    with pytest.raises(ValidationError):
        replace(MANIFEST, facts=facts)
