import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rayway.checkpoint.manifest import (
    Alias,
    CutWeights,
    FileEntry,
    Manifest,
    Marker,
    Part,
    Piece,
    TensorEntry,
)
from rayway.errors import CheckpointError

FILE = "rank-00000.model-0.safetensors"
ALIAS = Alias(of="model/a", shape=(2, 3), stride=(3, 1), offset=0)
FILES = (FileEntry(name=FILE, bytes=9, sha256="a" * 64),)
TENSORS = {
    "model/a": TensorEntry(
        dtype="F32", shape=(2, 3), pieces=(Piece(file=FILE, offsets=(0, 0), shape=(2, 3)),)
    )
}
MANIFEST = Manifest(
    run_id="a-1",
    step=5,
    attempt=1,
    world_size=1,
    files=FILES,
    tensors=TENSORS,
    aliases={"model/b": ALIAS},
    facts={"lr": 0.1, "nested": {"list": [1, None, "ü"]}},
    weights_sha256="b" * 64,
    created_at=1.5,
)
PART = Part(
    run_id="a-1",
    step=5,
    attempt=1,
    rank=3,
    world_size=4,
    outline="d" * 64,
    files=FILES,
    tensors=TENSORS,
    weights={"model/a": "e" * 64},
)
CUT = CutWeights(rank=3, outline="d" * 64, weights={"model/a": "e" * 64})
MARKER = Marker(
    step=5,
    attempt=1,
    manifest_sha256=MANIFEST.digest(),
    total_bytes=9,
    weights_sha256="b" * 64,
    committed_at=2.5,
    writer="c" * 32,
)


def test_every_record_reads_back_equal() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert Part.from_json(PART.to_json(), rank=3) == PART
    assert CutWeights.from_json(CUT.to_json(), rank=3) == CUT
    assert Marker.from_json(MARKER.to_json()) == MARKER
    assert MANIFEST.total_bytes == 9


@pytest.mark.parametrize(
    "name",
    ["../m.safetensors", "/etc/m.safetensors", "a/m.safetensors", "a\\m.safetensors", "m.pkl", "..",
     ".safetensors", "m.safetensors\n", "", "m.safetensors/..", "a\0.safetensors", "~.safetensors",
     "rank-00000./m-0.safetensors", "rank-00000.m.pkl", "rank-00000.m-0.safetensors/../x"],
)  # fmt: skip
def test_a_file_name_cannot_leave_the_folder(name: str) -> None:
    record = json.loads(MANIFEST.to_json())
    record["files"][0]["name"] = name
    with pytest.raises(CheckpointError, match=r"manifest\.json is not as written: files\.0\.name"):
        Manifest.from_json(json.dumps(record).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [("schema", "2"), ("step", -1), ("step", "5"), ("step", 5.5), ("attempt", 0), ("files", None),
     ("weights_sha256", "B" * 64), ("created_at", None), ("facts", []), ("surplus", 1),
     ("run_id", 3), ("step", True)],
)  # fmt: skip
def test_a_field_that_is_not_as_written_is_named(field: str, value: Any) -> None:
    record = json.loads(MANIFEST.to_json()) | {field: value}
    with pytest.raises(CheckpointError, match=rf"manifest\.json is not as written: {field}"):
        Manifest.from_json(json.dumps(record).encode())


def test_the_manifest_of_another_version_says_which_one_reads_it() -> None:
    record = json.loads(MANIFEST.to_json()) | {"schema": 1}
    with pytest.raises(CheckpointError, match=r"has schema 1, this rayway reads 2\. Resume with"):
        Manifest.from_json(json.dumps(record).encode())


def piece(*offsets: int, shape: tuple[int, ...], file: str = FILE) -> Piece:
    return Piece(file=file, offsets=offsets, shape=shape)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ((), "6 of 6 elements are in no piece"),
        ((piece(0, 0, shape=(1, 3)),), "3 of 6 elements are in no piece"),
        ((piece(0, 0, shape=(2, 3)), piece(1, 0, shape=(1, 3))), "overlap"),
        ((piece(0, 0, shape=(2, 3)), piece(0, 0, shape=(2, 3))), "overlap"),
        ((piece(1, 0, shape=(2, 3)),), "is not inside"),
        ((piece(0, shape=(2,)),), "is not inside"),
        (
            (piece(0, 0, shape=(2, 3), file="rank-00009.model-0.safetensors"),),
            "a file that is not named",
        ),
    ],
)
def test_pieces_that_do_not_hold_a_tensor_once_are_refused(
    pieces: tuple[Piece, ...], says: str
) -> None:
    tensors = {"model/a": replace(TENSORS["model/a"], pieces=pieces)}
    data = replace(MANIFEST, tensors=tensors).to_json()
    with pytest.raises(CheckpointError, match=f"does not hold 'model/a' once: .*{says}"):
        Manifest.from_json(data)


@pytest.mark.parametrize("name", ["model/a", "model/b"])
def test_an_alias_looks_into_a_stored_tensor(name: str) -> None:
    of = "model/a" if name == "model/a" else "model/none"
    data = replace(MANIFEST, aliases={name: replace(ALIAS, of=of)}).to_json()
    with pytest.raises(CheckpointError, match=f"'{name}' cannot be a view of '{of}'"):
        Manifest.from_json(data)


def test_a_key_given_twice_is_refused() -> None:
    data = MANIFEST.to_json().replace(b'"step": 5', b'"step": 4, "step": 5')
    with pytest.raises(CheckpointError, match="'step' is given twice"):
        Manifest.from_json(data)


@pytest.mark.parametrize(
    ("record", "read", "name"),
    [
        (MARKER, Marker.from_json, "COMMITTED"),
        (PART, lambda data: Part.from_json(data, rank=3), "rank-00003.json"),
        (CUT, lambda data: CutWeights.from_json(data, rank=3), "rank-00003.weights.json"),
    ],
    ids=["marker", "part", "cut weights"],
)
def test_what_no_other_record_vouches_for_vouches_for_its_own_bytes(
    record: Any, read: Any, name: str
) -> None:
    data = record.to_json()
    for i in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[i] ^= 1 << bit
            with pytest.raises(CheckpointError, match=name):
                read(bytes(flipped))
    for damaged in (data + b" ", data[:-1], b"", b"{}"):
        with pytest.raises(CheckpointError, match=name):
            read(damaged)


@pytest.mark.parametrize("facts", [{"a": (1,)}, {1: 2}, {"a": b"1"}, {"a": {1}}])
def test_facts_are_json_values(facts: Any) -> None:
    with pytest.raises(ValidationError):
        replace(MANIFEST, facts=facts)
