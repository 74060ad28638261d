"""A checkpoint of any number of ranks goes on on any other, under DDP or FSDP2, to the bit."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from rayway.checkpoint import catalog
from rayway.checkpoint.snapshot import HostBuffers
from rayway.checkpoint.store import CheckpointStore
from rayway.checkpoint.tensors import tensor_sha256, weights_sha256
from rayway.errors import CheckpointError
from rayway.storage.runs import RunFolder
from rayway.train.state import TrainState

Shape = tuple[str, int]
SHAPES: list[Shape] = [("plain", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3)]


class Net(nn.Module):
    """Tied weights, a frozen layer, running statistics, bf16, and sizes no rank count divides."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.low = nn.Linear(width, width, dtype=torch.bfloat16)
        self.one = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.embed(x))
        hidden = hidden + self.low(hidden.bfloat16()).float() + self.frozen(hidden)
        out: Tensor = self.head(hidden * self.one)
        return out


def new_state(strategy: str, *, seed: int, width: int = 5) -> TrainState:
    torch.manual_seed(seed)
    model: nn.Module = Net(width)
    replica = model
    if strategy == "ddp":
        replica = DistributedDataParallel(model)
    if strategy == "fsdp":
        fully_shard(model.low)
        fully_shard(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return TrainState(model=model, replica=replica, optimizer=AdamW(trained, lr=0.05))


def train_on(state: TrainState, steps: int) -> None:
    for _ in range(steps):
        x = (torch.arange(6) + state.step + dist.get_rank()) % 7
        torch.autograd.backward(state.replica(x).square().mean())
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1


def full(state: TrainState) -> dict[str, dict[str, Tensor]]:
    return {
        stem: {
            name: value.full_tensor() if isinstance(value, DTensor) else value.detach()
            for name, value in part.items()
        }
        for stem, part in state.tensors().items()
    }


def digests(state: TrainState) -> dict[str, str]:
    return {
        f"{stem}/{name}": f"{value.dtype} {tensor_sha256(value)}"
        for stem, part in full(state).items()
        for name, value in part.items()
    }


def store_of(url: str, attempt: int) -> CheckpointStore:
    run = RunFolder.open(url)
    return CheckpointStore(
        run,
        attempt=attempt,
        is_newest_attempt=lambda: run.is_newest(attempt),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        patience_s=30,
    )


def save(store: CheckpointStore, state: TrainState) -> str | None:
    tensors = state.tensors()
    trained = state.changed_by_updates(tensors)
    snapshot = HostBuffers().begin(
        tensors,
        constant=trained,
        replicated=trained,
        rank=store.rank,
        world_size=store.world_size,
    )
    committed = store.save(state.step, snapshot.finish(), {})
    weights = weights_sha256(full(state)["model"])
    assert committed is None or committed.weights_sha256 == weights
    dist.barrier()
    return committed.weights_sha256 if committed else None


def train_and_save(url: str, attempt: int, strategy: str) -> Any:
    state = new_state(strategy, seed=3)
    train_on(state, 2)
    return save(store_of(url, attempt), state), digests(state)


def load(url: str, attempt: int, strategy: str) -> TrainState:
    state = new_state(strategy, seed=4)
    loaded = store_of(url, attempt).load(2, like=state.like)
    state.restore(loaded.tensors, loaded.step)
    return state


def take_up_and_save(url: str, attempt: int, strategy: str) -> Any:
    """Load, save again as it is, and show that it trains on."""
    state = load(url, attempt, strategy)
    found = digests(state)
    weights = save(store_of(url, attempt), state)
    assert state.model.head.weight is state.model.embed.weight
    train_on(state, 1)
    assert digests(state) != found
    return weights, found


def train_on_from(url: str, attempt: int, strategy: str) -> dict[str, str]:
    state = load(url, attempt, strategy)
    train_on(state, 3)
    return digests(state)


def train_through(url: str, attempt: int, strategy: str) -> dict[str, str]:
    state = new_state(strategy, seed=3)
    train_on(state, 2)
    save(store_of(url, attempt), state)
    train_on(state, 3)
    return digests(state)


def load_into_another(url: str, attempt: int) -> str:
    state = new_state("fsdp", seed=4, width=6)
    loaded = store_of(url, attempt).load(2, like=state.like)
    try:
        state.restore(loaded.tensors, loaded.step)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(str(tmp_path / "a-1"), '{"schema": 1}', now=datetime.now(UTC))


@pytest.mark.parametrize("saved", SHAPES, ids=lambda shape: f"{shape[0]}{shape[1]}")
def test_a_state_is_the_same_on_any_shape_and_back(
    saved: Shape, run: RunFolder, ranks: Ranks
) -> None:
    strategy, world_size = saved
    attempt = run.next_attempt({})
    answers = ranks.run(train_and_save, run.url, attempt, strategy, world_size=world_size)
    weights, wanted = answers[0]
    for other, other_size in SHAPES:
        attempt = run.next_attempt({})
        answers = ranks.run(take_up_and_save, run.url, attempt, other, world_size=other_size)
        assert answers[0][0] == weights  # saved again from that shape
        for _, found in answers:
            assert found == wanted
    for entry in catalog.find(run):
        catalog.verify(run, entry)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda shape: f"{shape[0]}{shape[1]}")
def test_training_goes_on_to_the_same_bits(shape: Shape, run: RunFolder, ranks: Ranks) -> None:
    strategy, world_size = shape
    attempt = run.next_attempt({})
    through = ranks.run(train_through, run.url, attempt, strategy, world_size=world_size)
    resumed = ranks.run(train_on_from, run.url, attempt, strategy, world_size=world_size)
    parameters = [name for name in through[0] if "running" not in name]
    for one, other in zip(through, resumed, strict=True):
        assert {name: one[name] for name in parameters} == {n: other[n] for n in parameters}


def test_sharded_ranks_write_their_own_part_and_no_more(run: RunFolder, ranks: Ranks) -> None:
    attempt = run.next_attempt({})
    ranks.run(train_and_save, run.url, attempt, "fsdp", world_size=3)
    [found] = catalog.find(run)
    manifest = catalog.verify(run, found)
    embed = manifest.tensors["model/embed.weight"]
    assert [(p.file[:10], p.offsets, p.shape) for p in embed.pieces] == [
        ("rank-00000", (0, 0), (3, 5)),
        ("rank-00001", (3, 0), (3, 5)),
        ("rank-00002", (6, 0), (1, 5)),
    ]
    assert manifest.aliases.keys() == {"model/head.weight"}
    assert len(manifest.tensors["optimizer/low.weight/exp_avg"].pieces) == 3


def test_replicas_share_the_writing(run: RunFolder, ranks: Ranks) -> None:
    """Running statistics may differ between ranks: those of rank 0 count."""
    ranks.run(train_and_save, run.url, run.next_attempt({}), "ddp", world_size=3)
    [found] = catalog.find(run)
    manifest = catalog.verify(run, found)
    writers = {name: e.pieces[0].file[:10] for name, e in manifest.tensors.items()}
    assert set(writers.values()) == {"rank-00000", "rank-00001", "rank-00002"}
    assert {w for name, w in writers.items() if "running" in name or "frozen" in name} == {
        "rank-00000"
    }
    assert all(len(entry.pieces) == 1 for entry in manifest.tensors.values())


def test_another_model_is_refused_by_global_shapes(run: RunFolder, ranks: Ranks) -> None:
    ranks.run(train_and_save, run.url, run.next_attempt({}), "fsdp", world_size=2)
    for answer in ranks.run(load_into_another, run.url, 1, world_size=2):
        assert "of another shape (checkpoint, job): embed.weight (7, 5), (7, 6)" in answer
