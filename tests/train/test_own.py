import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_script import Script, lives
from rank_pool import Ranks
from tiny_project import write_rows
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rayway import OwnLoop
from rayway.checkpoint.tensors import weights_sha256
from rayway.data.index import build_index
from rayway.data.plan import plan_order
from rayway.errors import CheckpointError, DataError, SpecError
from rayway.report.facts import read_run
from rayway.storage.runs import STOP_KEY
from rayway.train.records import NumericsError


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A folder with data."""
    write_rows(tmp_path / "train", 30)
    return tmp_path


@pytest.mark.parametrize("after", [0, 1, 2, 5, 6, 8])
def test_a_run_that_goes_on_is_the_undisturbed_one_to_the_bit(
    after: int, room: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm = tmp_path_factory.mktemp("calm")
    write_rows(calm / "train", 30)
    undisturbed = Script(calm)
    curve = undisturbed.train()

    first = Script(room)
    begun = first.train(after)
    first.loop.close()
    random.seed(99), np.random.seed(99), torch.manual_seed(99)  # the next life is another process
    second = Script(room)
    saved = after - after % 2
    assert second.loop.step == saved
    went_on = second.train()

    assert begun == curve[:after]
    assert went_on == curve[saved:]
    assert second.weights() == undisturbed.weights()
    assert lives(room).steps() == [loss for _, loss, _ in curve]
    assert lives(room).steps("lr") == [float.fromhex(rate) for *_, rate in curve]


def test_a_batch_holds_the_rows_of_the_plan(room: Path) -> None:
    index = build_index(str(room / "train"))
    plan = plan_order(index, global_batch=8, seed=5)
    everything = Script(room, global_batch=30, shuffle=False, steps=1, seed=0)
    [stored] = list(everything_of(everything))
    loop = Script(room / "..", train=str(room / "train"), seed=5).loop
    for step, batch in enumerate(loop):
        torch.testing.assert_close(batch["x"], stored[plan.ids(step)], rtol=0, atol=0)
        loop.log(loss=0.0)


def everything_of(script: Script) -> Iterator[Tensor]:
    for batch in script.loop:
        yield batch["x"]
        script.loop.log(loss=0.0)


def test_a_run_looks_like_any_other(room: Path) -> None:
    script = Script(room)
    script.train()
    facts = read_run(lives(room).folder)
    assert (facts.state, facts.step, facts.steps, facts.name) == ("FINISHED", 9, 9, "mine")
    assert [each.step for each in facts.checkpoints] == [6, 8, 9]
    assert facts.weights_sha256 == script.weights()[0]
    assert facts.starts[0]["world_size"] == 1
    assert not facts.warnings
    assert facts.clock["step_s"] > 0
    assert script.loop.finished


def test_columns_that_are_not_asked_for_are_not_read(room: Path) -> None:
    script = Script(room, columns=["y"])
    assert set(next(script.loop)) == {"y"}
    script.loop.close()


def train_epochs(script: Script, *, until: int | None = None) -> list[tuple[int, int, str]]:
    """Train in epochs of 3 steps; the rate falls, and a draw is made, after each of them."""
    seen = []
    for epoch, batches in script.loop.epochs():
        for batch in batches:
            if script.loop.step == until:
                return seen
            script.loop.log(loss=script.step(batch))
            rate = script.optimizer.param_groups[0]["lr"]
            seen.append((epoch, script.loop.step, float(rate).hex()))
        for group in script.optimizer.param_groups:
            group["lr"] *= 0.5 + random.random()
    return seen


@pytest.mark.parametrize("until", [2, 3, 4, 5, 6, 7, 10])
def test_what_is_done_after_an_epoch_belongs_to_its_last_step(
    until: int, room: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm = tmp_path_factory.mktemp("calm")
    write_rows(calm / "train", 30)
    settings = {"steps": None, "epochs": 4, "checkpoint_every_steps": 3}
    undisturbed = Script(calm, **settings)
    whole = train_epochs(undisturbed)
    assert [epoch for epoch, *_ in whole] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]

    first = Script(room, **settings)
    assert train_epochs(first, until=until) == whole[: until - 1]
    first.loop.close()
    second = Script(room, **settings)
    saved = (until - 1) // 3 * 3
    assert train_epochs(second) == whole[saved:]
    assert second.weights() == undisturbed.weights()
    assert undisturbed.loop.finished


def test_an_epoch_may_be_cut_short_by_the_number_of_steps(room: Path) -> None:
    script = Script(room, steps=None, epochs=1.7)
    assert [step for _, step, _ in train_epochs(script)] == [1, 2, 3, 4, 5]
    assert lives(room).end()["state"] == "FINISHED"


def test_a_request_to_stop_saves_the_step_and_ends_the_loop(room: Path) -> None:
    script = Script(room, checkpoint_every_steps=None, steps=10**9)
    for batch in script.loop:
        if script.loop.step == 3:
            script.loop._folder.write(STOP_KEY, {})
        script.loop.log(loss=script.step(batch))
    assert not script.loop.finished
    end = lives(room).end()
    assert end["state"] == "STOPPED"
    assert [each.step for each in read_run(lives(room).folder).checkpoints] == [end["step"]]
    again = Script(room, checkpoint_every_steps=None, steps=10**9)  # the request is not for it
    assert again.loop.step == end["step"]
    next(again.loop)
    again.loop.close()


def test_an_error_inside_with_is_recorded(room: Path) -> None:
    def fail() -> None:
        with Script(room).loop as loop:
            next(loop)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    end = lives(room).end()
    assert (end["state"], end["step"]) == ("FAILED", 0)
    assert "ZeroDivisionError" in end["reason"]
    assert lives(room).error(1)["kind"] == "user"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": None}, r"own_script.py:\d+: neither of steps and epochs"),
        ({"epochs": 2}, r"both of steps and epochs"),
        ({"global_batch": 0}, r"batch.global_batch=0"),
        ({"checkpoint_every_steps": 0}, r"checkpoint.every_steps=0"),
        ({"sed": 1}, r"no option sed. Did you mean seed\?"),
        ({"also": {"a b": nn.Linear(1, 1)}}, r"also=\{'a b': ...\}"),
    ],
)
def test_a_wrong_setting_is_refused_and_leaves_nothing(
    change: dict[str, Any], message: str, room: Path
) -> None:
    with pytest.raises(SpecError, match=message):
        Script(room, **change)
    assert not (room / "runs").exists()


def test_a_parameter_outside_the_model_is_refused(room: Path) -> None:
    model, other = nn.Linear(4, 3), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(SpecError, match="2 parameters that are not the model's"):
        Script(room, model=model, optimizer=optimizer)


def test_other_companions_than_those_saved_are_refused(room: Path) -> None:
    script = Script(room)
    script.train(3)
    script.loop.close()
    with pytest.raises(CheckpointError, match="'average', 'optimizer-groups', 'schedule'"):
        Script(room, also={})
    end = lives(room).end()
    assert (end["state"], lives(room).error(2)["kind"]) == ("FAILED", "refused")


def test_a_step_that_is_not_logged_is_refused(room: Path) -> None:
    loop = Script(room).loop
    next(loop)
    with pytest.raises(SpecError, match="step 1 was not logged"):
        next(loop)
    loop.close()


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_numbers_that_are_not_finite_end_the_run_and_are_not_saved(name: str, room: Path) -> None:
    script = Script(room, checkpoint_every_steps=1)
    script.train(1)
    script.loop.log(**{"loss": 1.0, name: torch.tensor(float("nan"))})

    def ask() -> None:
        with script.loop as loop:
            next(loop)

    with pytest.raises(NumericsError, match=r"step 2: .* nan. Lower the learning rate"):
        ask()
    assert [each.step for each in read_run(lives(room).folder).checkpoints] == [1]
    assert lives(room).end()["state"] == "FAILED"


def test_the_gradient_norm_is_recorded(room: Path) -> None:
    script = Script(room, steps=1)
    for batch in script.loop:
        script.step(batch)
        norm = nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
        script.loop.log(loss=0.5, grad_norm=norm)
    assert lives(room).steps("grad_norm") == [float(norm)]


def test_a_log_that_makes_no_sense_is_refused(room: Path) -> None:
    loop = Script(room).loop
    with pytest.raises(SpecError, match="without a batch at hand"):
        loop.log(loss=1.0)
    next(loop)
    with pytest.raises(SpecError, match=r"shape \(8,\).*loss.mean\(\)"):
        loop.log(loss=torch.zeros(8))
    loop.close()


def train_as_a_rank(root: str, breaks_at: int | None) -> dict[str, Any]:
    """Train as one of the ranks, dropout off; return what this rank saw."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    replica = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    loop = OwnLoop(
        f"{root}/runs/mine",
        model=replica,
        optimizer=optimizer,
        train=f"{root}/train",
        global_batch=8,
        steps=9,
        checkpoint_every_steps=2,
    )
    rows = []
    for batch in loop:
        loss = functional.cross_entropy(replica(batch["x"]), batch["y"])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        loop.log(loss=loss)
        rows.append(batch["x"])
        if loop.step == breaks_at:
            break
    loop.close()
    return {"rows": rows, "weights": weights_sha256(model.state_dict())}


def test_ranks_share_a_global_batch_and_one_run(
    ranks: Ranks, room: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = tmp_path_factory.mktemp("alone")
    write_rows(alone / "train", 30)
    whole = train_as_a_rank(str(alone), None)
    pair = ranks.run(train_as_a_rank, str(room), None, world_size=2)

    for step, rows in enumerate(whole["rows"]):
        assert torch.equal(torch.cat([each["rows"][step] for each in pair]), rows)
    assert pair[0]["weights"] == pair[1]["weights"] == read_run(lives(room).folder).weights_sha256
    losses = [[float.fromhex(each) for each in lives(folder).steps()] for folder in (room, alone)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert lives(room).events(1, "start")[0]["world_size"] == 2


def test_ranks_that_go_on_end_in_the_same_bits(
    ranks: Ranks, room: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm = tmp_path_factory.mktemp("calm")
    write_rows(calm / "train", 30)
    ranks.run(train_as_a_rank, str(calm), None, world_size=2)
    ranks.run(train_as_a_rank, str(room), 6, world_size=2)
    ranks.run(train_as_a_rank, str(room), None, world_size=2)
    assert lives(room).end()["weights_sha256"] == lives(calm).end()["weights_sha256"]
    assert lives(room).steps() == lives(calm).steps()


def refused_as_a_rank(root: str) -> str:
    try:
        train_as_a_rank(root, None)
    except (SpecError, DataError) as error:
        return str(error)
    return "not refused"


def test_a_refusal_on_rank_0_ends_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(refused_as_a_rank, str(tmp_path), world_size=2)
    assert "does not exist" in first
    assert "rank 0 could not begin" in second
