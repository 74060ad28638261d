"""What a loss function returns."""

import torch

from rayway.train.loss import Loss


def test_metrics_are_optional_and_not_shared_by_writing() -> None:
    loss = Loss(torch.ones(()), 3)
    assert loss.metrics == {}
    assert loss == Loss(sum=torch.ones(()), weight=3, metrics={})
