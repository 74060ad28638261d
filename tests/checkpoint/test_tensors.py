import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, nn

from rayway.checkpoint.manifest import Alias, FileEntry
from rayway.checkpoint.tensors import _DTYPES, TensorFile, read_tensors, weights_sha256
from rayway.errors import CheckpointError

DTYPES = list(_DTYPES)


def entry_of(content: TensorFile) -> FileEntry:
    return FileEntry(
        name="m.safetensors", bytes=content.bytes, sha256="0" * 64, aliases=content.aliases
    )


def round_trip(tensors: dict[str, Tensor], path: Path | None = None) -> dict[str, Tensor]:
    content = TensorFile(tensors)
    data = b"".join(content)
    assert len(data) == content.bytes
    if path is None:
        return read_tensors(data, entry_of(content))
    path.write_bytes(data)
    return read_tensors(path, entry_of(content))


def bits(tensor: Tensor) -> bytes:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return copy.flatten().view(torch.uint8).numpy().tobytes()


def assert_same(loaded: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(loaded[name]) == bits(tensor)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_and_shape_comes_back_to_the_bit(
    dtype: torch.dtype, local: bool, tmp_path: Path
) -> None:
    raw = torch.arange(240, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    tensor = raw.view(dtype)
    tensors = {
        "plain": tensor,
        "scalar": tensor[3].clone(),
        "empty": tensor[:0].clone(),
        "empty matrix": torch.empty(3, 0, dtype=dtype),
        "transposed": tensor.clone().reshape(5, -1).T,
        "every other": tensor.clone()[::2],
        "ü\n\"": tensor.clone().reshape(3, -1),
    }  # fmt: skip
    assert_same(round_trip(tensors, tmp_path / "m.safetensors" if local else None), tensors)


def test_signs_that_are_lazy_are_written_out() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    loaded = round_trip({"conj": z.conj(), "neg": z.conj().imag})
    assert torch.equal(loaded["conj"], z.conj().resolve_conj())
    assert torch.equal(loaded["neg"], torch.tensor([-2.0, 4.0]))


def test_nan_and_minus_zero_keep_their_bits() -> None:
    tensor = torch.tensor([0x7FC12345, -0x80000000, 0x7F800001], dtype=torch.int32)
    assert_same(round_trip({"a": tensor.view(torch.float32)}), {"a": tensor.view(torch.float32)})


def test_the_bytes_are_those_the_library_writes() -> None:
    tensors = {f"{i} {dtype}": torch.ones(i, 3).to(dtype) for dtype in DTYPES for i in (2, 1, 0)}
    tensors |= {"b": torch.tensor(1.5), "a": torch.tensor(2.5), "ü\t": torch.rand(7)}
    assert b"".join(TensorFile(tensors)) == save(tensors, metadata={"format": "pt"})


def test_iterating_again_gives_the_same_bytes_and_hash() -> None:
    content = TensorFile({"a": torch.rand(600_000), "b": torch.rand(3, 4).T})
    first, hashed = b"".join(content), content.sha256
    assert b"".join(content) == first
    assert content.sha256 == hashed


def test_no_tensors_make_a_file_too() -> None:
    assert round_trip({}) == {}


@pytest.mark.parametrize("local", [True, False])
def test_tied_weights_are_stored_once_and_come_back_tied(local: bool, tmp_path: Path) -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["emb"].weight
    tensors = model.state_dict()
    assert TensorFile(tensors).bytes < 10 * 8 * 4 * 1.7
    loaded = round_trip(tensors, tmp_path / "m.safetensors" if local else None)
    assert_same(loaded, tensors)
    loaded["emb.weight"][3, 3] = 42
    assert loaded["head.weight"][3, 3] == 42
    fresh = nn.ModuleDict({"emb": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False)})
    fresh["head"].weight = fresh["emb"].weight
    fresh.load_state_dict(loaded)
    assert fresh["head"].weight is fresh["emb"].weight


def test_views_into_a_stored_tensor_come_back_as_views() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {"whole": whole, "turned": whole.T, "row": whole[2], "one": whole[3, 5]}
    tensors |= {"wide": whole[0, :1].expand(5), "column": whole[:, 1]}
    content = TensorFile(tensors)
    assert content.aliases.keys() == tensors.keys() - {"whole"}
    loaded = round_trip(tensors)
    assert_same(loaded, tensors)
    loaded["whole"].fill_(7)
    assert all((tensor == 7).all() for tensor in loaded.values())


def test_twins_that_are_not_contiguous_stay_tied() -> None:
    turned = torch.rand(4, 6).T
    loaded = round_trip({"a": turned, "b": turned.detach()})
    assert torch.equal(loaded["a"], turned)
    loaded["a"][1, 1] = 5
    assert loaded["b"][1, 1] == 5


def test_pieces_of_one_buffer_are_stored_each_for_itself() -> None:
    flat = torch.arange(10.0)
    tensors = {
        "left": flat[:5],
        "right": flat[5:],
        "overlap": flat[3:8],
        "bits": flat.view(torch.int32),
    }
    content = TensorFile(tensors)
    assert not content.aliases
    assert_same(round_trip(tensors), tensors)


@given(st.data())
def test_any_views_of_one_buffer_come_back_equal(data: st.DataObject) -> None:
    flat = torch.arange(12, dtype=torch.int16)
    tensors = {}
    for name in "abcde":
        start = data.draw(st.integers(0, 11))
        shape = data.draw(st.lists(st.integers(1, 3), max_size=2))
        stride = [data.draw(st.integers(0, 4)) for _ in shape]
        reach = start + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if reach < 12:
            tensors[name] = flat.as_strided(shape, stride, start)
    assert_same(round_trip(tensors), tensors)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, device="meta"), "on meta"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex128), "complex128 cannot be stored"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tensor: Tensor, reason: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'odd.one'.*{reason}"):
        TensorFile({"odd.one": tensor})


def test_a_reserved_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match="reserved"):
        TensorFile({"__metadata__": torch.zeros(1)})


@pytest.mark.parametrize(
    "alias",
    [
        Alias(of="none", shape=(1,), stride=(1,), offset=0),
        Alias(of="a", shape=(7,), stride=(1,), offset=0),
        Alias(of="a", shape=(2,), stride=(1,), offset=5),
        Alias(of="a", shape=(2, 2), stride=(1,), offset=0),
        Alias(of="a", shape=(2,), stride=(10**15,), offset=0),
    ],
)
@pytest.mark.parametrize("name", ["new", "b"])
def test_an_alias_cannot_look_beside_its_tensor(alias: Alias, name: str) -> None:
    content = TensorFile({"a": torch.zeros(6), "b": torch.zeros(100)})
    entry = FileEntry(name="m.safetensors", bytes=1, sha256="0" * 64, aliases={name: alias})
    with pytest.raises(CheckpointError, match=r"m\.safetensors: .* cannot be a view"):
        read_tensors(b"".join(content), entry)


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}x"])
def test_another_file_is_refused_by_name(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(data)
    entry = FileEntry(name="m.safetensors", bytes=len(data), sha256="0" * 64)
    for source in (data, tmp_path / "m"):
        with pytest.raises(CheckpointError, match=r"m\.safetensors is no safetensors file"):
            read_tensors(source, entry)


def test_a_mapped_tensor_can_be_changed_without_changing_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    loaded = round_trip({"a": torch.zeros(3)}, path)
    before = path.read_bytes()
    loaded["a"].fill_(1)
    assert path.read_bytes() == before


def test_the_weights_hash_tells_every_difference_and_only_those() -> None:
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(4)
    one = weights_sha256({"a": a, "b": b})
    assert one == weights_sha256({"b": b, "a": a.T.contiguous().T})
    assert one == weights_sha256(json.loads('{"a": 0}') | {"a": nn.Parameter(a), "b": b})
    others = [
        {"a": a, "c": b},
        {"a": a.reshape(3, 2), "b": b},
        {"a": a, "b": b.to(torch.int32)},
        {"a": a.view(torch.int32), "b": b},
        {"a": a, "b": b + 1},
        {"a": a},
        {"a": a, "b": b, "c": torch.empty(0)},
    ]
    assert len({one, *map(weights_sha256, others)}) == len(others) + 1
