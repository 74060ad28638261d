"""What a checkpoint says about itself: each rank's part, the manifest, and the marker.

Each rank writes a *part*: what it stored, in which files. The rank that commits makes one
*manifest* of all parts, and the *marker* makes the checkpoint exist.

All are strict JSON. A name in them is the bare name of a file beside them and nothing else, so
no manifest can lead a reader out of its folder.

Tensors go by ``stem/name``, such as ``model/head.weight``.
"""

import hashlib
import json
from dataclasses import field
from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from rayway.checkpoint.boxes import Box, untiled
from rayway.errors import CheckpointError, StorageError
from rayway.storage.records import Record, decode_record, encode_record
from rayway.storage.runs import MANIFEST_KEY, MARKER_KEY

T = TypeVar("T")

_SEAL = "sha256"
_STRICT = ConfigDict(extra="forbid", strict=True)
_Count = Annotated[int, Field(ge=0)]
_Attempt = Annotated[int, Field(ge=1)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_FileName = Annotated[
    str, Field(pattern=r"^rank-[0-9]{5,9}\.[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors$")
]


def part_key(rank: int) -> str:
    """Return the name of a rank's part, beside the manifest until the commit."""
    return f"rank-{rank:05d}.json"


def weights_key(rank: int) -> str:
    """Return the name of a rank's hashes of cut weights, beside the manifest until the commit."""
    return f"rank-{rank:05d}.weights.json"


def file_name(rank: int, stem: str, number: int) -> str:
    """Return the name of one of a rank's files of tensors."""
    return f"rank-{rank:05d}.{stem}-{number}.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class Alias:
    """A tensor that looks into the memory of another one."""

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


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class Piece:
    """A block of a tensor, stored in one file under the tensor's name."""

    file: _FileName
    """The file."""

    offsets: tuple[_Count, ...]
    """Its first index in the tensor, per dimension."""

    shape: tuple[_Count, ...]
    """Its own length, per dimension."""

    @property
    def box(self) -> Box:
        """Where it lies in the tensor."""
        return Box(self.offsets, self.shape)


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class TensorEntry:
    """A stored tensor, whole or in pieces."""

    dtype: str
    """Its type as safetensors names it, e.g. ``F32``."""

    shape: tuple[_Count, ...]
    """The shape of the whole tensor."""

    pieces: tuple[Piece, ...]
    """Its pieces; every element is in exactly one of them."""


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class Part:
    """What one rank stored. A rank writes it once all its files are there and were read back."""

    schema: Literal[1] = 1
    """The version of this record."""

    run_id: str
    """The run whose state it is."""

    step: _Count
    """Finished optimizer steps."""

    attempt: _Attempt
    """The attempt that saves."""

    rank: _Count
    """The rank."""

    world_size: _Attempt
    """How many ranks save."""

    error: str | None = None
    """Why the rank could not store its part; then there is nothing else."""

    outline: _Sha256 | None = None
    """A hash of names, types and shapes of the whole state. It has to be the same on all ranks."""

    files: tuple[FileEntry, ...] = ()
    """Its files."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    """Tensors of which it stored a piece, by name; with that piece only."""

    weights: dict[str, _Sha256] = field(default_factory=dict)
    """The hashes of those of the model's tensors that it stored whole, by name."""

    def to_json(self) -> bytes:
        """Return the stored form."""
        return _sealed(_PART.dump_python(self, mode="json"), name=part_key(self.rank))

    @classmethod
    def from_json(cls, data: bytes, *, rank: int) -> "Part":
        """Read the stored form back.

        Raises:
            CheckpointError: It is not a part that this version writes.
        """
        return _unsealed(_PART, data, name=part_key(rank))


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class CutWeights:
    """The hashes of some of the model's tensors whose pieces are in the files of several ranks."""

    rank: _Count
    """The rank that read the pieces."""

    outline: _Sha256
    """As in the rank's part."""

    weights: dict[str, _Sha256]
    """The hashes, by name."""

    def to_json(self) -> bytes:
        """Return the stored form."""
        return _sealed(_CUT.dump_python(self, mode="json"), name=weights_key(self.rank))

    @classmethod
    def from_json(cls, data: bytes, *, rank: int) -> "CutWeights":
        """Read the stored form back.

        Raises:
            CheckpointError: It is not one that this version writes.
        """
        return _unsealed(_CUT, data, name=weights_key(rank))


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class Manifest:
    """Everything in a checkpoint that is no tensor, and what its files must be."""

    schema: Literal[2] = 2
    """The version of this record."""

    run_id: str
    """The run whose state it is."""

    step: _Count
    """Finished optimizer steps."""

    attempt: _Attempt
    """The attempt that saved it."""

    world_size: _Attempt
    """How many ranks saved it. It is loaded on any number."""

    files: tuple[FileEntry, ...]
    """The files of tensors, and no other may lie beside them."""

    tensors: dict[str, TensorEntry]
    """All stored tensors, by name."""

    aliases: dict[str, Alias]
    """Tensors that share memory with a stored one, by name."""

    facts: dict[str, JsonValue]
    """The state that is no tensor, as the trainer gave it."""

    weights_sha256: _Sha256
    """The hash of the model's weights, see ``tensors.weights_sha256``."""

    created_at: float
    """When the save began, in Unix seconds."""

    def check_pieces(self) -> None:
        """Check that the pieces hold each element of each tensor once.

        Raises:
            CheckpointError: They do not; the message names the tensor.
        """
        files = {entry.name for entry in self.files}
        for name, entry in self.tensors.items():
            problem = untiled(entry.shape, [piece.box for piece in entry.pieces])
            if problem is None and not {piece.file for piece in entry.pieces} <= files:
                problem = "a piece is in a file that is not named"
            if problem is not None:
                raise CheckpointError(f"{MANIFEST_KEY} does not hold {name!r} once: {problem}.")
        for name, alias in self.aliases.items():
            if name in self.tensors or alias.of not in self.tensors:
                raise CheckpointError(f"{MANIFEST_KEY}: {name!r} cannot be a view of {alias.of!r}.")

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
        record = _decoded(data, name=MANIFEST_KEY)  # pydantic's reader lets repeated keys pass
        schema, reads = record.get("schema"), cls.__dataclass_fields__["schema"].default
        if isinstance(schema, int) and schema != reads:
            raise CheckpointError(
                f"{MANIFEST_KEY} has schema {schema}, this rayway reads {reads}. Resume with the "
                "version of rayway that wrote it."
            )
        manifest = _validated(_MANIFEST, data, name=MANIFEST_KEY)
        manifest.check_pieces()
        return manifest


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class Marker:
    """The record in ``COMMITTED``: it binds the manifest, so nothing can change unnoticed."""

    schema: Literal[1] = 1
    """The version of this record."""

    step: _Count
    """Finished optimizer steps."""

    attempt: _Attempt
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
        return _sealed(_MARKER.dump_python(self, mode="json"), name=MARKER_KEY)

    @classmethod
    def from_json(cls, data: bytes) -> "Marker":
        """Read the stored form back.

        Raises:
            CheckpointError: It is not a marker that this version writes, to the byte.
        """
        return _unsealed(_MARKER, data, name=MARKER_KEY)


_PART = TypeAdapter(Part)
_CUT = TypeAdapter(CutWeights)
_MANIFEST = TypeAdapter(Manifest)
_MARKER = TypeAdapter(Marker)


def _decoded(data: bytes, *, name: str) -> Record:
    try:
        return decode_record(data, name=name)
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def _sealed(record: Record, *, name: str) -> bytes:
    """Return a record that ends in its own hash."""
    sha256 = hashlib.sha256(encode_record(record, name=name)).hexdigest()
    return encode_record({**record, _SEAL: sha256}, name=name)


def _unsealed(adapter: TypeAdapter[T], data: bytes, *, name: str) -> T:
    record = _decoded(data, name=name)
    record.pop(_SEAL, None)
    value = _validated(adapter, json.dumps(record).encode(), name=name)
    if _sealed(adapter.dump_python(value, mode="json"), name=name) != data:
        raise CheckpointError(f"{name} is not as written: its own hash does not fit.")
    return value


def _validated(adapter: TypeAdapter[T], data: bytes, *, name: str) -> T:
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the record"
        raise CheckpointError(f"{name} is not as written: {where}: {first['msg']}.") from error
