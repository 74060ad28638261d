"""Which rank stores what of a state that all of them have."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayway.checkpoint.share import Share, plan_share
from rayway.checkpoint.tensors import Unstorable


def names(state: Any) -> set[str]:
    return {f"{stem}/{name}" for stem, part in state.items() for name in part}


def shares(state: Any, ranks: int, replicated: set[str] | None = None) -> list[Share]:
    equal = names(state) if replicated is None else replicated
    return [
        plan_share(state, rank=rank, world_size=ranks, replicated=equal) for rank in range(ranks)
    ]


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 4), st.data())
def test_each_tensor_is_stored_by_one_rank(sizes: list[int], ranks: int, data: Any) -> None:
    state = {"model": {f"w{i}": torch.rand(size) for i, size in enumerate(sizes)}}
    equal = data.draw(st.sets(st.sampled_from(sorted(names(state))))) if sizes else set()
    all_shares = shares(state, ranks, equal)
    stored = [name for share in all_shares for name in share.tensors]
    assert sorted(stored) == sorted(names(state))
    assert names(state) - equal <= all_shares[0].tensors.keys()
    assert len({share.outline() for share in all_shares}) == 1


def test_equal_tensors_are_dealt_by_bytes() -> None:
    state = {"optimizer": {f"{i}": torch.rand(100 + i) for i in range(30)}}
    loads = [sum(t.nbytes for t in share.tensors.values()) for share in shares(state, 3)]
    assert max(loads) < 1.05 * min(loads)


def test_what_ranks_may_have_differently_is_that_of_rank_0() -> None:
    state = {"model": {"w": torch.rand(8), "running_mean": torch.rand(3)}}
    first, second = shares(state, 2, {"model/w"})
    assert first.tensors.keys() == {"model/running_mean"}
    assert second.tensors.keys() == {"model/w"}


def test_tied_tensors_are_stored_once_by_any_number_of_ranks() -> None:
    weight = torch.rand(4, 3)
    state: dict[str, dict[str, Tensor]] = {
        "model": {"emb": weight, "head": weight, "turned": weight.T, "w": torch.rand(4, 3)}
    }
    for ranks in (1, 2, 3):
        all_shares = shares(state, ranks)
        stored = [name for share in all_shares for name in share.tensors]
        assert sorted(stored) == ["model/emb", "model/w"]
        assert all(share.aliases.keys() == {"model/head", "model/turned"} for share in all_shares)


def test_states_that_differ_have_different_outlines() -> None:
    w = torch.rand(4, 3)
    states = [
        {"model": {"a": w}},
        {"model": {"b": w}},
        {"optimizer": {"a": w}},
        {"model": {"a": w.T.contiguous()}},
        {"model": {"a": w.double()}},
        {"model": {"a": w, "b": w}},
        {"model": {"a": w, "b": w.clone()}},
    ]
    assert len({plan_share(state).outline() for state in states}) == len(states)


@pytest.mark.parametrize("stem", ["", "../up", "a/b", "a.b", "-a", "ü", "a" * 81])
def test_a_stem_is_the_beginning_of_a_files_name(stem: str) -> None:
    with pytest.raises(Unstorable, match="cannot begin a file's name"):
        plan_share({stem: {}})


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    with pytest.raises(Unstorable, match=r"'model/odd' is a Tensor .*sparse"):
        plan_share({"model": {"odd": torch.zeros(2).to_sparse()}})
