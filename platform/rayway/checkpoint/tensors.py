"""Named tensors as the bytes of a safetensors file, and back; and their hash.

Reading is the library's. Writing is ours, since the library's writer can neither hash on the way
nor stream to a remote store without a second copy of everything; it makes the same bytes.

Tensors that share memory (tied weights) are stored once. The others are *aliases*: how they look
into the stored one, so that they share memory again after loading. Two tensors that overlap
without one holding the other whole are stored both.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors.torch import load, load_file
from torch import Tensor

from rayway.checkpoint.manifest import Alias
from rayway.errors import CheckpointError

# In the library's order; a file begins with the widest numbers, which keeps all of them aligned.
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_WIDTH_ORDER = {dtype: place for place, dtype in enumerate(_DTYPES)}
_LONGEST_HEADER = 100_000_000  # bytes, as the library has it
_PIECE = 1 << 20  # bytes hashed and then written while they are in the processor's cache


class Unstorable(CheckpointError):  # noqa: N818 - reads as what it says
    """A state holds something that no checkpoint can. Trying again does not help."""


class TensorFile:
    """The bytes of one file of tensors. Iterating gives them in pieces and hashes on the way.

    Args:
        tensors: Dense tensors on the CPU, by name. They must not change until the file is written.

    Raises:
        Unstorable: A tensor is of a kind that no file holds.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        plain = {name: on_host(name, tensor) for name, tensor in tensors.items()}
        order = sorted(plain, key=lambda name: (-_WIDTH_ORDER[plain[name].dtype], name))
        self._tensors = [plain[name] for name in order]
        self._header, size = _header({name: plain[name] for name in order})
        self.bytes = len(self._header) + size
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """The hash of all pieces given out, in hexadecimal; of the file, at the end."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[memoryview]:
        self._hash = hashlib.sha256()
        for piece in self.pieces():
            self._hash.update(piece)
            yield piece

    def pieces(self) -> Iterator[memoryview]:
        """Return the file's bytes again, without hashing them: 1 MiB each, or less."""
        for data in (memoryview(self._header), *map(_bytes_of, self._tensors)):
            for start in range(0, len(data), _PIECE):
                yield data[start : start + _PIECE]


def read_tensors(source: Path | bytes, *, name: str) -> dict[str, Tensor]:
    """Return the tensors in a file.

    Args:
        source: A local file, which is mapped into memory and not copied, or a file's bytes.
        name: The file's. Its hash has been compared already.

    Raises:
        CheckpointError: The file is no safetensors file.
    """
    try:
        tensors: dict[str, Tensor] = (
            load(source) if isinstance(source, bytes) else load_file(source)
        )
    except Exception as error:  # whatever a foreign file makes the library say
        raise CheckpointError(f"{name} is no safetensors file: {error}.") from error
    return tensors


def read_tensor(file: BinaryIO, name: str, *, file_name: str) -> Tensor:
    """Return one tensor of an open file, without reading the others.

    Args:
        file: At its beginning. Its hash is not looked at.
        name: The tensor's.
        file_name: The file's, for the message.

    Raises:
        CheckpointError: It is not in the file.
    """
    try:
        size = int.from_bytes(file.read(8), "little")
        if size > _LONGEST_HEADER:
            raise ValueError("its header is too long")
        entry = json.loads(file.read(size))[name]
        start, end = entry["data_offsets"]
        file.seek(8 + size + start)
        data = bytearray(file.read(end - start))
        dtype, shape = dtype_of(entry["dtype"]), entry["shape"]
        if dtype is None or len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError("it is cut short")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file_name} does not hold {name!r}: {error}.") from error
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape)


def alias_view(of: Tensor, alias: Alias, *, name: str) -> Tensor:
    """Return an alias as the view of a tensor that it is.

    Args:
        of: The whole tensor that it looks into, row by row in memory.
        alias: How it looks into it.
        name: The alias's, for the message.

    Raises:
        CheckpointError: It would look beside the tensor.
    """
    if not _fits(alias, of.numel()):
        raise CheckpointError(
            f"{name!r} cannot be a view of {alias.of!r}, which is of shape {tuple(of.shape)}."
        )
    return of.as_strided(alias.shape, alias.stride, of.storage_offset() + alias.offset)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type in a file, e.g. ``F32``."""
    return _DTYPES[dtype]


def dtype_of(name: str) -> torch.dtype | None:
    """Return the type that has this name in a file, ``None`` if none has."""
    return next((dtype for dtype, known in _DTYPES.items() if known == name), None)


def tensor_sha256(tensor: Tensor) -> str:
    """Return the hash of a tensor's bytes, row by row; it has to be on the CPU."""
    total = hashlib.sha256()
    data = _bytes_of(tensor)
    for start in range(0, len(data), _PIECE):
        total.update(data[start : start + _PIECE])
    return total.hexdigest()


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return one hash for named tensors: over the sorted names, types, shapes and bytes.

    It depends neither on the order or memory layout of the tensors nor on their device.
    """
    plain = {name: on_host(name, tensor.detach().cpu()) for name, tensor in tensors.items()}
    return combined_sha256(
        {
            name: (_DTYPES[tensor.dtype], tuple(tensor.shape), tensor_sha256(tensor))
            for name, tensor in plain.items()
        }
    )


def combined_sha256(tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """Return ``weights_sha256`` from what each tensor is: type, shape, and hash of its bytes.

    Whoever has a tensor whole can hash it, so the hash is the same however many ranks hold them.
    """
    total = hashlib.sha256()
    for name, (dtype, shape, sha256) in sorted(tensors.items()):
        total.update(json.dumps([name, dtype, list(shape), sha256]).encode() + b"\n")
    return total.hexdigest()


def storable(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor without history and lazy signs, if a file can hold it.

    Raises:
        Unstorable: It cannot; the message names it.
    """
    plain = tensor.detach()
    if type(plain) is not Tensor or plain.layout != torch.strided or plain.is_meta:
        raise Unstorable(
            f"{name!r} is a {type(plain).__name__} ({plain.layout}) on {plain.device}, which "
            "cannot be stored. Let the state hold dense tensors only."
        )
    if plain.dtype not in _DTYPES or name.rpartition("/")[2] == "__metadata__":
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise Unstorable(
            f"{name!r} of type {plain.dtype} cannot be stored. Types that can: {known}; "
            "the name __metadata__ is reserved."
        )
    return plain.resolve_conj().resolve_neg()


def on_host(name: str, tensor: Tensor) -> Tensor:
    """Return what ``storable`` does, if it is on the CPU.

    Raises:
        Unstorable: It is not; the message names it.
    """
    plain = storable(name, tensor)
    if plain.device.type != "cpu":
        raise Unstorable(f"{name!r} is on {plain.device}. Copy it to the CPU first.")
    return plain


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes, row by row; a copy only if they lie otherwise in memory."""
    if tensor.numel() == 0:
        return memoryview(b"")
    # Not reshape: a dimension of size 1 may keep a stride of 0, as after expand.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """Return the file's head, padded to 8 bytes, and the bytes of all tensors after it."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.itemsize
        dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def twin(of: str, shape: tuple[int, ...]) -> Alias:
    """Return the alias that is all of another tensor, as it is stored: row by row."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Alias(of=of, shape=shape, stride=stride, offset=0)


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Alias]:
    """Return which tensors lie whole inside another one, and where.

    Sorted by address, a tensor can only lie inside the last one that was not itself inside another:
    of two stored ones, the later reaches further.
    """
    aliases: dict[str, Alias] = {}
    twins: dict[object, str] = {}
    covers: dict[object, str] = {}
    filled = (name for name, tensor in tensors.items() if tensor.numel())
    for name in sorted(filled, key=lambda name: _address_order(name, tensors[name])):
        tensor = tensors[name]
        memory = (tensor.untyped_storage().data_ptr(), tensor.dtype)
        place = (memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        alias = _view_of(tensors, covers.get(memory), tensor)
        if place in twins:  # stored row by row, whatever its strides were
            alias = twin(twins[place], tuple(tensor.shape))
        if alias is not None:
            aliases[name] = alias
            continue
        twins[place] = name
        if tensor.is_contiguous():
            covers[memory] = name
    return aliases


def _address_order(name: str, tensor: Tensor) -> tuple[int, str, int, bool, int, str]:
    """Sort by memory, then address; of equal addresses what can hold the others comes first."""
    start = tensor.untyped_storage().data_ptr()
    loose = not tensor.is_contiguous()
    return start, str(tensor.dtype), int(tensor.storage_offset()), loose, -tensor.numel(), name


def _view_of(tensors: Mapping[str, Tensor], cover: str | None, tensor: Tensor) -> Alias | None:
    """Return how ``tensor`` looks into the contiguous tensor ``cover``, if it lies inside."""
    if cover is None:
        return None
    alias = Alias(
        of=cover,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()) - int(tensors[cover].storage_offset()),
    )
    return alias if _fits(alias, tensors[cover].numel()) else None


def _fits(alias: Alias, elements: int) -> bool:
    """Return whether the alias stays inside a stored tensor of so many elements."""
    if len(alias.shape) != len(alias.stride) or 0 in alias.shape:
        return False
    reach = sum((n - 1) * step for n, step in zip(alias.shape, alias.stride, strict=True))
    return alias.offset + reach < elements
