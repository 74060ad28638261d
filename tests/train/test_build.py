"""From a job to the state of step 0, and the rate of each step."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import Ranks
from tiny_project import Project
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from rayway.errors import SpecError
from rayway.spec.code import enter_code_root
from rayway.spec.job import BatchSpec, DataSpec, Job, ModelSpec, OptimSpec
from rayway.train.build import build_state, learning_rate, replicate
from rayway.train.loss import Batch, Loss
from rayway.train.state import TrainState

CPU = torch.device("cpu")

MODELS = """
import torch
from torch import nn


def plain():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


def half_frozen():
    model = plain()
    model[0].requires_grad_(False)
    return model


def only_gains():
    return nn.LayerNorm(4)


def no_model():
    return {"a": 1}


def nothing_to_train():
    return plain().requires_grad_(False)


def no_optimizer(model, spec):
    return list(model.parameters())


def own_optimizer(model, spec):
    return torch.optim.RMSprop(model.parameters(), lr=spec.lr)
"""


def job_of(build: str = "plain", **optim: Any) -> Job:
    return Job(
        name="tiny",
        model=ModelSpec(build=f"models_here:{build}"),
        loss="models_here:loss",
        data=DataSpec(train="/rows/train"),
        batch=BatchSpec(global_batch=8),
        optim=OptimSpec(**{"lr": 0.1, "steps": 5, **optim}),
    )


@pytest.fixture(autouse=True)
def _models(project: Project) -> None:
    (project.code / "models_here.py").write_text(MODELS)
    enter_code_root(project.code)


def test_the_same_seed_builds_the_same_weights_whatever_was_drawn_before() -> None:
    first = build_state(job_of(), CPU).tensors()["model"]
    torch.rand(17)
    again = build_state(job_of(), CPU).tensors()["model"]
    other = build_state(job_of().model_copy(update={"seed": 1}), CPU).tensors()["model"]
    assert all(torch.equal(again[name], value) for name, value in first.items())
    assert not torch.equal(other["0.weight"], first["0.weight"])


def test_alone_there_is_no_wrapper_and_no_step_is_done() -> None:
    state = build_state(job_of(), CPU)
    assert state.replica is state.model
    assert state.step == 0


@pytest.mark.parametrize(("name", "kind"), [("adamw", AdamW), ("sgd", SGD)])
@pytest.mark.parametrize(
    ("build", "decayed", "others"), [("plain", 2, 3), ("half_frozen", 1, 2), ("only_gains", 0, 2)]
)
def test_only_matrices_decay_and_only_trained_weights_are_optimized(
    name: str, kind: type, build: str, decayed: int, others: int
) -> None:
    optimizer = build_state(job_of(build, name=name, weight_decay=0.3), CPU).optimizer
    assert type(optimizer) is kind
    found = [(len(g["params"]), g["weight_decay"], g["lr"]) for g in optimizer.param_groups]
    assert found == [x for x in ((decayed, 0.3, 0.1), (others, 0.0, 0.1)) if x[0]]


def test_the_optimizers_numbers_are_the_jobs() -> None:
    adamw = build_state(job_of(betas=(0.5, 0.6)), CPU).optimizer
    sgd = build_state(job_of(name="sgd", momentum=0.4), CPU).optimizer
    assert {group["betas"] for group in adamw.param_groups} == {(0.5, 0.6)}
    assert {group["momentum"] for group in sgd.param_groups} == {0.4}


def test_a_users_own_optimizer_is_taken() -> None:
    job = job_of()
    own = job.model_copy(
        update={"optim": OptimSpec(lr=0.2, steps=5, build="models_here:own_optimizer")}
    )
    optimizer = build_state(own, CPU).optimizer
    assert type(optimizer).__name__ == "RMSprop"
    assert optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize(
    ("build", "says"),
    [
        ("no_model", "returned dict, not a torch.nn.Module"),
        ("nothing_to_train", "nothing to train"),
    ],
)
def test_what_is_no_model_is_refused(build: str, says: str) -> None:
    with pytest.raises(SpecError, match=rf"models_here:{build} .*{says}"):
        build_state(job_of(build), CPU)


def test_what_is_no_optimizer_is_refused() -> None:
    optim = OptimSpec(lr=0.2, steps=5, build="models_here:no_optimizer")
    with pytest.raises(SpecError, match="no_optimizer returned list, not a torch"):
        build_state(job_of().model_copy(update={"optim": optim}), CPU)


RATES = st.floats(1e-8, 100)
SPECS: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    lr=RATES,
    warmup_steps=st.integers(0, 30),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    final_lr_fraction=st.floats(0, 1),
)


@given(spec=SPECS, after_warm_up=st.integers(0, 60))
def test_rates_warm_up_in_a_line_then_never_rise_and_end_where_asked(
    spec: dict[str, Any], after_warm_up: int
) -> None:
    warm_up, peak = spec["warmup_steps"], spec["lr"]
    steps = max(warm_up + after_warm_up, 1)
    optim = OptimSpec(steps=steps, **spec)
    rates = [learning_rate(optim, step, steps) for step in range(steps)]
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates)
    for step in range(warm_up):
        assert rates[step] == pytest.approx(peak * (step + 1) / warm_up)
    after = rates[warm_up:]
    assert all(a >= b or a == pytest.approx(b) for a, b in pairwise(after))
    assert max(rates) == pytest.approx(peak)
    if len(after) > 1:
        assert after[0] == pytest.approx(peak)
        constant = spec["schedule"] == "constant"
        last = peak if constant else peak * spec["final_lr_fraction"]
        assert after[-1] == pytest.approx(last, abs=1e-12 * peak)


def test_a_cosine_is_half_way_down_in_the_middle_and_a_line_too() -> None:
    for schedule in ("linear", "cosine"):
        optim = OptimSpec(lr=2.0, steps=11, schedule=schedule, final_lr_fraction=0.5)
        assert learning_rate(optim, 5, 11) == pytest.approx(1.5)
    line = OptimSpec(lr=2.0, steps=11, schedule="linear")
    assert [learning_rate(line, s, 11) for s in (0, 2, 10)] == pytest.approx([2.0, 1.6, 0.0])
    cosine = OptimSpec(lr=2.0, steps=13, schedule="cosine")
    assert learning_rate(cosine, 4, 13) == pytest.approx(1.5)


class Normed(nn.Module):
    """Has buffers that a forward pass changes, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def squares(model: nn.Module, batch: Batch) -> Loss:
    return Loss(sum=model(batch["x"]).square().sum(), weight=len(batch["x"]))


class Partly(Normed):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


def replicated(used: bool) -> tuple[list[str], bool, list[tuple[str, bool]]]:
    torch.manual_seed(0)
    model: nn.Module = Normed() if used else Partly()
    state = TrainState(model=model, replica=model, optimizer=AdamW(model.parameters()))
    before = {name: value.clone() for name, value in state.tensors()["model"].items()}
    unused = replicate(state, squares, {"x": torch.rand(6, 3)}, seed=0)
    assert not state.optimizer.state
    assert all(p.grad is None for p in model.parameters())
    same = [
        (name, torch.equal(value, before[name])) for name, value in state.tensors()["model"].items()
    ]
    for _ in range(3):  # DDP complains in the second step after a weight got no gradient
        torch.autograd.backward(squares(state.replica, {"x": torch.rand(6, 3)}).sum)
    return unused, isinstance(state.replica, DistributedDataParallel), same


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_begin_as_the_model_is(world_size: int, ranks: Ranks) -> None:
    for unused, wrapped, found in ranks.run(replicated, True, world_size=world_size):
        assert (unused, wrapped, len(found)) == ([], True, 9)
        assert all(same for _, same in found)


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_without_a_gradient_are_named_and_do_not_stop_replicas(
    world_size: int, ranks: Ranks
) -> None:
    for unused, wrapped, found in ranks.run(replicated, False, world_size=world_size):
        assert (unused, wrapped) == (["idle.weight", "idle.bias"], True)
        assert all(same for _, same in found)


def test_ranks_build_the_same_weights(ranks: Ranks, project: Project) -> None:
    found = ranks.run(build_on_a_rank, str(project.code), world_size=2)
    alone = build_state(job_of(), CPU).tensors()["model"]
    for weights in found:
        assert all(torch.equal(weights[name], value) for name, value in alone.items())


def build_on_a_rank(code: str) -> dict[str, Tensor]:
    enter_code_root(Path(code))
    return build_state(job_of(), CPU).tensors()["model"]
