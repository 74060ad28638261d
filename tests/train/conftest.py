"""Ranks and small projects for the tests of this room."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # rank_pool, tiny_project

from rank_pool import Ranks
from tiny_project import Project

from rayway.spec.code import leave_code_root

settings.register_profile("train", deadline=None)  # machines are shared; time is not the claim
settings.load_profile("train")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from a second thread, which only waits for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Processes that form a gloo group for each call."""
    pool = Ranks(tmp_path_factory.mktemp("r"))
    yield pool
    pool.close()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A folder with user code and data; this process is as before afterwards."""
    yield Project(tmp_path)
    leave_code_root()
