"""A tiny model that notes when its first step is done and when its last one begins to end.

Both jobs of the start-up benchmark train it, so both note the same moments in the same way.
"""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

STEPS = 20
ROWS, WIDTH, CLASSES = 160, 8, 4


class Net(nn.Module):
    """8 -> 32 -> 4. Rank 0 writes the time of its second and its last forward pass to files."""

    def __init__(self, stamps: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        self.stamps = Path(stamps)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, shape (rows, 4)."""
        self.calls += 1
        if os.environ.get("RANK", "0") == "0":
            if self.calls == 2:
                self._stamp("first_step")
            if self.calls == STEPS:
                self._stamp("last_step")
        scores: Tensor = self.layers(x)
        return scores

    def _stamp(self, name: str) -> None:
        part = self.stamps / f"{name}.part"
        part.write_text(repr(time.time()))
        part.rename(self.stamps / name)


def build(stamps: str) -> nn.Module:
    """Build the network. ``stamps`` is the folder for the times."""
    return Net(stamps)


def rows() -> dict[str, Tensor]:
    """Return the training data: x of shape (160, 8), y of shape (160,)."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": torch.arange(ROWS) % CLASSES}
