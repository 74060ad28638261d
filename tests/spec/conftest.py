"""A valid job file to start from, and a clean ``sys.path`` after each test."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rayway.spec.code import leave_code_root
from rayway.spec.job import BatchSpec, DataSpec, Job, ModelSpec, OptimSpec

settings.register_profile("spec", deadline=None)  # machines are shared; time is not the claim
settings.load_profile("spec")

JOB = """\
from rayway.spec.job import BatchSpec, DataSpec, Job, ModelSpec, OptimSpec, ScaleSpec

def build(layers=2):
    return layers

def loss(model, batch):
    return 0

job = Job(
    name="tiny",
    model=ModelSpec(
        build=build,
        args={"layers": 2},
    ),
    loss=loss,
    data=DataSpec(train="rows/train"),
    batch=BatchSpec(global_batch=8),
    optim=OptimSpec(
        lr=0.1,
        steps=12,
    ),
    scale=ScaleSpec(workers=2),
)
"""

WriteFile = Callable[..., Path]


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    before = list(sys.path)
    yield
    leave_code_root()
    assert sys.path == before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty but for what a test writes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder: Path) -> WriteFile:
    """Write a file below the current folder; by default the valid job file, jobs/tiny.py."""

    def write(name: str = "jobs/tiny.py", text: str = JOB) -> Path:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write


@pytest.fixture
def edit(write: WriteFile) -> Callable[[str, str], Path]:
    """Write the valid job file with one piece of text replaced by another."""

    def edit(old: str, new: str) -> Path:
        assert JOB.count(old) == 1
        return write(text=JOB.replace(old, new))

    return edit


@pytest.fixture
def job() -> Job:
    return Job(
        name="tiny",
        model=ModelSpec(build="models.tiny:build"),
        loss="models.tiny:loss",
        data=DataSpec(train="/rows/train"),
        batch=BatchSpec(global_batch=8),
        optim=OptimSpec(lr=0.1, steps=12),
    )
