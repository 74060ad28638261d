"""A script with a loop of its own, small, for the tests of ``OwnLoop``."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_project import Lives
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from rayway import OwnLoop
from rayway.checkpoint.tensors import weights_sha256
from rayway.storage.runs import RunFolder


def start(desk: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python to its end."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=desk,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


class Net(nn.Module):
    """Draws from torch, numpy and Python in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + 0.1 * (random.random() + np.random.random()))


class Script:
    """A script of the user's: all it makes before its loop."""

    def __init__(self, root: Path, **changes: Any) -> None:
        torch.manual_seed(1)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 7], gamma=0.5)
        self.average = AveragedModel(self.model)
        settings: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "train": str(root / "train"),
            "global_batch": 8,
            "steps": 9,
            "checkpoint_every_steps": 2,
            "also": {"schedule": self.schedule, "average": self.average},
        }
        self.loop = OwnLoop(str(root / "runs" / "mine"), **{**settings, **changes})

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = functional.cross_entropy(self.model(batch["x"]), batch["y"])
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.average.update_parameters(self.model)
        return loss.detach()

    def train(self, steps: int = 1000) -> list[tuple[str, ...]]:
        """Train so many steps; return in hex what each batch held, its loss and its rate."""
        seen = []
        for batch in self.loop:
            if len(seen) == steps:
                break
            rate = self.optimizer.param_groups[0]["lr"]
            loss = self.step(batch)
            self.schedule.step()
            self.loop.log(loss=loss)
            x = batch["x"].numpy().tobytes().hex()
            seen.append((x, float(loss).hex(), float(rate).hex()))
        return seen

    def weights(self) -> tuple[str, str]:
        return weights_sha256(self.model.state_dict()), weights_sha256(self.average.state_dict())


def lives(room: Path) -> Lives:
    return Lives(RunFolder.open(str(room / "runs" / "mine")))


SCRIPT = """
import os
import sys
import torch
from rayway import OwnLoop

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loop = OwnLoop(
    "runs/mine", model=model, optimizer=optimizer, train="train", global_batch=8, steps=20
)
for batch in loop:
    loop.log(loss=1.0)
    if loop.step == 4:
        {what}
"""
