"""jobs/digits.py on plain Ray Train: the loop, evaluation, metrics and checkpoints by hand.

Start it with ``PYTHONPATH=jobs python ray_train_digits.py FOLDER``, and once more to go on. Ray
starts the workers, keeps the checkpoints that the loop reports, and gives the newest back after
a failure or when the script is run again. Model, loss and data preparation are those of
jobs/digits.py and are imported, as they are there.
"""

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import Tensor, nn

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


def train_loop(config: dict[str, Any]) -> None:
    """Train to the end on one worker, from the newest checkpoint if there is one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    log = Path(config["folder"], "metrics.jsonl")
    torch.manual_seed(SEED)
    images, labels = read(Path(config["data"], "train"))
    held_out = read(Path(config["data"], "test"))
    model = build(channels=[32, 64])
    replica = prepare_model(model)
    optimizer = build_optimizer(model)
    steps_per_epoch = len(labels) // GLOBAL_BATCH
    steps = EPOCHS * steps_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    first_epoch, step = 0, 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
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
            if rank == 0:
                lr = schedule.get_last_lr()[0]
                record = {"step": step, "loss": total.item(), "grad_norm": norm.item(), "lr": lr}
                with log.open("a") as lines:  # ray.train.report would take two seconds a step
                    lines.write(json.dumps(record) + "\n")
        if (epoch + 1) % EVERY_EPOCHS == 0 or epoch + 1 == EPOCHS:
            nats, accuracy = evaluate(model, *held_out)
            metrics = {"step": step, "validation_loss": nats, "accuracy": accuracy}
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if rank == 0:
                    state = {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "schedule": schedule.state_dict(),
                        "epoch": epoch + 1,
                        "step": step,
                    }
                    torch.save(state, Path(folder, "state.pt"))
                    checkpoint = Checkpoint.from_directory(folder)
                ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    """Train on two workers; run it again to go on."""
    folder, data = Path(sys.argv[1]).absolute(), Path("data/digits").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(str(data))
    ray.init()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"folder": str(folder), "data": str(data)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="digits",
            storage_path=str(folder),
            checkpoint_config=CheckpointConfig(num_to_keep=KEEP_LAST),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    metrics = trainer.fit().metrics
    if metrics:
        print(f"step {metrics['step']}: accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
