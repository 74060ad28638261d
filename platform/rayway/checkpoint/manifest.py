"""What a checkpoint says about itself: its manifest, and the marker that makes it exist.

Both are strict JSON. A name in a manifest is the bare name of a file beside it and nothing else, so
no manifest can lead a reader out of its folder.
"""

import hashlib
import json
from dataclasses import field
from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from rayway.errors import CheckpointError, StorageError
from rayway.storage.records import Record, decode_record, encode_record
from rayway.storage.runs import MANIFEST_KEY, MARKER_KEY

T = TypeVar("T")

_SEAL = "sha256"
_STRICT = ConfigDict(extra="forbid", strict=True)
_Count = Annotated[int, Field(ge=0)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors$")]


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class Alias:
    """A tensor that looks into the memory of another one in the same file."""

    of: str
    """The name of the stored tensor."""

    shape: tuple[_Count, ...]
    """The alias's own shape."""

    stride: tuple[_Count, ...]
    """Elements from one index to the next, per dimension."""

    offset: _Count
    """Elements from the stored tensor's first to the alias's first."""


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class FileEntry:
    """One file of tensors."""

    name: _FileName
    """Its name beside the manifest."""

    bytes: _Count
    """Its size in bytes."""

    sha256: _Sha256
    """The hash of its bytes."""

    aliases: dict[str, Alias] = field(default_factory=dict)
    """Tensors that share memory with a stored one, by name."""


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class Manifest:
    """Everything in a checkpoint that is no tensor, and what its files must be."""

    schema: Literal[1] = 1
    """The version of this record."""

    run_id: str
    """The run whose state it is."""

    step: _Count
    """Finished optimizer steps."""

    attempt: Annotated[int, Field(ge=1)]
    """The attempt that saved it."""

    files: tuple[FileEntry, ...]
    """The files of tensors, and no other may lie beside them."""

    facts: dict[str, JsonValue]
    """The state that is no tensor, as the trainer gave it."""

    weights_sha256: _Sha256
    """The hash of the model's weights, see ``tensors.weights_sha256``."""

    created_at: float
    """When the save began, in Unix seconds."""

    @property
    def total_bytes(self) -> int:
        """The size of all files of tensors, in bytes."""
        return sum(entry.bytes for entry in self.files)

    def to_json(self) -> bytes:
        """Return the stored form."""
        return encode_record(_MANIFEST.dump_python(self, mode="json"), name=MANIFEST_KEY)

    def digest(self) -> str:
        """Return the SHA-256 of the stored form, in hexadecimal."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """Read the stored form back.

        Raises:
            CheckpointError: It is not a manifest that this version writes.
        """
        _decoded(data, name=MANIFEST_KEY)  # pydantic's own reader lets repeated keys pass
        return _validated(_MANIFEST, data, name=MANIFEST_KEY)


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class Marker:
    """The record in ``COMMITTED``: it binds the manifest, so nothing can change unnoticed."""

    schema: Literal[1] = 1
    """The version of this record."""

    step: _Count
    """Finished optimizer steps."""

    attempt: Annotated[int, Field(ge=1)]
    """The attempt that committed."""

    manifest_sha256: _Sha256
    """The hash of the manifest's bytes."""

    total_bytes: _Count
    """The size of all files of tensors, in bytes."""

    weights_sha256: _Sha256
    """As in the manifest."""

    committed_at: float
    """When it was committed, in Unix seconds."""

    writer: str
    """A random id, by which a writer knows its own marker again."""

    def to_json(self) -> bytes:
        """Return the stored form, which ends in its own hash: no other record vouches for it."""
        record = _MARKER.dump_python(self, mode="json")
        sealed = hashlib.sha256(encode_record(record, name=MARKER_KEY)).hexdigest()
        return encode_record({**record, _SEAL: sealed}, name=MARKER_KEY)

    @classmethod
    def from_json(cls, data: bytes) -> "Marker":
        """Read the stored form back.

        Raises:
            CheckpointError: It is not a marker that this version writes, to the byte.
        """
        record = _decoded(data, name=MARKER_KEY)
        record.pop(_SEAL, None)
        marker = _validated(_MARKER, json.dumps(record).encode(), name=MARKER_KEY)
        if marker.to_json() != data:
            raise CheckpointError(f"{MARKER_KEY} is not as written: its own hash does not fit.")
        return marker


_MANIFEST = TypeAdapter(Manifest)
_MARKER = TypeAdapter(Marker)


def _decoded(data: bytes, *, name: str) -> Record:
    try:
        return decode_record(data, name=name)
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def _validated(adapter: TypeAdapter[T], data: bytes, *, name: str) -> T:
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the record"
        raise CheckpointError(f"{name} is not as written: {where}: {first['msg']}.") from error
