"""A small network on handwritten digits in plain PyTorch; alone or under torchrun, in seconds."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rayway import OwnLoop

EPOCHS = 12


def main() -> None:
    """Train, print and save after every epoch."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
    )
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    run = {"global_batch": 64, "epochs": EPOCHS, "checkpoint_every_steps": 50}
    loop = OwnLoop("runs/mine", model=model, optimizer=optimizer, train="data/digits/train", **run)
