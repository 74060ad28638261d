import json
from io import BytesIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, nn

from rayway.checkpoint.manifest import Alias
from rayway.checkpoint.tensors import (
    _DTYPES,
    TensorFile,
    alias_view,
    combined_sha256,
    dtype_name,
    dtype_of,
    find_aliases,
    read_tensor,
    read_tensors,
    tensor_sha256,
    twin,
    weights_sha256,
)
from rayway.errors import CheckpointError

DTYPES = list(_DTYPES)


def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that are no aliases."""
    aliases = find_aliases(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}


def round_trip(tensors: dict[str, Tensor], path: Path | None = None) -> dict[str, Tensor]:
    content = TensorFile(stored(tensors))
    data = b"".join(content)
    assert len(data) == content.bytes
    assert b"".join(content.pieces()) == data
    if path is not None:
        path.write_bytes(data)
    loaded = read_tensors(data if path is None else path, name="m.safetensors")
    for name, tensor in loaded.items():
        if tensor.numel():
            one = read_tensor(BytesIO(data), name, file_name="m.safetensors")
            assert bits(one) == bits(tensor)
    aliases = find_aliases(tensors).items()
    return loaded | {name: alias_view(loaded[a.of], a, name=name) for name, a in aliases}


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
    assert TensorFile(stored(tensors)).bytes < 10 * 8 * 4 * 1.7
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
    assert find_aliases(tensors).keys() == tensors.keys() - {"whole"}
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
    assert not find_aliases(tensors)
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
        Alias(of="a", shape=(7,), stride=(1,), offset=0),
        Alias(of="a", shape=(2,), stride=(1,), offset=5),
        Alias(of="a", shape=(2, 2), stride=(1,), offset=0),
        Alias(of="a", shape=(2,), stride=(10**15,), offset=0),
    ],
)
def test_an_alias_cannot_look_beside_its_tensor(alias: Alias) -> None:
    with pytest.raises(CheckpointError, match=r"'b' cannot be a view of 'a', .* shape \(6,\)"):
        alias_view(torch.zeros(6), alias, name="b")


def test_a_twin_is_all_of_a_tensor() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(alias_view(whole, twin("a", (2, 3)), name="b"), whole)
    scalar = torch.tensor(2.0)
    assert alias_view(scalar, twin("a", ()), name="b").item() == 2


def test_a_tensor_that_lazily_conjugates_another_one_is_no_twin() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert_same(round_trip({"z": z, "conj": z.conj().resolve_conj()}), {"z": z, "conj": z.conj()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_type_goes_by_a_name(dtype: torch.dtype) -> None:
    assert dtype_of(dtype_name(dtype)) == dtype
    assert dtype_of("F31") is None


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}x"])
def test_another_file_is_refused_by_name(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(data)
    for source in (data, tmp_path / "m"):
        with pytest.raises(CheckpointError, match=r"m\.safetensors is no safetensors file"):
            read_tensors(source, name="m.safetensors")
    with pytest.raises(CheckpointError, match=r"m\.safetensors does not hold 'a'"):
        read_tensor(BytesIO(data), "a", file_name="m.safetensors")


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


def test_the_weights_hash_is_made_of_each_tensors_own() -> None:
    tensors = {"b": torch.rand(3, 2), "a": torch.arange(4)}
    told = {
        name: (dtype_name(tensor.dtype), tuple(tensor.shape), tensor_sha256(tensor))
        for name, tensor in tensors.items()
    }
    assert combined_sha256(told) == weights_sha256(tensors)


def test_the_hash_of_these_weights_stays_what_it_is() -> None:
    """Users compare it across runs, versions and machines."""
    tensors = {"w": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.zeros(2)}
    assert weights_sha256(tensors) == (
        "ff17a22a90826e592adc71aaa0975f273e3b04ee7a22629daeb41aadb27f7692"
    )
