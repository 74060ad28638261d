"""The byte-level GPT: causality, tied weights, size, and a loss that is a sum."""

import math

import pytest
import torch
from torch import Tensor

from models.gpt import build, loss


def small(**changes: float) -> torch.nn.Module:
    torch.manual_seed(1)
    return build(**{"seq_len": 16, "width": 32, "layers": 2, "heads": 4} | changes)


def text(rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (rows, length), generator=generator, dtype=torch.uint8)


def test_the_default_model_has_the_size_its_docstring_says() -> None:
    count = sum(weight.numel() for weight in build().parameters())
    assert build.__doc__ is not None
    assert f"{count:,} parameters" in build.__doc__


def test_embedding_and_head_share_their_storage() -> None:
    model = build()
    assert model.head.weight is model.embed.weight
    state = model.state_dict()
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()


@pytest.mark.parametrize("length", [1, 7, 16])
def test_uint8_text_gives_a_score_for_each_next_byte(length: int) -> None:
    assert small()(text(3, length)).shape == (3, length, 256)


@pytest.mark.parametrize("changed", [0, 5, 15])
def test_a_byte_changes_no_score_before_it_and_those_from_it_on(changed: int) -> None:
    model, before = small(), text(2, 16)
    after = before.clone()
    after[:, changed] ^= 1
    difference = (model(before) - model(after)).abs().amax(dim=(0, 2))
    assert (difference[:changed] == 0).all()
    assert (difference[changed:] > 0).all()


def test_an_untrained_model_knows_nothing() -> None:
    report = loss(build(), {"text": text(8, 129)})
    assert float(report.sum.detach()) / report.weight == pytest.approx(math.log(256), abs=0.1)


def test_loss_and_metrics_are_sums_over_rows() -> None:
    model, rows = small().double(), text(6, 17)
    whole = loss(model, {"text": rows})
    parts = [loss(model, {"text": rows[:2]}), loss(model, {"text": rows[2:]})]
    torch.testing.assert_close(parts[0].sum + parts[1].sum, whole.sum)
    assert parts[0].weight + parts[1].weight == whole.weight == 6 * 16
    for name, (total, weight) in whole.metrics.items():
        assert weight == 6 * 16
        assert not total.requires_grad
        assert sum(float(p.metrics[name][0]) for p in parts) == pytest.approx(float(total))


def test_bits_per_byte_is_the_loss_in_another_unit() -> None:
    report = loss(small(), {"text": text(4, 17)})
    bits, _ = report.metrics["bits_per_byte"]
    assert float(bits) * math.log(2) == pytest.approx(float(report.sum.detach()))


def test_every_weight_gets_a_gradient() -> None:
    model = small()
    loss(model, {"text": text(4, 17)}).sum.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


def test_dropout_draws_in_training_only_and_is_off_by_default() -> None:
    row = text(1, 16)
    assert torch.equal((plain := small().train())(row), plain(row))
    dropping = small(dropout=0.5)
    assert not torch.equal(dropping.train()(row), dropping(row))
    assert torch.equal(dropping.eval()(row), dropping(row))


def test_text_longer_than_the_model_looks_back_is_refused() -> None:
    with pytest.raises(ValueError, match=r"17 bytes .* seq_len=16\. Use seq_len=17"):
        small()(text(1, 17))
