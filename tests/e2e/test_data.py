"""Whole runs on data that is transformed, mixed, incomplete or of differing length."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bench import Bench, curve, wait_until

from rayway.launch.preflight import available_cpus

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HALF = ("--set", "scale.cpus_per_worker=0.5")  # leaves a CPU to data tasks on any machine of two
JITTER = ("--set", "data.transform=tiny:jitter")


def engine(name: str) -> tuple[str, str]:
    return ("--set", f"scale.data_engine={name}")


@pytest.fixture(scope="module")
def by_threads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The steps and the result of the transformed job where each worker reads for itself."""
    bench = Bench(tmp_path_factory.mktemp("threads"))
    (bench.folder / "tiny.py").write_text((Path(__file__).parent / "jobs/tiny.py").read_text())
    done = bench.rayway("run", "tiny.py", "--run-id", "r", *HALF, *JITTER, *engine("local"))
    assert done.returncode == 0, done.stderr
    return {"steps": bench.metrics("r"), "facts": bench.show("r"), "done": done}


def assert_same_numbers(bench: Bench, expected: dict[str, Any]) -> None:
    assert curve(bench.metrics("r")) == curve(expected["steps"])
    facts = bench.show("r")
    assert facts["weights_sha256"] == expected["facts"]["weights_sha256"]
    assert facts["metrics"] == expected["facts"]["metrics"]


def test_ray_data_gives_the_numbers_that_threads_give(
    bench: Bench, by_threads: dict[str, Any]
) -> None:
    done = bench.rayway("run", "tiny.py", "--run-id", "r", *HALF, *JITTER)
    assert done.returncode == 0, done.stderr
    assert "data.transform" in done.stderr  # why this engine was chosen
    assert "Ray Data" in done.stderr
    assert_same_numbers(bench, by_threads)


def test_an_engine_may_take_the_others_place_at_a_resume(
    bench: Bench, by_threads: dict[str, Any]
) -> None:
    slow = ("--set", "model.args.sleep_s=0.1")
    driver = bench.start("run", "tiny.py", "--run-id", "r", *HALF, *JITTER, *slow)
    wait_until(lambda: bench.step("r") >= 7, timeout_s=90)
    driver.terminate()
    assert driver.wait(timeout=60) == 130, (bench.folder / "stderr").read_text()
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})  # a machine on which no CPU is left to Ray Data
    try:
        done = bench.rayway("resume", "r")
    finally:
        os.sched_setaffinity(0, everywhere)
    assert done.returncode == 0, done.stderr
    assert "the 2 workers have all 1 CPUs" in done.stderr
    assert_same_numbers(bench, by_threads)


def test_ray_data_without_a_cpu_is_refused_with_the_numbers(bench: Bench) -> None:
    all_of_them = f"scale.cpus_per_worker={available_cpus() / 2:g}"
    done = bench.rayway("run", "tiny.py", *JITTER, *engine("ray"), "--set", all_of_them)
    assert done.returncode == 2
    assert "data_engine" in done.stderr
    assert "CPU" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("reader", ["local", "ray"])
def test_a_transform_that_fails_names_shard_and_row(bench: Bench, reader: str) -> None:
    done = bench.rayway(
        "run", "tiny.py", "--run-id", "r", *HALF, *engine(reader),
        "--set", "data.transform=tiny:stumbles", "--set", "scale.max_attempts=1",
    )  # fmt: skip
    assert done.returncode == 4
    assert "no such label" in done.stderr
    assert "failed on row 6 of" in done.stderr  # 61 = 2 shards of 24 + a row group of 7 + 6
    assert "part-2.parquet (row group 1)" in done.stderr
    assert "tiny.py" in done.stderr


def test_a_mixture_gives_each_place_its_share_of_each_batch(bench: Bench) -> None:
    done = bench.rayway(
        "run", "tiny.py", "--run-id", "r", "--workers", "0",
        "--set", "data.train={data/train: 3, data/validation: 1}", "--set", "optim.steps=30",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = bench.metrics("r")
    for each in steps:
        assert sorted(sample >> 48 for sample in each["ids"]) == [0] * 6 + [1] * 2
    first = [sample for each in steps[:20] for sample in each["ids"] if sample >> 48 == 0]
    assert sorted(first) == list(range(120))
    second = [sample for each in steps[:18] for sample in each["ids"] if sample >> 48 == 1]
    assert len(set(second)) == 36
    halved = bench.rayway(
        "run", "tiny.py", "--run-id", "two", "--workers", "2",
        "--set", "data.train={data/train: 3, data/validation: 1}", "--set", "optim.steps=30",
    )  # fmt: skip
    assert halved.returncode == 0, halved.stderr
    assert [sorted(each["ids"]) for each in bench.metrics("two")] == [
        sorted(each["ids"]) for each in steps
    ]


def write_incomplete(folder: Path) -> None:
    """Write 40 rows, 3 of them without a value somewhere."""
    folder.mkdir(parents=True)
    x = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")
    x[7, 3], x[21, 0] = np.nan, np.inf
    y = [None if i == 33 else i % 4 for i in range(40)]
    table = pa.table(
        {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 8), "y": pa.array(y)}
    )
    pq.write_table(table, folder / "part-0.parquet", row_group_size=10)


def test_rows_with_invalid_values_end_the_run_or_are_left_out(bench: Bench) -> None:
    write_incomplete(bench.folder / "data/holes")
    words = ["run", "tiny.py", "--workers", "0", "--set", "data.train=data/holes",
             "--set", "optim.steps=5", "--set", "data.validation=null", "--run-id"]  # fmt: skip
    refused = bench.rayway(*words, "strict")
    assert refused.returncode in (2, 4)
    assert "part-0.parquet" in refused.stderr
    assert "data.invalid" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = bench.rayway(*words, "skip", "--set", "data.invalid=skip")
    assert done.returncode == 0, done.stderr
    used = [sample for each in bench.metrics("skip") for sample in each["ids"]]
    assert sorted(used) == sorted(set(range(40)) - {7, 21, 33})
    assert "rows have invalid values and were left out" in done.stderr
    assert "3 rows with invalid values" in bench.rayway("show", "skip").stdout
    filled = bench.rayway(*words, "fill", "--set", "data.invalid=fill")
    assert filled.returncode == 0, filled.stderr
    assert sum(len(each["ids"]) for each in bench.metrics("fill")) == 40


def test_lists_of_differing_length_are_padded_and_masked(bench: Bench) -> None:
    folder = bench.folder / "data/ragged"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    lists = [rng.normal(size=n).astype("float32") for n in rng.integers(0, 9, 40)]
    table = pa.table({"x": pa.array(lists, pa.list_(pa.float32())), "y": np.arange(40) % 4})
    pq.write_table(table, folder / "part-0.parquet", row_group_size=10)
    words = ["run", "tiny.py", "--workers", "0", "--set", "data.train=data/ragged",
             "--set", "optim.steps=5", "--set", "data.validation=null"]  # fmt: skip
    refused = bench.rayway(*words)
    assert refused.returncode == 2
    assert "data.pad" in refused.stderr
    done = bench.rayway(*words, "--run-id", "r", "--set", "data.pad={x: 8}")
    assert done.returncode == 0, done.stderr
    short = bench.rayway(*words, "--set", "data.pad={x: 5}")
    assert short.returncode in (2, 4)
    assert "part-0.parquet" in short.stderr
