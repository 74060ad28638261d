"""A copy made beside training holds the state of one moment."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW, RMSprop

from rayway.checkpoint.snapshot import HostBuffers, TornCopy
from rayway.checkpoint.tensors import Unstorable

WEIGHT, BUFFER = "model/w", "model/running_mean"


def state() -> dict[str, dict[str, Tensor]]:
    return {"model": {"w": torch.rand(50, 40), "running_mean": torch.rand(30)}}


def test_what_may_change_at_any_time_is_copied_at_once() -> None:
    live = state()
    before = {name: tensor.clone() for name, tensor in live["model"].items()}
    snapshot = HostBuffers().begin(live, constant={WEIGHT})
    live["model"]["running_mean"].zero_()
    share = snapshot.finish()
    live["model"]["w"].zero_()
    assert torch.equal(share.tensors[WEIGHT], before["w"])
    assert torch.equal(share.tensors[BUFFER], before["running_mean"])


def test_the_buffers_are_used_again() -> None:
    live, buffers = state(), HostBuffers()
    first = buffers.begin(live, constant={WEIGHT}).finish()
    places = {name: tensor.data_ptr() for name, tensor in first.tensors.items()}
    live["model"]["w"].fill_(3)
    second = buffers.begin(live, constant={WEIGHT}).finish()
    assert {name: tensor.data_ptr() for name, tensor in second.tensors.items()} == places
    assert (second.tensors[WEIGHT] == 3).all()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(4, 6).T,
        torch.rand(8)[::2],
        torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.empty(0, 3),
        torch.tensor(5),
        torch.rand(7).bfloat16(),
    ],
    ids=["transposed", "every other", "channels last", "empty", "scalar", "bf16"],
)
def test_any_layout_is_copied(tensor: Tensor) -> None:
    for constant in ({"model/a"}, set[str]()):
        share = HostBuffers().begin({"model": {"a": tensor}}, constant=constant).finish()
        assert torch.equal(share.tensors["model/a"], tensor)
        assert share.tensors["model/a"].data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_a_tensor_that_changes_shape_gets_a_new_buffer() -> None:
    buffers = HostBuffers()
    buffers.begin({"model": {"a": torch.rand(3)}}, constant=()).finish()
    share = buffers.begin({"model": {"a": torch.ones(5)}}, constant=()).finish()
    assert torch.equal(share.tensors["model/a"], torch.ones(5))


def spoil_in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


def spoil_a_part(weight: Tensor) -> None:
    with torch.no_grad():
        weight[3].zero_()


@pytest.mark.parametrize("spoil", [spoil_in_place, spoil_a_part])
def test_a_copy_of_no_moment_is_thrown_away(spoil: Any) -> None:
    live = state()
    live["model"]["w"].requires_grad_()
    snapshot = HostBuffers().begin(live, constant={WEIGHT})
    spoil(live["model"]["w"])
    with pytest.raises(TornCopy, match=r"1 tensors were changed .*: model/w"):
        snapshot.finish()
    snapshot.wait()  # nobody waits for ever


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, fused=True),
        lambda p: AdamW(p, foreach=True),
        lambda p: AdamW(p, foreach=False),
        lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
        RMSprop,
        Adagrad,
    ],
)
def test_an_update_during_the_copy_is_noticed(make: Any) -> None:
    """But not one by the fused SGD, which writes unnoticed. Updates wait for the copy anyway."""
    weight = torch.nn.Parameter(torch.rand(5))
    optimizer = make([weight])
    weight.grad = torch.ones(5)
    optimizer.step()
    moments = {k: v for k, v in optimizer.state[weight].items() if isinstance(v, Tensor)}
    live = {"model": {"w": weight}, "optimizer": moments}
    snapshot = HostBuffers().begin(live, constant={WEIGHT, *(f"optimizer/{k}" for k in moments)})
    optimizer.step()
    with pytest.raises(TornCopy):
        snapshot.finish()


def test_forward_and_backward_leave_the_moment_as_it_is() -> None:
    layer = torch.nn.Linear(5, 5)
    live = {"model": dict(layer.state_dict())}
    snapshot = HostBuffers().begin(live, constant={"model/weight", "model/bias"})
    torch.autograd.backward(layer(torch.rand(3, 5)).sum())
    snapshot.finish()


def test_waiting_ends_with_the_copy_and_is_counted() -> None:
    live = state()
    snapshot = HostBuffers().begin(live, constant={WEIGHT})
    waiting = threading.Thread(target=snapshot.wait)
    waiting.start()
    time.sleep(0.05)
    assert not snapshot.done
    snapshot.finish()
    waiting.join(5)
    assert not waiting.is_alive()
    assert snapshot.done
    assert 0.04 < snapshot.waited_s < 5
    snapshot.wait()
    assert snapshot.waited_s < 5


@pytest.mark.parametrize("constant", [{"model/odd"}, set[str]()])
def test_what_cannot_be_stored_is_told_and_nobody_waits(constant: set[str]) -> None:
    live = {"model": {"odd": torch.zeros(2).to_sparse()}}
    with pytest.raises(Unstorable, match="'model/odd'"):
        HostBuffers().begin(live, constant=constant).finish()


def test_a_rank_copies_its_own_share_only() -> None:
    live = {"model": {f"w{i}": torch.rand(10) for i in range(4)}}
    equal = {f"model/w{i}" for i in range(4)}
    for rank in (0, 1):
        buffers = HostBuffers()
        share = buffers.begin(
            live, constant=equal, replicated=equal, rank=rank, world_size=2
        ).finish()
        assert len(share.tensors) == 2
        assert buffers._kept.keys() == share.tensors.keys()
