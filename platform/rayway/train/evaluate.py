"""Loss and task metrics over a whole data set, each row counted once on any number of ranks."""

import torch
from torch import nn

from rayway.data.feed import Feed
from rayway.train.draws import seed_evaluation
from rayway.train.loss import Loss
from rayway.train.ranks import sum_over_ranks, take_from_first
from rayway.train.step import StepSettings, autocast, checked, on_device


def evaluate(
    model: nn.Module,
    feed: Feed,
    settings: StepSettings,
    *,
    step: int,
    device: torch.device,
) -> tuple[dict[str, float], int]:
    """Return the mean of the loss and of each metric, and how many rows they are over.

    All ranks look with the buffers of rank 0, which are the ones that are saved. In training each
    rank has its own until the next forward pass, e.g. batch norm's running statistics.

    Args:
        model: As the user built it; it is put into eval mode and back.
        feed: One epoch of this rank's share, in stored order; it is read to its end.
        settings: Those of the training steps.
        step: Finished steps; names the draws of models that draw in eval mode.
        device: Where the model is.

    Raises:
        SpecError: The loss function returned something else than a ``Loss``.
    """
    sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    rows = 0
    was_training = model.training
    model.eval()
    take_from_first(model.buffers())
    try:
        with torch.inference_mode(), feed:
            for micro_batches in feed:
                for micro_batch in on_device(micro_batches, device):
                    seed_evaluation(settings.seed, step=step, first_slot=micro_batch.first_slot)
                    with autocast(settings.autocast, device):
                        loss = checked(settings.loss_function(model, micro_batch.columns))
                    _add(sums, loss, counted=micro_batch.weight_rows > 0)
                    rows += micro_batch.weight_rows
    finally:
        model.train(was_training)
    # every rank has the same names: a rank without rows ran the loss on a stand-in row
    table = torch.tensor(
        [[float(total), float(weight)] for total, weight in sums.values()] + [[float(rows), 0.0]],
        dtype=torch.float64,
        device=device,
    )
    sum_over_ranks(table)
    means = {
        name: (total / weight if weight else float("nan"))
        for name, (total, weight) in zip(sums, table.tolist(), strict=False)
    }
    return means, int(table[-1, 0].item())


def _add(sums: dict[str, tuple[torch.Tensor, torch.Tensor]], loss: Loss, *, counted: bool) -> None:
    nothing = torch.zeros((), dtype=torch.float64, device=loss.sum.device)
    for name, (total, weight) in {"loss": (loss.sum, loss.weight), **loss.metrics}.items():
        so_far, weight_so_far = sums.get(name, (nothing, nothing))
        sums[name] = (
            (so_far + total, weight_so_far + weight) if counted else (so_far, weight_so_far)
        )
