"""From a job to the state of step 0: model, replica over ranks, optimizer, learning rate."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from rayway.errors import SpecError
from rayway.spec.job import Job, OptimSpec
from rayway.spec.load import import_object
from rayway.train.draws import seed_build, seed_forward
from rayway.train.loss import Batch, LossFunction
from rayway.train.ranks import dp_size, sum_over_ranks
from rayway.train.state import TrainState
from rayway.train.stateful import OPTIMIZER_GROUPS, OptimizerGroups
from rayway.train.step import checked


def build_state(job: Job, device: torch.device) -> TrainState:
    """Build model and optimizer from the job's seed: the same on every rank.

    Raises:
        SpecError: A builder returned something else than a module or an optimizer, or the model
            has nothing to train.
    """
    seed_build(job.seed)
    model = import_object(job.model.build)(**job.model.args)
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"model.build={job.model.build} returned {type(model).__name__}, not a torch.nn.Module."
        )
    model.to(device)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SpecError(f"model.build={job.model.build} returned a model with nothing to train.")
    optimizer = _build_optimizer(job.optim, model)
    return TrainState(
        model=model,
        replica=model,
        optimizer=optimizer,
        others={OPTIMIZER_GROUPS: OptimizerGroups(optimizer)},
    )


def learning_rate(optim: OptimSpec, step: int, steps: int) -> float:
    """Return the rate of the update that makes ``step`` into ``step + 1``.

    A pure function: warm-up is a line from ``lr / warmup_steps`` to ``lr``; what follows falls to
    ``final_lr_fraction * lr`` at the last step along a line or half a cosine, or stays.

    Args:
        optim: Rate, warm-up and schedule.
        step: Finished steps before the update, from 0.
        steps: Steps of the whole run.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    span = max(steps - 1 - optim.warmup_steps, 1)
    done = min((step - optim.warmup_steps) / span, 1.0)
    left = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.lr * (optim.final_lr_fraction + (1 - optim.final_lr_fraction) * left)


def replicate(
    state: TrainState, loss_function: LossFunction, sample: Batch, *, seed: int
) -> list[str]:
    """Put DistributedDataParallel around the model, and let it settle before the first step.

    A backward pass on the sample, which changes nothing, shows which weights get no gradient: DDP
    would wait for them for ever, unless it is told to look for them in each step.

    After its own first backward pass DDP re-orders its buckets. With three or more ranks that
    changes the order of additions, so the first step after a resume would differ in the last bit
    from the same step of an undisturbed run. For two ranks it does not matter: a + b is b + a.

    Args:
        state: Its ``replica`` is replaced.
        loss_function: The user's.
        sample: A micro-batch, on the model's device.
        seed: The job's.

    Returns:
        The names of weights without a gradient on this rank.
    """
    buffers = {name: value.clone() for name, value in state.model.named_buffers()}
    _pass_for_nothing(state.model, loss_function, sample, seed)
    unused = [
        name
        for name, weight in state.model.named_parameters()
        if weight.requires_grad and weight.grad is None
    ]
    state.model.zero_grad(set_to_none=True)
    somewhere = bool(sum_over_ranks(torch.tensor([float(len(unused))])).item())
    state.replica = DistributedDataParallel(
        state.model,
        gradient_as_bucket_view=True,  # saves a copy of all gradients a step
        find_unused_parameters=somewhere,
    )
    if dp_size() > 2:
        for _ in range(2):
            _pass_for_nothing(state.replica, loss_function, sample, seed)
        state.model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, value in state.model.named_buffers():
            value.copy_(buffers[name])
    return unused


def _pass_for_nothing(
    model: nn.Module, loss_function: LossFunction, sample: Batch, seed: int
) -> None:
    seed_forward(seed, step=0, first_slot=0)
    torch.autograd.backward(checked(loss_function(model, sample)).sum * 0)


def _build_optimizer(optim: OptimSpec, model: nn.Module) -> Optimizer:
    if optim.build is not None:
        optimizer = import_object(optim.build)(model, optim)
        if not isinstance(optimizer, Optimizer):
            raise SpecError(
                f"optim.build={optim.build} returned {type(optimizer).__name__}, "
                f"not a torch.optim.Optimizer."
            )
        known = set(model.parameters())
        if any(p not in known for group in optimizer.param_groups for p in group["params"]):
            raise SpecError(
                f"optim.build={optim.build} trains parameters that are not the model's, so no "
                f"checkpoint would hold them. Make them parameters of the model."
            )
        return optimizer
    groups = _decay_groups(optim, model)
    if optim.name == "sgd":
        return SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=True)
    return AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)


def _decay_groups(optim: OptimSpec, model: nn.Module) -> Sequence[dict[str, Any]]:
    """Decay matrices only: gains and biases are not what makes a model overfit."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optim.weight_decay == 0:  # a group more is a call of the fused update more in each step
        return [{"params": trained, "weight_decay": 0.0}]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
