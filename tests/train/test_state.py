"""A state that went into a checkpoint and out of it trains on as if nothing had happened."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from rayway.errors import CheckpointError
from rayway.train.state import TrainState

Tensors = dict[str, dict[str, Tensor]]


class Net(nn.Module):
    """Tied weights, buffers that training changes, a frozen layer, a weight of no dimension."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.fixed = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.seen += len(x)
        hidden = self.norm(self.embed(x))
        out: Tensor = self.head(torch.tanh(hidden + self.fixed(hidden))) * self.scale
        return out


class Counting(Optimizer):
    """A user's optimizer that keeps plain numbers beside a tensor."""

    def __init__(self, parameters: Any, odd: object = None) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.odd = odd

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                kept = self.state[parameter]
                kept["steps"] = kept.get("steps", 0) + 1
                kept["mean"] = 0.9 * kept.get("mean", 0.0) + float(parameter.grad.mean())
                kept["nothing"] = self.odd
                change = parameter.grad * 0.1 / kept["steps"] + 0.01 * kept["mean"]
                parameter.sub_(change)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.05, fused=True),
    "sgd": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True),
    "sgd without momentum": lambda model: SGD(model.parameters(), lr=0.05, fused=True),
    "counting": lambda model: Counting(model.parameters()),
}


def new_state(optimizer: str = "adamw", *, seed: int = 0, width: int = 6) -> TrainState:
    torch.manual_seed(seed)
    model = Net(width)
    return TrainState(model=model, replica=model, optimizer=OPTIMIZERS[optimizer](model))


def step_on(state: TrainState, count: int) -> None:
    for _ in range(count):
        x = torch.arange(5) + state.step % 2
        torch.autograd.backward(state.replica(x).square().mean())
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1


def copied(tensors: Tensors) -> Tensors:
    """Return the tensors as a file would hold them."""
    return {
        stem: {n: v.detach().clone() for n, v in part.items()} for stem, part in tensors.items()
    }


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for stem, part in wanted.items():
        assert found[stem].keys() == part.keys()
        for name, value in part.items():
            assert found[stem][name].dtype == value.dtype
            assert torch.equal(found[stem][name], value), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_state_trains_on_to_the_bit(optimizer: str) -> None:
    undisturbed = new_state(optimizer)
    step_on(undisturbed, 3)
    stored = copied(undisturbed.tensors())
    restored = new_state(optimizer, seed=1)
    restored.restore(stored, step=3)
    assert_same(restored.tensors(), stored)
    for state in (undisturbed, restored):
        step_on(state, 4)
    assert_same(restored.tensors(), undisturbed.tensors())
    assert restored.step == undisturbed.step == 7
    assert all(v.isfinite().all() for v in restored.tensors()["model"].values())


def test_a_state_is_restored_into_one_that_has_already_trained() -> None:
    stored = copied(new_state().tensors())
    worn = new_state(seed=1)
    step_on(worn, 3)
    worn.restore(stored, step=0)
    fresh = new_state()
    for state in (worn, fresh):
        step_on(state, 2)
    assert_same(worn.tensors(), fresh.tensors())


def test_it_holds_what_training_changes_and_what_it_leaves() -> None:
    state = new_state()
    step_on(state, 1)
    tensors = state.tensors()
    assert {"fixed.weight", "seen", "norm.running_var", "scale", "head.weight"} <= set(
        tensors["model"]
    )
    assert "scratch" not in tensors["model"]
    moments = {name.rpartition("/")[0] for name in tensors["optimizer"]}
    assert moments == {"embed.weight", "norm.weight", "norm.bias", "scale"}


def test_tied_weights_are_one_tensor_before_and_after() -> None:
    state = new_state()
    step_on(state, 1)
    restored = new_state(seed=1)
    restored.restore(copied(state.tensors()), step=1)
    for tensors in (state.tensors(), restored.tensors()):
        model = tensors["model"]
        assert model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()


def test_optimizer_state_goes_by_name_not_by_the_order_of_groups() -> None:
    state = new_state()
    step_on(state, 2)
    turned = new_state(seed=1)
    parameters = list(turned.model.parameters())[::-1]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    turned.optimizer = AdamW(groups, lr=0.05, fused=True)
    turned.restore(copied(state.tensors()), step=2)
    for each in (state, turned):
        step_on(each, 2)
    assert_same(turned.tensors(), state.tensors())


def test_the_weights_of_a_refused_checkpoint_are_not_taken_over() -> None:
    stored = copied(new_state(seed=1).tensors())
    del stored["model"]["scale"]
    state = new_state()
    before = copied(state.tensors())
    with pytest.raises(CheckpointError):
        state.restore(stored, step=4)
    assert_same(state.tensors(), before)
    assert state.step == 0


def rename(model: dict[str, Tensor]) -> None:
    model["gain"] = model.pop("scale")


def widen(model: dict[str, Tensor]) -> None:
    model["scale"] = torch.zeros(2)


def retype(model: dict[str, Tensor]) -> None:
    model["norm.bias"] = model["norm.bias"].double()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (rename, r"1 missing in the checkpoint: scale\. 1 unknown to the job: gain\."),
        (widen, r"1 of another shape .*: scale \(2,\), \(\)\."),
        (retype, r"1 of another type .*: norm.bias torch.float64, torch.float32\."),
    ],
)
def test_another_model_is_refused_by_name(
    change: Callable[[dict[str, Tensor]], None], says: str
) -> None:
    stored = copied(new_state().tensors())
    change(stored["model"])
    with pytest.raises(CheckpointError, match=says):
        new_state().restore(stored, step=1)


def test_many_differences_are_counted_and_five_are_named() -> None:
    stored = copied(new_state(width=9).tensors())
    with pytest.raises(CheckpointError, match=r"8 of another shape .*: ([^;]+; ){4}[^;]+, …\. Res"):
        new_state().restore(stored, step=1)


def test_moments_of_unknown_parameters_are_refused() -> None:
    state = new_state()
    step_on(state, 1)
    stored = copied(state.tensors())
    stored["optimizer"]["gone.weight/exp_avg"] = torch.zeros(3)
    with pytest.raises(
        CheckpointError, match=r"1 parameters that the model does not have: gone\.w"
    ):
        new_state().restore(stored, step=1)


def test_optimizer_state_that_no_file_can_hold_is_refused() -> None:
    state = new_state()
    state.optimizer = Counting(state.model.parameters(), odd=["a", "list"])
    step_on(state, 1)
    with pytest.raises(CheckpointError, match=r"keeps \S+/nothing as list"):
        state.tensors()


def test_only_trained_weights_and_moments_wait_for_the_next_update() -> None:
    """Frozen weights and buffers may change in a forward pass, tied ones have two names."""
    state = new_state()
    step_on(state, 1)
    assert state.changed_by_updates(state.tensors()) == {
        *(f"model/{n}" for n in ("embed.weight", "head.weight", "norm.weight", "norm.bias")),
        "model/scale",
        *(f"optimizer/{name}" for name in state.tensors()["optimizer"]),
    }


def test_a_stored_tensor_is_laid_out_as_the_weight_it_belongs_to() -> None:
    state = new_state()
    weight = state.model.get_parameter("embed.weight")
    for name in ("model/embed.weight", "model/head.weight", "optimizer/embed.weight/exp_avg"):
        assert state.like(name, (7, 6)) is weight
    for name in ("optimizer/embed.weight/step", "model/seen", "model/gone", "other-a/embed.weight"):
        assert state.like(name, ()) is None
    assert state.like("model/embed.weight", (9, 9)) is None
