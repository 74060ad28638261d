"""jobs/digits.py without a framework: DDP, evaluation, metrics, checkpoints and resume by hand.

Start it with ``PYTHONPATH=jobs torchrun --nproc-per-node 2 bare_digits.py FOLDER``, and once more
to go on from the newest checkpoint in FOLDER. Model, loss and data preparation are
those of jobs/digits.py and are imported, as they are there.
"""

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models.resnet import build, loss
from sources.digits import prepare

EPOCHS = int(os.environ.get("EPOCHS", "15"))
GLOBAL_BATCH, LR, WEIGHT_DECAY, WARMUP, MAX_NORM, SEED = 64, 4e-3, 0.01, 20, 1.0, 0
EVERY_EPOCHS, KEEP_LAST = 5, 3


def read(folder: Path) -> tuple[Tensor, Tensor]:
    """Return images and labels of a split."""
    table = pq.read_table(sorted(folder.glob("*.parquet")))
    images = table["image"].combine_chunks().flatten().to_numpy().reshape(-1, 64)
    return torch.tensor(images), torch.tensor(table["label"].to_numpy())


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, as a fraction of the peak."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return (1 + math.cos(math.pi * min((step - WARMUP) / (steps - 1 - WARMUP), 1))) / 2


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only."""
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True
    )


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return loss and accuracy over the held-out rows, each counted once over all ranks."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    model.eval()
    with torch.no_grad():
        result = loss(model, {"image": images[mine], "label": labels[mine]})
    model.train()
    totals = torch.tensor([result.sum, result.weight, result.metrics["accuracy"][0]])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item(), (totals[2] / totals[1]).item()


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"step-\d{8}\.pt", path.name))


def save(folder: Path, state: dict[str, object], step: int) -> None:
    """Write a checkpoint that is there as a whole or not at all, and remove the oldest."""
    part = folder / "checkpoint.part"
    torch.save(state, part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.rename(folder / f"step-{step:08d}.pt")
    for old in checkpoints(folder)[:-KEEP_LAST]:
        old.unlink()


def write(folder: Path, record: dict[str, Any]) -> None:
    """Append a line to the run's metrics."""
    if dist.get_rank() == 0:
        with (folder / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")


def main() -> None:
    """Train to the end, from the newest checkpoint if there is one."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder, data = Path(sys.argv[1]), Path("data/digits")
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        prepare(str(data))
    dist.barrier()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    images, labels = read(data / "train")
    held_out = read(data / "test")
    model = build(channels=[32, 64])
    replica = DistributedDataParallel(model)
    optimizer = build_optimizer(model)
    steps_per_epoch = len(labels) // GLOBAL_BATCH
    steps = EPOCHS * steps_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    first_epoch, step = 0, 0
    if saved := checkpoints(folder):
        state = torch.load(saved[-1], weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first_epoch, step = state["epoch"], state["step"]
    for epoch in range(first_epoch, EPOCHS):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED + epoch))
        for rows in order[: steps_per_epoch * GLOBAL_BATCH].view(-1, GLOBAL_BATCH):
            mine = rows[rank::ranks]
            result = loss(replica, {"image": images[mine], "label": labels[mine]})
            mean = result.sum / result.weight
            torch.autograd.backward(mean)
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            total = mean.detach() / ranks
            dist.all_reduce(total)
            numbers = {"loss": total.item(), "grad_norm": norm.item()}
            write(folder, {"step": step, **numbers, "lr": schedule.get_last_lr()[0]})
        if (epoch + 1) % EVERY_EPOCHS == 0 or epoch + 1 == EPOCHS:
            nats, accuracy = evaluate(model, *held_out)
            write(folder, {"step": step, "validation_loss": nats, "accuracy": accuracy})
            if rank == 0:
                print(f"step {step}/{steps}: loss {nats:.4f}, accuracy {accuracy:.4f}")
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "epoch": epoch + 1,
                    "step": step,
                }
                save(folder, state, step)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
