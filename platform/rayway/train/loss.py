"""What a user's loss function returns."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

Batch = dict[str, Tensor]
"""Columns of a micro-batch: tensors of shape (rows, ...), on the model's device."""


class Loss(NamedTuple):
    """The loss of one micro-batch, as a sum, so that it can be added up exactly.

    The step divides the sum over the whole global batch by the weight of the whole global batch.
    A mean per micro-batch would weigh a short micro-batch as much as a long one.
    """

    sum: Tensor
    """The loss summed over the micro-batch's items (rows or tokens), shape (), in nats."""

    weight: Tensor | float
    """How many items were summed. 0 is allowed: such a micro-batch counts for nothing."""

    metrics: Mapping[str, tuple[Tensor | float, Tensor | float]] = {}
    """Name to (sum, weight), e.g. ``{"accuracy": (correct, rows)}``. Used in evaluation."""


LossFunction = Callable[[nn.Module, Batch], Loss]
