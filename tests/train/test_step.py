"""A step gives the same gradient, loss and rate however the global batch is cut."""

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from rank_pool import Ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rayway.data.feed import MicroBatch
from rayway.errors import SpecError
from rayway.train.loss import Batch, Loss, LossFunction
from rayway.train.ranks import grouped
from rayway.train.state import TrainState
from rayway.train.step import CLIP_GUARD, StepReport, StepSettings, checked, on_device, train_step

SLOTS, TOKENS, WORDS = 16, 10, 11
LIMIT = {torch.float64: 1e-13, torch.float32: 5e-6}


class TokenModel(nn.Module):
    """Logits of the next token; the embedding is the head, and one weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.mix = nn.Linear(8, 8)
        self.fixed = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        return cast(Tensor, self.head(torch.tanh(self.mix(hidden) + self.fixed(hidden.cumsum(1)))))


class Observed(torch.optim.SGD):
    """Keeps the gradients that it is given."""

    gradients: dict[int, Tensor]

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.gradients = {i: p.grad.clone() for i, p in enumerate(parameters) if p.grad is not None}
        return super().step(closure)


def token_loss(model: nn.Module, batch: Batch) -> Loss:
    logits = model(batch["x"])
    each = functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
    weight = batch["weight"].to(each.dtype)
    return Loss(sum=(each * weight.flatten()).sum(), weight=weight.sum())


def new_state(dtype: torch.dtype = torch.float32, **options: Any) -> TrainState:
    torch.manual_seed(0)
    model = TokenModel().to(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    replica: nn.Module = model
    if grouped():
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return TrainState(
        model=model, replica=replica, optimizer=Observed(trained, **{"lr": 0.1, **options})
    )


def token_weights(kind: str) -> Tensor:
    """Return how much each token counts, shape (SLOTS, TOKENS)."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, TOKENS + 1, (SLOTS, 1), generator=generator)
    weights = {
        "all": torch.full((SLOTS, 1), TOKENS),
        "ragged": lengths,
        "one long row": torch.where(torch.arange(SLOTS)[:, None] == 3, TOKENS, 1),
        "empty micro-batches": lengths * (torch.arange(SLOTS)[:, None] // 4 % 2 == 0),
        "an empty rank": lengths * (torch.arange(SLOTS)[:, None] < SLOTS // 2),
        "fractions": torch.full((SLOTS, 1), TOKENS),
        "empty slots": lengths,
        "a rank of empty slots": lengths,
    }
    counted = (torch.arange(TOKENS) < weights[kind]).double()
    return (
        counted * torch.rand(SLOTS, TOKENS, generator=generator) if kind == "fractions" else counted
    )


KINDS = [
    "all",
    "ragged",
    "one long row",
    "empty micro-batches",
    "an empty rank",
    "fractions",
    "empty slots",
    "a rank of empty slots",
]


def global_batch(kind: str) -> Batch:
    """Return the rows of one global batch; some kinds fill fewer slots."""
    rows = {"empty slots": 11, "a rank of empty slots": 6}.get(kind, SLOTS)
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(0, WORDS, (SLOTS, TOKENS + 1), generator=generator)
    batch = {"x": text[:, :-1], "y": text[:, 1:], "weight": token_weights(kind)}
    return {name: column[:rows] for name, column in batch.items()}


def cut(batch: Batch, *, micro_batch: int, rank: int = 0, world_size: int = 1) -> list[MicroBatch]:
    """Return a rank's micro-batches, as a feed cuts them: equally many on every rank."""
    rows = len(batch["x"])
    begin, end = rank * SLOTS // world_size, (rank + 1) * SLOTS // world_size
    micro_batches = []
    for i in range(math.ceil(math.ceil(SLOTS / world_size) / micro_batch)):
        first = begin + i * micro_batch
        stop = min(first + micro_batch, end, rows)
        ids = np.arange(first, max(stop, first))
        taken = slice(first, stop) if len(ids) else slice(0, 1)  # a stand-in row
        columns = {name: column[taken] for name, column in batch.items()}
        micro_batches.append(MicroBatch(columns, ids, len(ids), first))
    return micro_batches


def norm_of(report: StepReport) -> float:
    assert report.grad_norm is not None
    return report.grad_norm.item()


def settings(max_norm: float | None = None, **changes: Any) -> StepSettings:
    options = {"loss_function": token_loss, "seed": 0, **changes}
    return StepSettings(max_norm=max_norm, **options)


def one_step(
    kind: str,
    micro_batch: int,
    *,
    dtype: torch.dtype = torch.float32,
    max_norm: float | None = None,
) -> dict[str, Any]:
    """Return the numbers of a step of this rank; on its own it is the only one."""
    world_size, rank = 1, 0
    if grouped():
        world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    state, batch = new_state(dtype), global_batch(kind)
    micro_batches = cut(batch, micro_batch=micro_batch, rank=rank, world_size=world_size)
    report = train_step(state, micro_batches, settings(max_norm), rows=len(batch["x"]), lr=0.1)
    optimizer = cast(Observed, state.optimizer)
    return {
        "gradients": optimizer.gradients,
        "loss": report.loss(),
        "grad_norm": norm_of(report),
        "weights": nn.utils.parameters_to_vector(state.model.parameters()).detach(),
    }


@cache
def plainly(kind: str, *, dtype: torch.dtype, max_norm: float | None = None) -> dict[str, Any]:
    """Return the numbers of one big batch, as a textbook computes them."""
    state, batch = new_state(dtype), global_batch(kind)
    loss_sum, weight, _ = token_loss(state.model, batch)
    loss = loss_sum / weight
    torch.autograd.backward(loss)
    limit = float("inf") if max_norm is None else max_norm
    norm = nn.utils.clip_grad_norm_(state.model.parameters(), limit)
    state.optimizer.step()
    return {
        "gradients": cast(Observed, state.optimizer).gradients,
        "loss": loss.item(),
        "grad_norm": norm.item(),
        "weights": nn.utils.parameters_to_vector(state.model.parameters()).detach(),
    }


def steps_of_cases(cases: list[tuple[str, int, torch.dtype, float | None]]) -> list[dict[str, Any]]:
    """Return the numbers of a step for each case; runs on each rank of a group."""
    return [
        one_step(kind, micro_batch, dtype=dtype, max_norm=max_norm)
        for kind, micro_batch, dtype, max_norm in cases
    ]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def assert_like_one_batch(found: dict[str, Any], wanted: dict[str, Any], limit: float) -> None:
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for i, gradient in wanted["gradients"].items():
        assert relative_error(found["gradients"][i], gradient) < limit
    assert found["loss"] == pytest.approx(wanted["loss"], rel=limit)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=limit)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("micro_batch", [16, 8, 4, 2, 1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_add_up_to_one_big_batch(
    kind: str, micro_batch: int, dtype: torch.dtype
) -> None:
    found = one_step(kind, micro_batch, dtype=dtype)
    assert_like_one_batch(found, plainly(kind, dtype=dtype), LIMIT[dtype])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_add_up_to_one_big_batch(world_size: int, ranks: Ranks) -> None:
    share = -(-SLOTS // world_size)
    micro_batches = [share, -(-share // 2), -(-share // 4)]
    cases = [
        (kind, micro_batch, dtype, None)
        for kind, micro_batch, dtype in itertools.product(KINDS, micro_batches, LIMIT)
    ]
    by_rank = ranks.run(steps_of_cases, cases, world_size=world_size)
    for (kind, _, dtype, _), *found in zip(cases, *by_rank, strict=True):
        wanted = plainly(kind, dtype=dtype)
        for numbers in found:
            assert_like_one_batch(numbers, wanted, LIMIT[dtype])
            assert torch.equal(numbers["weights"], found[0]["weights"])
            assert numbers["loss"] == found[0]["loss"]


@pytest.mark.parametrize("share_of_norm", [0.01, 0.5, 0.999, 2.0])
def test_clipping_is_by_the_norm_of_the_whole_gradient_however_it_is_cut(
    share_of_norm: float, ranks: Ranks
) -> None:
    dtype, kind = torch.float64, "ragged"
    whole = plainly(kind, dtype=dtype)["grad_norm"]
    max_norm = whole * share_of_norm
    wanted = plainly(kind, dtype=dtype, max_norm=max_norm)
    assert wanted["grad_norm"] == whole
    cases = [(kind, micro_batch, dtype, max_norm) for micro_batch in (8, 4, 2)]
    for found in [
        *steps_of_cases(cases),
        *itertools.chain(*ranks.run(steps_of_cases, cases, world_size=2)),
    ]:
        assert_like_one_batch(found, wanted, LIMIT[dtype])
        norm = torch.cat([g.flatten() for g in found["gradients"].values()]).norm().item()
        clipped = max_norm * whole / (whole + CLIP_GUARD)
        assert norm == pytest.approx(min(clipped, whole), rel=1e-9)


@pytest.mark.parametrize("lengths", [[1, 2, 3, 10]])
def test_four_sequences_of_unlike_length_count_by_token(lengths: list[int], ranks: Ranks) -> None:
    one_batch, *others = [four_sequences(lengths, micro_batch) for micro_batch in (4, 2, 1)]
    others += ranks.run(four_sequences, lengths, 1, world_size=2)
    others += ranks.run(four_sequences, lengths, 2, world_size=2)
    for gradients, loss in others:
        for found, wanted in zip(gradients, one_batch[0], strict=True):
            assert relative_error(found, wanted) < 1e-6
        assert loss == pytest.approx(one_batch[1], rel=1e-6)


def four_sequences(lengths: list[int], micro_batch: int) -> tuple[list[Tensor], float]:
    batch = {name: column[: len(lengths)] for name, column in global_batch("all").items()}
    batch["weight"] = (torch.arange(TOKENS) < torch.tensor(lengths)[:, None]).double()
    begin, end = 0, len(lengths)
    if grouped():
        share = len(lengths) // torch.distributed.get_world_size()
        begin = torch.distributed.get_rank() * share
        end = begin + share
    pieces = [
        MicroBatch(
            {name: column[i : i + micro_batch] for name, column in batch.items()},
            np.arange(i, i + micro_batch),
            micro_batch,
            i,
        )
        for i in range(begin, end, micro_batch)
    ]
    state = new_state()
    report = train_step(state, pieces, settings(), rows=len(lengths), lr=0.1)
    return list(cast(Observed, state.optimizer).gradients.values()), report.loss()


@pytest.mark.parametrize("kind", KINDS)
def test_the_logged_loss_is_the_optimized_one(kind: str) -> None:
    """Along the gradient, the logged loss falls as fast as the gradient says."""
    state, batch = new_state(torch.float64), global_batch(kind)
    rate = 1e-5
    micro_batches = cut(batch, micro_batch=4)
    first, second = (
        train_step(state, micro_batches, settings(), rows=len(batch["x"]), lr=rate) for _ in "ab"
    )
    fall = (first.loss() - second.loss()) / rate
    assert fall == pytest.approx(norm_of(first) ** 2, rel=1e-3)


def test_gradients_travel_between_ranks_once_a_step(ranks: Ranks) -> None:
    for syncs in ranks.run(count_syncs, 4, world_size=2):
        assert syncs == 1


def count_syncs(accumulation: int) -> int:
    syncs = []

    def reduce(
        group: object,
        bucket: torch.distributed.GradBucket,  # type: ignore[name-defined]  # it is there
    ) -> torch.futures.Future[Tensor]:
        syncs.append(bucket.index())
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        mean: torch.futures.Future[Tensor] = work.then(lambda sums: sums.value()[0] / 2)
        return mean

    state, batch = new_state(), global_batch("all")
    assert isinstance(state.replica, DistributedDataParallel)
    state.replica.register_comm_hook(None, reduce)
    rank = torch.distributed.get_rank()
    micro_batches = cut(batch, micro_batch=8 // accumulation, rank=rank, world_size=2)
    assert len(micro_batches) == accumulation
    train_step(state, micro_batches, settings(), rows=SLOTS, lr=0.1)
    return syncs.count(0)


def test_a_batch_without_any_weight_changes_no_weight_and_has_no_loss(ranks: Ranks) -> None:
    for before, after, loss, grad_norm in [
        step_without_weight(),
        *ranks.run(step_without_weight, world_size=2),
    ]:
        assert torch.equal(before, after)
        assert np.isnan(loss)
        assert grad_norm == 0


def step_without_weight() -> tuple[Tensor, Tensor, float, float]:
    state, batch = new_state(), global_batch("all")
    batch["weight"] = torch.zeros_like(batch["weight"])
    before = nn.utils.parameters_to_vector(state.model.parameters()).detach().clone()
    report = train_step(state, cut(batch, micro_batch=4), settings(1.0), rows=SLOTS, lr=0.1)
    after = nn.utils.parameters_to_vector(state.model.parameters()).detach()
    return before, after, report.loss(), norm_of(report)


def test_the_rate_is_the_one_asked_for_in_every_group() -> None:
    state = new_state()
    state.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 5.0})
    report = step_of(state, lr=0.25)
    assert [group["lr"] for group in state.optimizer.param_groups] == [0.25, 0.25]
    assert report.lr == 0.25


def step_of(state: TrainState, **options: Any) -> StepReport:
    micro_batches = cut(global_batch("ragged"), micro_batch=4)
    return train_step(state, micro_batches, settings(), **{"rows": SLOTS, "lr": 0.1, **options})


def test_a_step_counts_once_whatever_the_accumulation_and_leaves_no_gradient() -> None:
    state = new_state()
    assert [step_of(state).step for _ in range(3)] == [1, 2, 3] == list(range(1, state.step + 1))
    assert all(p.grad is None for p in state.model.parameters())


def test_frozen_weights_stay(ranks: Ranks) -> None:
    state = new_state()
    step_of(state)
    fresh = new_state()
    assert torch.equal(state.model.fixed.weight, fresh.model.fixed.weight)  # type: ignore[union-attr, arg-type]  # it is a TokenModel
    assert not torch.equal(state.model.embed.weight, fresh.model.embed.weight)  # type: ignore[union-attr, arg-type]  # the same


@pytest.mark.parametrize("asking", [(), (0,), (1,), (0, 1)])
def test_every_rank_hears_of_a_request_to_stop(asking: tuple[int, ...], ranks: Ranks) -> None:
    assert ranks.run(step_that_asks, asking, world_size=2) == [bool(asking)] * 2


def step_that_asks(asking: tuple[int, ...]) -> bool:
    return step_of(new_state(), stop=torch.distributed.get_rank() in asking).stop_asked()


def test_dropout_differs_between_micro_batches_and_steps_and_repeats_in_a_second_run() -> None:
    masks = [masks_of_a_run(), masks_of_a_run()]
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True))
    assert len({tuple(mask.flatten().tolist()) for mask in masks[0]}) == 8


def test_dropout_differs_between_ranks(ranks: Ranks) -> None:
    mine, theirs = ranks.run(masks_of_a_run, world_size=2)
    assert len({tuple(mask.flatten().tolist()) for mask in mine + theirs}) == 8


def masks_of_a_run() -> list[Tensor]:
    masks = []

    def loss(model: nn.Module, batch: Batch) -> Loss:
        masks.append(functional.dropout(torch.ones(64), 0.5))
        return token_loss(model, batch)

    state, batch = new_state(), global_batch("all")
    world_size, rank = 1, 0
    if grouped():
        world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for _ in range(2):
        micro_batches = cut(batch, micro_batch=4, rank=rank, world_size=world_size)
        train_step(state, micro_batches, settings(loss_function=loss), rows=SLOTS, lr=0.1)
    return masks


def test_bf16_runs_the_forward_pass_in_bf16_and_keeps_the_weights_in_fp32() -> None:
    seen = set()

    def loss(model: nn.Module, batch: Batch) -> Loss:
        seen.add(model(batch["x"]).dtype)
        return token_loss(model, batch)

    batch = global_batch("ragged")
    gradients = []
    for micro_batch in (16, 4):
        state = new_state()
        bf16 = settings(loss_function=loss, autocast=torch.bfloat16)
        train_step(state, cut(batch, micro_batch=micro_batch), bf16, rows=SLOTS, lr=0.1)
        gradients.append(cast(Observed, state.optimizer).gradients)
        assert {p.dtype for p in state.model.parameters()} == {torch.float32}
    assert seen == {torch.bfloat16}
    exact = plainly("ragged", dtype=torch.float32)["gradients"]
    for i, gradient in exact.items():
        assert relative_error(gradients[0][i], gradients[1][i]) < 2e-2
        assert 1e-5 < relative_error(gradients[0][i], gradient) < 5e-2


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (torch.ones(()), "returned Tensor"),
        (None, "returned NoneType"),
        (Loss(sum=torch.ones(3), weight=3), r"shape \(3,\).*reduction"),
        (Loss(sum=1.0, weight=3), "Loss.sum is float"),  # type: ignore[arg-type]  # the point
    ],
)
def test_a_loss_function_that_returns_no_loss_is_refused(result: object, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        checked(result)


@pytest.mark.parametrize("as_number", [float, int, torch.tensor])
def test_a_weight_may_be_a_number_or_a_tensor(as_number: Callable[[float], float]) -> None:
    def loss(model: nn.Module, batch: Batch) -> Loss:
        found = token_loss(model, batch)
        return found._replace(weight=as_number(float(found.weight)))

    numbers = [step_with(loss), step_with(token_loss)]
    assert numbers[0] == numbers[1]


def step_with(loss: LossFunction) -> tuple[float, float]:
    batch = global_batch("ragged")
    micro_batches = cut(batch, micro_batch=4)
    report = train_step(
        new_state(), micro_batches, settings(loss_function=loss), rows=SLOTS, lr=0.1
    )
    return report.loss(), norm_of(report)


def test_on_the_cpu_micro_batches_are_not_copied() -> None:
    micro_batches = cut(global_batch("all"), micro_batch=4)
    assert on_device(micro_batches, torch.device("cpu")) is micro_batches


def test_on_another_device_the_columns_move_and_the_rest_stays() -> None:
    micro_batches = cut(global_batch("all"), micro_batch=4)
    moved = on_device(micro_batches, torch.device("meta"))
    assert all(c.device.type == "meta" for m in moved for c in m.columns.values())
    assert [(m.weight_rows, m.first_slot) for m in moved] == [
        (m.weight_rows, m.first_slot) for m in micro_batches
    ]
