"""What a user can get wrong ends in one clear error, before anything expensive starts."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bench import JOBS, Bench

SMALL = ("--workers", "0", "--set", "optim.steps=4")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny job's data, made once."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copy(JOBS / "tiny.py", folder / "tiny.py")
    assert Bench(folder).rayway("run", "tiny.py", *SMALL).returncode == 0
    return folder / "data"


@pytest.fixture
def ready(bench: Bench, data: Path) -> Bench:
    """A folder whose data is there already."""
    (bench.folder / "data").symlink_to(data)
    return bench


def refused(
    done: "subprocess.CompletedProcess[str]", *parts: str, code: int = 2, lines: int = 6
) -> None:
    """The command ended with the code, said all parts, and not in a traceback of ours."""
    assert done.returncode == code, done.stderr
    for part in parts:
        assert part in done.stderr
    assert "site-packages" not in done.stderr
    assert "platform/rayway" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= lines, done.stderr


def rows(folder: Path, count: int) -> Path:
    """Write the H14 fixture: ``count`` rows in one file."""
    folder.mkdir(parents=True)
    x = pa.array(np.ones((count, 8), dtype="float32").tolist(), pa.list_(pa.float32()))
    ids = np.arange(count)
    pq.write_table(pa.table({"id": ids, "x": x, "y": ids % 4}), folder / "part.parquet")
    return folder


def test_missing_data_is_named(bench: Bench) -> None:
    done = bench.rayway("run", "tiny.py", *SMALL, "--set", "data.prepare=null")
    refused(done, "data/train")
    assert not list((bench.folder / "runs").glob("*"))


def test_a_folder_without_parquet_is_named(ready: Bench) -> None:
    (ready.folder / "empty").mkdir()
    refused(ready.rayway("run", "tiny.py", *SMALL, "--set", "data.train=empty"), "empty", "parquet")


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_rows_than_a_global_batch_are_refused(ready: Bench, count: int, workers: str) -> None:
    rows(ready.folder / "few", count)
    done = ready.rayway("run", "tiny.py", "--workers", workers, "--set", "data.train=few")
    refused(done, f"{count} rows" if count else "few")
    assert not list((ready.folder / "runs").glob("*"))


def test_fewer_rows_than_a_global_batch_train_if_all_are_to_be_covered(ready: Bench) -> None:
    rows(ready.folder / "few", 3)
    done = ready.rayway(
        "run", "tiny.py", "--run-id", "r", *SMALL,
        "--set", "data.train=few", "--set", "data.cover=all",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [sorted(step["ids"]) for step in ready.metrics("r")] == [[0, 1, 2]] * 4


def test_a_global_batch_that_does_not_divide_names_the_nearest(ready: Bench) -> None:
    done = ready.rayway("run", "tiny.py", "--set", "batch.global_batch=9")
    refused(done, "batch.global_batch=9", "8 or 10")


def test_more_workers_than_cpus_are_refused(ready: Bench) -> None:
    refused(ready.rayway("run", "tiny.py", "--workers", "4096", "--set", "batch.global_batch=4096"),
            "4096", "this machine has")  # fmt: skip


def test_a_file_without_a_job_is_refused(ready: Bench) -> None:
    (ready.folder / "nothing.py").write_text("x = 1\n")
    refused(ready.rayway("run", "nothing.py"), "nothing.py", "job")


def test_a_folder_that_cannot_be_written_is_named(ready: Bench) -> None:
    (ready.folder / "file").write_text("no folder")
    refused(ready.rayway("run", "tiny.py", *SMALL, "--storage", "file/runs"), "file/runs", code=5)


def test_a_second_run_of_the_same_id_is_refused_and_the_first_is_untouched(ready: Bench) -> None:
    first = ready.rayway("run", "tiny.py", "--run-id", "a", *SMALL)
    assert first.returncode == 0, first.stderr
    before = ready.show("a")
    again = ready.rayway("run", "tiny.py", "--run-id", "a", *SMALL)
    refused(again, "a exists already", "resume")
    assert ready.show("a") == before


def test_memory_storage_is_refused_for_workers_and_works_without(ready: Bench) -> None:
    refused(ready.rayway("run", "tiny.py", "--storage", "memory://runs"), "memory://")
    done = ready.rayway("run", "tiny.py", *SMALL, "--storage", "memory://runs")
    assert done.returncode == 0, done.stderr


def test_resume_of_an_unknown_run_names_the_nearest(ready: Bench) -> None:
    assert ready.rayway("run", "tiny.py", "--run-id", "calm-sea", *SMALL).returncode == 0
    refused(ready.rayway("resume", "calm-see"), "calm-see", "calm-sea")


def test_changed_data_is_refused_at_resume(bench: Bench) -> None:
    slow = ("--set", "model.args.sleep_s=0.1", "--workers", "0")
    driver = bench.start("run", "tiny.py", "--run-id", "r", *slow)
    while bench.step("r") < 7:
        assert driver.poll() is None, (bench.folder / "stderr").read_text()
    os.kill(driver.pid, 9)
    driver.wait()
    shard = bench.folder / "data" / "train" / "part-3.parquet"
    table = pq.read_table(shard)
    pq.write_table(table.slice(1), shard, row_group_size=7)
    refused(bench.rayway("resume", "r"), "part-3.parquet")


def test_a_builder_that_raises_shows_the_users_own_frames(ready: Bench) -> None:
    done = ready.rayway("run", "tiny.py", "--run-id", "r", *SMALL, "--set", "model.args.fail=true")
    refused(done, "this builder does not build", "tiny.py", code=4, lines=12)
    assert done.stderr.splitlines()[0].startswith(("rayway: Traceback", "Traceback"))
    assert ready.show("r")["state"] == "FAILED"


def test_arguments_that_the_builder_does_not_take_are_refused_before_the_run(ready: Bench) -> None:
    done = ready.rayway("run", "tiny.py", *SMALL, "--set", "model.args.slep_s=1")
    refused(done, "slep_s", "sleep_s, faults, fail")
    assert not list((ready.folder / "runs").glob("*"))


@pytest.mark.parametrize("run_id", ["a/b", "..", "Ünï"])
def test_a_run_id_that_is_none_is_refused(ready: Bench, run_id: str) -> None:
    refused(ready.rayway("run", "tiny.py", *SMALL, "--run-id", run_id), run_id, "is no run id")


def test_columns_of_one_name_are_refused(ready: Bench) -> None:
    (ready.folder / "twice").mkdir()
    x = pa.array([1.0, 2.0])
    pq.write_table(pa.table([x, x], names=["x", "x"]), ready.folder / "twice" / "a.parquet")
    done = ready.rayway("run", "tiny.py", *SMALL, "--set", "data.train=twice")
    refused(done, "a.parquet", "more than one column 'x'")


def test_a_loss_that_returns_the_wrong_thing_is_named(ready: Bench) -> None:
    done = ready.rayway("run", "tiny.py", *SMALL, "--set", "loss=tiny:bare_number")
    refused(done, "Tensor", "rayway.Loss(sum=..., weight=...)")


def test_user_code_cannot_end_a_run_as_if_it_were_done(ready: Bench) -> None:
    done = ready.rayway("run", "tiny.py", "--run-id", "r", *SMALL, "--set", "loss=tiny:leaves")
    refused(done, "SystemExit", "tiny.py", code=4, lines=12)
    assert ready.show("r")["state"] == "FAILED"


def test_numbers_that_are_not_finite_end_the_run(ready: Bench) -> None:
    done = ready.rayway(
        "run", "tiny.py", "--run-id", "r", *SMALL, "--set", "loss=tiny:not_a_number"
    )
    refused(done, "step 1", "nan", code=4)
    facts = ready.show("r")
    assert (facts["state"], facts["checkpoints"]) == ("FAILED", [])


@pytest.mark.ray
@pytest.mark.slow
def test_on_ray_a_builder_that_raises_is_as_clear(ready: Bench) -> None:
    done = ready.rayway("run", "tiny.py", "--run-id", "r", "--set", "model.args.fail=true")
    refused(done, "this builder does not build", "tiny.py", code=4, lines=12)
    assert done.stdout == "r\n"
    assert ready.show("r")["attempts"] == 1


@pytest.mark.ray
@pytest.mark.slow
def test_the_same_exception_at_the_same_step_twice_ends_the_run(ready: Bench) -> None:
    # the first call is the look before DDP; the first life raises after 6 steps, and so does the
    # second, which begins at step 5
    faults = [
        {"kind": "raise", "rank": 1, "call": 8, "once": str(ready.folder / "one")},
        {"kind": "raise", "rank": 1, "call": 3, "once": str(ready.folder / "two")},
    ]
    (ready.folder / "two").touch()  # the second fault waits for the second life
    driver = ready.start(
        "run", "tiny.py", "--run-id", "r", "--set", f"model.args.faults={json.dumps(faults)}"
    )
    while not (ready.folder / "one").exists():
        assert driver.poll() is None, (ready.folder / "stderr").read_text()
    (ready.folder / "two").unlink()
    driver.wait(timeout=120)
    stderr = (ready.folder / "stderr").read_text()
    assert driver.returncode == 4, stderr
    assert "ValueError: a fault of the test" in stderr
    assert "at step 6 again" in stderr
    assert ready.show("r")["state"] == "FAILED"
