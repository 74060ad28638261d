"""Each row counts once, on any number of ranks and however it is cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rank_pool import Ranks
from torch import Tensor, nn

from rayway.data.feed import Feed
from rayway.data.index import build_index
from rayway.data.plan import plan_order
from rayway.errors import SpecError
from rayway.train.evaluate import evaluate
from rayway.train.loss import Batch, Loss
from rayway.train.ranks import grouped
from rayway.train.step import StepSettings

CPU = torch.device("cpu")


class Threshold(nn.Module):
    """Says 1 where x is over a buffer, and draws if asked to."""

    def __init__(self, *, at: float = 0.5, noise: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("at", torch.tensor(at))
        self.noise = noise
        self.modes: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.modes.add(self.training)
        assert isinstance(self.at, Tensor)
        out: Tensor = x + self.noise * torch.rand(len(x)) > self.at
        return out


def mistakes(model: nn.Module, batch: Batch) -> Loss:
    """The loss is weighed by w, the accuracy is over rows."""
    right = model(batch["x"]) == batch["y"]
    loss = ((~right).float() * batch["w"] + batch["x"]).sum()
    return Loss(sum=loss, weight=batch["w"].sum(), metrics={"accuracy": (right.sum(), len(right))})


def write(folder: Path, rows: int, *, wrong: tuple[int, ...] = (0,)) -> str:
    """Write rows of which ``wrong`` ones have a label that the model does not say."""
    folder.mkdir()
    x = np.arange(rows) % 2 * 1.0
    y = (x > 0.5) ^ np.isin(np.arange(rows), wrong)
    table = pa.table({"x": x.astype("float32"), "y": y, "w": np.arange(rows) % 4 + 0.5})
    for shard in range(2):
        pq.write_table(
            table.slice(shard * rows // 2, (shard + 1) * rows // 2 - shard * rows // 2),
            folder / f"part-{shard}.parquet",
            row_group_size=2,
        )
    return str(folder)


def evaluate_here(
    url: str, micro_batch: int, *, at: float = 0.5, noise: float = 0.0, step: int = 3
) -> tuple[dict[str, float], int]:
    world_size, rank = 1, 0
    if grouped():
        world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        at += rank  # the buffers that ranks have of their own are not the ones to look with
    index = build_index(url)
    plan = plan_order(
        index, global_batch=micro_batch * world_size, seed=0, shuffle=False, cover="all"
    )
    feed = Feed(
        plan,
        rank=rank,
        world_size=world_size,
        micro_batch=micro_batch,
        stop_step=plan.steps_per_epoch,
    )
    settings = StepSettings(loss_function=mistakes, seed=0, max_norm=None)
    return evaluate(Threshold(at=at, noise=noise), feed, settings, step=step, device=CPU)


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_five_rows_with_one_mistake_are_five_rows_with_one_mistake(
    world_size: int, micro_batch: int, tmp_path: Path, ranks: Ranks
) -> None:
    url = write(tmp_path / "rows", 5)
    for metrics, rows in ranks.run(evaluate_here, url, micro_batch, world_size=world_size):
        assert rows == 5
        assert metrics["accuracy"] == 0.8
        assert list(metrics) == ["loss", "accuracy"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_weighed_mean_does_not_depend_on_the_cut(
    world_size: int, tmp_path: Path, ranks: Ranks
) -> None:
    wrong = (0, 3, 4, 11, 16)
    url = write(tmp_path / "rows", 17, wrong=wrong)
    w, x = np.arange(17) % 4 + 0.5, np.arange(17) % 2
    loss = (w[list(wrong)].sum() + x.sum()) / w.sum()
    for micro_batch in (1, 3, 4):
        for metrics, rows in ranks.run(evaluate_here, url, micro_batch, world_size=world_size):
            assert rows == 17
            assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
            assert metrics["accuracy"] == 12 / 17


def test_fewer_rows_than_ranks_count_once(tmp_path: Path, ranks: Ranks) -> None:
    url = write(tmp_path / "rows", 2)
    for metrics, rows in ranks.run(evaluate_here, url, 1, world_size=3):
        assert (rows, metrics["accuracy"]) == (2, 0.5)


def test_the_same_step_draws_the_same_and_another_one_differently(tmp_path: Path) -> None:
    url = write(tmp_path / "rows", 64)
    first, again, other = (
        evaluate_here(url, 8, at=0.6, noise=1.0, step=step)[0]["accuracy"] for step in (3, 3, 4)
    )
    assert first == again != other


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_in_eval_mode_and_then_as_it_was(training: bool, tmp_path: Path) -> None:
    model = Threshold().train(training)
    evaluate(model, feed_of(tmp_path), settings_with(mistakes), step=0, device=CPU)
    assert model.modes == {False}
    assert model.training is training


def test_an_error_leaves_the_model_as_it_was_and_closes_the_feed(tmp_path: Path) -> None:
    def fail(model: nn.Module, batch: Batch) -> Loss:
        raise KeyError("label")

    model, feed = Threshold(), feed_of(tmp_path)
    with pytest.raises(KeyError, match="label"):
        evaluate(model, feed, settings_with(fail), step=0, device=CPU)
    assert model.training
    with pytest.raises(ValueError, match="this feed is closed"):
        next(feed)


def test_no_gradient_is_kept(tmp_path: Path) -> None:
    grads = []

    def watched(model: nn.Module, batch: Batch) -> Loss:
        grads.append(torch.is_grad_enabled())
        return mistakes(model, batch)

    evaluate(Threshold(), feed_of(tmp_path), settings_with(watched), step=0, device=CPU)
    assert grads
    assert not any(grads)


def test_a_mean_over_no_weight_is_no_number(tmp_path: Path) -> None:
    def weightless(model: nn.Module, batch: Batch) -> Loss:
        return mistakes(model, batch)._replace(weight=0)

    feed = feed_of(tmp_path)
    metrics, rows = evaluate(Threshold(), feed, settings_with(weightless), step=0, device=CPU)
    assert np.isnan(metrics["loss"])
    assert (metrics["accuracy"], rows) == (0.8, 5)


def test_what_is_no_loss_is_refused(tmp_path: Path) -> None:
    def mean(model: nn.Module, batch: Batch) -> Any:
        return batch["x"].mean()

    with pytest.raises(SpecError, match="returned Tensor"):
        evaluate(Threshold(), feed_of(tmp_path), settings_with(mean), step=0, device=CPU)


def settings_with(loss_function: Any) -> StepSettings:
    return StepSettings(loss_function=loss_function, seed=0, max_norm=None)


def feed_of(folder: Path) -> Feed:
    index = build_index(write(folder / "rows", 5))
    plan = plan_order(index, global_batch=2, seed=0, shuffle=False, cover="all")
    return Feed(plan, rank=0, world_size=1, micro_batch=2, stop_step=plan.steps_per_epoch)
