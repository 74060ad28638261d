"""The digits classifier: shapes, size, independence of samples, and a loss that is a sum."""

import torch
from torch import Tensor

from models.resnet import build, loss


def digits(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "image": torch.randint(0, 17, (rows, 64), generator=generator, dtype=torch.uint8),
        "label": torch.randint(0, 10, (rows,), generator=generator),
    }


def test_the_default_model_has_the_size_its_docstring_says() -> None:
    count = sum(weight.numel() for weight in build().parameters())
    assert build.__doc__ is not None
    assert f"{count:,} parameters" in build.__doc__


def test_uint8_images_give_one_score_a_class() -> None:
    scores = build(channels=(8, 16, 16), classes=7)(digits(5)["image"])
    assert scores.shape == (5, 7)
    assert scores.dtype == torch.float32


def test_a_sample_does_not_see_its_batch() -> None:
    model = build().train()
    image = digits(6)["image"]
    torch.testing.assert_close(model(image)[2:3], model(image[2:3]))


def test_loss_and_metrics_are_sums_over_rows() -> None:
    model, batch = build().double(), digits(10)
    whole = loss(model, batch)
    parts = [
        loss(model, {k: v[rows] for k, v in batch.items()}) for rows in (slice(3), slice(3, 10))
    ]
    torch.testing.assert_close(parts[0].sum + parts[1].sum, whole.sum)
    assert parts[0].weight + parts[1].weight == whole.weight == 10
    correct, rows = whole.metrics["accuracy"]
    assert sum(int(part.metrics["accuracy"][0]) for part in parts) == int(correct)
    assert rows == 10


def test_every_weight_gets_a_gradient() -> None:
    model = build()
    loss(model, digits(8)).sum.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


def test_the_same_seed_gives_the_same_weights() -> None:
    torch.manual_seed(3)
    one = build().state_dict()
    torch.manual_seed(3)
    other = build().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
