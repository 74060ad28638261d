"""Fixtures for commands on real Ray."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from bench import JOBS, Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A fresh folder with the tiny job."""
    shutil.copy(JOBS / "tiny.py", tmp_path / "tiny.py")
    return Bench(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The steps and the weights of the tiny job, run by 2 workers without any fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copy(JOBS / "tiny.py", folder / "tiny.py")
    bench = Bench(folder)
    done = bench.rayway("run", "tiny.py", "--run-id", "calm")
    assert done.returncode == 0, done.stderr
    return {"steps": bench.metrics("calm"), "facts": bench.show("calm"), "done": done}
