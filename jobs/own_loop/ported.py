"""A small network on handwritten digits in plain PyTorch; alone or under torchrun, in seconds."""
# mypy: disable-error-code="no-untyped-call, var-annotated"

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
    loop = OwnLoop(
        "runs/mine", model=model, optimizer=optimizer, also={"schedule": schedule},
        train="data/digits/train", global_batch=64, epochs=EPOCHS, checkpoint_every_steps=50,
    )  # fmt: skip

    for epoch, batches in loop.epochs():
        for batch in batches:
            image, label = batch["image"], batch["label"]
            loss = functional.cross_entropy(model(image / 16), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.log(loss=loss)
        schedule.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
