"""A small network on handwritten digits in plain PyTorch; alone or under torchrun, in seconds."""
# mypy: disable-error-code="no-untyped-call, var-annotated"

import os

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    table = pq.read_table("data/digits/train")
    digits = TensorDataset(*(torch.tensor(table[name].to_pylist()) for name in ("image", "label")))
    sampler = DistributedSampler(digits, ranks, rank, drop_last=True)
    loader = DataLoader(digits, batch_size=64 // ranks, sampler=sampler, drop_last=True)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for image, label in loader:
            loss = functional.cross_entropy(model(image / 16), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch}, "digits.pt")

    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
