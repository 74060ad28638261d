"""One optimizer step, from micro-batches to new weights.

The gradient is that of the mean loss over the *whole* global batch: all losses summed, divided by
all weights summed. It does not depend on how the batch is cut: 1 rank x 8 micro-batches and 4 ranks
x 2 give the same numbers, up to rounding, for a model that does not mix samples (batch norm).

The weight of the whole batch is known only after the last forward pass. So each loss is divided by
the number of rows of the global batch, which is known before, and the gradients are multiplied by
rows / weight at the end, in the same pass that clips them (docs/decisions/0002).

Nothing here waits for the device, logs, saves or knows about Ray. The loop does that.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rayway.data.feed import MicroBatch
from rayway.errors import SpecError
from rayway.train.draws import seed_forward
from rayway.train.loss import Loss, LossFunction
from rayway.train.ranks import dp_size, start_sum
from rayway.train.state import TrainState

CLIP_GUARD = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


@dataclass(frozen=True)
class StepReport:
    """A step's numbers, the same on every rank. Tensors may still be on their way."""

    step: int
    """Finished steps, this one included."""

    totals: Tensor
    """Sum of losses, sum of weights, ranks that saw a request to stop, rows that were used; over
    all ranks; float64."""

    grad_norm: Tensor | None
    """L2 norm of the whole gradient before clipping, shape (). ``None``: it was not measured."""

    lr: float

    def loss(self) -> float:
        """Return the mean loss over the global batch; NaN if its weight is 0. Waits for it."""
        loss_sum, weight, _, _ = self.totals.tolist()
        return loss_sum / weight if weight else float("nan")

    def weight(self) -> float:
        """Return the weight of the global batch. Waits for it."""
        return float(self.totals[1].item())

    def rows(self) -> int:
        """Return how many rows the step used, over all ranks. Waits for it."""
        return int(self.totals[3].item())

    def stop_asked(self) -> bool:
        """Did any rank see a request to stop? The same answer on every rank. Waits for it."""
        return self.totals[2].item() > 0


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What stays the same over all steps of a run."""

    loss_function: LossFunction
    seed: int
    max_norm: float | None
    """Largest L2 norm of the gradient; a larger one is scaled down. ``None``: not clipped."""

    autocast: torch.dtype | None = None
    """Precision of the forward pass; ``None``: that of the parameters."""


def train_step(
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    settings: StepSettings,
    *,
    rows: int,
    lr: float,
    stop: bool = False,
) -> StepReport:
    """Update the weights once, from this rank's share of one global batch.

    Args:
        state: Changed in place; ``state.step`` grows by 1.
        micro_batches: This rank's share, as many on every rank.
        settings: What stays the same over the run.
        rows: Rows of the whole global batch, over all ranks, as planned.
        lr: The rate of this update.
        stop: This rank saw a request to stop; carried to all ranks with the loss.

    Returns:
        The step's numbers.
    """
    device = next(iter(micro_batches[0].columns.values())).device
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    # views; += on totals[0] costs three times as much
    loss_sum, weight, stops, used = totals.unbind()
    used.fill_(sum(micro_batch.weight_rows for micro_batch in micro_batches))
    if stop:
        stops.fill_(1)
    last = len(micro_batches) - 1
    pending = None
    for i, micro_batch in enumerate(micro_batches):
        with _gradients_stay_local(state.replica, stay=i < last):
            loss = _forward(state, micro_batch, settings)
            with torch.no_grad():  # a weight that came out of the model may carry a graph
                loss_sum += loss.sum
                weight += loss.weight
            if i == last:
                pending = start_sum(totals)  # travels beside the backward pass
            torch.autograd.backward(loss.sum / rows)

    assert pending is not None
    pending.wait()
    # DDP averages over ranks, and each loss was divided by rows: both are undone here.
    # A batch without any weight has a gradient of 0, and rows / 0 is infinite.
    scale = torch.nan_to_num(dp_size() * rows / weight, posinf=0.0)
    grad_norm = _scale_and_clip(state.optimizer, scale, settings.max_norm)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    return StepReport(step=state.step, totals=totals, grad_norm=grad_norm, lr=lr)


def _forward(state: TrainState, micro_batch: MicroBatch, settings: StepSettings) -> Loss:
    seed_forward(settings.seed, step=state.step, first_slot=micro_batch.first_slot)
    device = next(iter(micro_batch.columns.values())).device
    with autocast(settings.autocast, device):
        loss = checked(settings.loss_function(state.replica, micro_batch.columns))
    if micro_batch.weight_rows == 0:  # a stand-in row, so that the rank takes part in the sync
        return Loss(loss.sum * 0, 0.0)
    return loss


def on_device(micro_batches: list[MicroBatch], device: torch.device) -> list[MicroBatch]:
    """Return the micro-batches with their columns on ``device``."""
    if device.type == "cpu":
        return micro_batches
    return [
        replace(
            micro_batch,
            columns={
                name: column.to(device, non_blocking=True)
                for name, column in micro_batch.columns.items()
            },
        )
        for micro_batch in micro_batches
    ]


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass in ``dtype``; ``None`` changes nothing."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def checked(loss: object) -> Loss:
    """Return what a loss function gave, if it is what it has to be.

    Raises:
        SpecError: It is not a ``Loss``, or its sum is not a scalar tensor.
    """
    if not isinstance(loss, Loss):
        raise SpecError(
            f"The loss function returned {type(loss).__name__}; it has to return "
            f"rayway.Loss(sum=..., weight=...)."
        )
    if "loss" in loss.metrics:
        raise SpecError(
            "The loss function returned a metric named 'loss', which is the loss's own name in the "
            "results. Give the metric another name."
        )
    if not isinstance(loss.sum, Tensor) or loss.sum.ndim != 0:
        found = (
            f"a tensor of shape {tuple(loss.sum.shape)}"
            if isinstance(loss.sum, Tensor)
            else type(loss.sum).__name__
        )
        raise SpecError(
            f"Loss.sum is {found}; it has to be a scalar tensor. "
            f'Sum the losses, e.g. with reduction="sum".'
        )
    if torch.is_grad_enabled() and not loss.sum.requires_grad:
        raise SpecError(
            "Loss.sum does not depend on the weights of the model, so there is nothing to learn "
            "from. Do not detach it, and compute it outside of torch.no_grad()."
        )
    return loss


def _gradients_stay_local(replica: nn.Module, *, stay: bool) -> AbstractContextManager[None]:
    """Sync gradients over ranks in the last micro-batch only."""
    if stay and isinstance(replica, DistributedDataParallel):
        return replica.no_sync()
    return nullcontext()


def _scale_and_clip(optimizer: Optimizer, scale: Tensor, max_norm: float | None) -> Tensor:
    """Multiply all gradients by ``scale``, clip them, and return their norm before clipping."""
    # asking the optimizer is ten times as fast as walking over the model's modules
    trained = (weight for group in optimizer.param_groups for weight in group["params"])
    gradients = [weight.grad for weight in trained if weight.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    scale = scale.to(gradients[0].dtype)
    norm = nn.utils.get_total_norm(gradients) * scale
    if max_norm is not None:
        scale = scale * torch.clamp(max_norm / (norm + CLIP_GUARD), max=1.0)
    torch._foreach_mul_(gradients, scale)
    return norm
