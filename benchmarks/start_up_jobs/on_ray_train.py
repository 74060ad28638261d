"""The same job as a script for plain Ray Train, as Ray's documentation writes one.

Start it with ``python on_ray_train.py STAMPS STORAGE``.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from stamped import STEPS, build, rows  # type: ignore[import-not-found]  # beside this file
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def train_loop(config: dict[str, Any]) -> None:
    """Train on one worker."""
    model = train.torch.prepare_model(build(config["stamps"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = rows()
    loader = train.torch.prepare_data_loader(
        DataLoader(TensorDataset(data["x"], data["y"]), batch_size=4, shuffle=True)
    )
    step = 0
    while step < STEPS:
        for x, y in loader:
            torch.autograd.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == STEPS:
                break
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if train.get_context().get_world_rank() == 0:
            torch.save(model.state_dict(), Path(folder, "model.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        train.report({"step": step}, checkpoint=checkpoint)


if __name__ == "__main__":
    ray.init()
    TorchTrainer(
        train_loop,
        train_loop_config={"stamps": sys.argv[1]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[2], name="start-up"),
    ).fit()
