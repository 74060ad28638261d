"""A small residual network for 8 x 8 grey images, and its loss."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from rayway import Loss

IMAGE_SIDE = 8
BRIGHTEST = 16  # grey levels go from 0 to this


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut; ``stride=2`` halves both sides of the image."""

    def __init__(self, channels_in: int, channels: int, *, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        # Group norm, not batch norm: a sample's output must not depend on its micro-batch.
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map (rows, channels_in, side, side) to (rows, channels, side / stride, the same)."""
        hidden = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class ResNet(nn.Module):
    """A stem, one residual block a stage, the mean over the image and a linear classifier."""

    def __init__(self, channels: Sequence[int], *, classes: int, groups: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels[0], 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups, channels[0])
        self.stages = nn.Sequential(
            *(
                ResidualBlock(channels[max(i - 1, 0)], width, stride=2 if i else 1, groups=groups)
                for i, width in enumerate(channels)
            )
        )
        self.classify = nn.Linear(channels[-1], classes)

    def forward(self, image: Tensor) -> Tensor:
        """Map uint8 grey levels of shape (rows, 64) to scores of shape (rows, classes)."""
        pixels = image.to(self.classify.weight.dtype).view(-1, 1, IMAGE_SIDE, IMAGE_SIDE)
        hidden = functional.relu(self.norm(self.stem(pixels / BRIGHTEST)))
        scores: Tensor = self.classify(self.stages(hidden).mean(dim=(2, 3)))
        return scores


def build(*, channels: Sequence[int] = (32, 64), classes: int = 10, groups: int = 8) -> ResNet:
    """Return an untrained classifier; 77,162 parameters as it stands.

    Args:
        channels: Channels of each stage; each stage after the first halves the image's sides.
        classes: Kinds of images to tell apart.
        groups: Groups of channels that are normalised together; must divide each of ``channels``.
    """
    return ResNet(channels, classes=classes, groups=groups)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Sum the cross-entropy over the rows of ``image`` (rows, 64) and ``label`` (rows,)."""
    image, label = batch["image"], batch["label"]
    scores = model(image)
    correct = (scores.detach().argmax(dim=1) == label).sum()
    return Loss(
        sum=functional.cross_entropy(scores.float(), label, reduction="sum"),
        weight=len(label),
        metrics={"accuracy": (correct, len(label))},
    )
