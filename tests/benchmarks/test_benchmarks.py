"""Each benchmark runs small, and prints one JSON object that says what was measured and where."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lines_of_code import code_lines
from measure import spread

REPOSITORY = Path(__file__).parent.parent.parent
BENCHMARKS = REPOSITORY / "benchmarks"
COUNTERPARTS = BENCHMARKS / "counterparts"


def run(*words: str, folder: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def result(name: str, *words: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(str(BENCHMARKS / f"{name}.py"), *words, folder=folder))
    assert found["benchmark"] == name
    assert found["method"]
    assert found["machine"]["cpus"] > 0
    assert found["versions"]["rayway"]
    return found


def is_spread(figure: dict[str, Any], *, repeats: int) -> bool:
    return figure["min"] <= figure["median"] <= figure["max"] and len(figure["repeats"]) == repeats


def test_code_lines_are_those_a_reader_would_count() -> None:
    source = '"""Title.\n\nText.\n"""\nimport a\nfrom b import (\n    c,\n    d,\n)\n\n# why\n'
    source += 'def f():\n    """Doc."""\n    return c(\n\n        # here\n        d\n    )\n'
    assert code_lines(source) == 4


def test_a_figure_is_the_median_with_its_range() -> None:
    assert spread([3.0, 1.0, 2.0]) == {
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "repeats": [3.0, 1.0, 2.0],
    }


def test_lines_of_code_are_fewer_with_rayway(tmp_path: Path) -> None:
    lines = result("lines_of_code", folder=tmp_path)["lines"]
    assert 0 < lines["rayway"] < min(lines["ray_train"], lines["bare"])


@pytest.mark.slow
def test_the_cost_of_a_logged_step_is_measured_alone_and_in_a_group(tmp_path: Path) -> None:
    found = result("log_cost", "--quick", folder=tmp_path)
    for side in ("alone", "group"):
        assert is_spread(found[side]["added_cpu_ms"], repeats=2)
        assert found[side]["bare_cpu_ms"]["min"] > 0


@pytest.mark.slow
def test_the_time_of_a_step_is_measured_on_one_and_two_workers(tmp_path: Path) -> None:
    found = result("step_time", "--quick", folder=tmp_path)
    for name in ("gpt_x1", "gpt_x2", "resnet_x1", "resnet_x2"):
        assert is_spread(found[name]["wall_ratio"], repeats=2)
        assert is_spread(found[name]["cpu_ratio"], repeats=2)


@pytest.mark.ray
@pytest.mark.slow
def test_start_up_is_measured_beside_plain_ray_train(tmp_path: Path) -> None:
    found = result("start_up", "--quick", folder=tmp_path)
    for side in ("rayway", "ray_train"):
        assert found[side]["first_step_wall_s"]["median"] > 0
        assert found[side]["first_step_cpu_s"]["median"] > 0
        assert found[side]["exit_wall_s"]["median"] > 0


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """A folder for a Ray of its own, with a path short enough for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="rt-", ignore_cleanup_errors=True) as folder:
        yield folder


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_bare_counterpart_trains_and_goes_on(tmp_path: Path) -> None:
    script = str(COUNTERPARTS / "bare_digits.py")
    for epochs in ("5", "6"):
        words = ("-m", "torch.distributed.run", "--nproc-per-node", "2", script, "out")
        run(*words, folder=tmp_path, EPOCHS=epochs, PYTHONPATH=str(REPOSITORY / "jobs"))
    steps = [each["step"] for each in numbers(tmp_path / "out") if "loss" in each]
    assert steps == list(range(1, len(steps) + 1))
    accuracies = [each["accuracy"] for each in numbers(tmp_path / "out") if "accuracy" in each]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.9


@pytest.mark.ray
@pytest.mark.slow
def test_the_ray_train_counterpart_trains_and_goes_on(tmp_path: Path, ray_folder: str) -> None:
    script = str(COUNTERPARTS / "ray_train_digits.py")
    for epochs in ("5", "6"):
        run(
            script,
            "out",
            folder=tmp_path,
            EPOCHS=epochs,
            PYTHONPATH=str(REPOSITORY / "jobs"),
            RAY_TMPDIR=ray_folder,
        )
    steps = [each["step"] for each in numbers(tmp_path / "out") if "loss" in each]
    assert steps == list(range(1, len(steps) + 1))


def test_the_index_at_scale_is_measured(tmp_path: Path) -> None:
    found = result("index_scale", "--shards", "1000", folder=tmp_path)
    assert found["row_groups"] == 10_000
    assert found["index_bytes"] < 100_000
    assert found["load_s"] > 0
    assert found["resume_at_90_percent_first_64_units_s_of_8_ranks"] > 0
