import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # s3_server

from rayway.checkpoint.store import CheckpointStore
from rayway.storage.runs import RunFolder
from s3_server import new_bucket, point_at, s3_server

NOW = datetime(2026, 1, 31, tzinfo=UTC)
State = dict[str, dict[str, Tensor]]


def _state(step: int, attempt: int = 1) -> State:
    """A small state that tells by its values which save it is from."""
    generator = torch.Generator().manual_seed(1000 * attempt + step)
    weight = torch.rand(4, 6, generator=generator)
    model = {"emb.weight": weight, "head.weight": weight, "scale": torch.tensor(float(step))}
    moments = torch.rand(40, 50, generator=generator)
    return {"model": model, "optimizer": {"exp_avg": moments, "step": torch.tensor(step)}}


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """An S3 server's host and port."""
    with s3_server() as address:
        yield address


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket."""
    point_at(monkeypatch, f"http://{s3_address}")
    return f"s3://{new_bucket(s3_address)}"


@pytest.fixture
def state() -> Callable[..., State]:
    return _state


@pytest.fixture
def same() -> Callable[[Any, State], bool]:
    def same(loaded: Any, expected: State) -> bool:
        return loaded.keys() == expected.keys() and all(
            loaded[stem].keys() == named.keys()
            and all(torch.equal(loaded[stem][name], tensor) for name, tensor in named.items())
            for stem, named in expected.items()
        )

    return same


@pytest.fixture
def new_run() -> Callable[..., RunFolder]:
    return lambda at: RunFolder.create(at, '{"schema": 1}', now=NOW)


@pytest.fixture(params=["local", "memory"])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, new_run: Callable[..., RunFolder]
) -> RunFolder:
    return new_run(
        str(tmp_path / "a-1") if request.param == "local" else f"memory://{tmp_path}/a-1"
    )


@pytest.fixture
def begin() -> Callable[[RunFolder], CheckpointStore]:
    """Begin a new attempt and give its store."""

    def begin(folder: RunFolder) -> CheckpointStore:
        attempt = folder.next_attempt({})
        return CheckpointStore(
            folder, attempt=attempt, is_newest_attempt=lambda: folder.is_newest(attempt)
        )

    return begin
