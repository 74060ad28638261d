"""The data benchmarks run small, without the peers; what they stand on is right."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from data_consumer import arrays_of
from data_goals import judged
from data_rate import s3_server
from data_sets import image_table, make_set, token_list_table, token_table

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def result(name: str, *words: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / f"{name}.py"),
            "--quick",
            "--folder",
            str(folder),
            *words,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["benchmark"] == name
    assert found["method"]
    return found


def test_both_layouts_of_tokens_hold_the_same_rows() -> None:
    binary, lists = arrays_of(token_table(50, 3)), arrays_of(token_list_table(50, 3))
    assert binary["tokens"].shape == (50, 129)
    assert (binary["tokens"] == lists["tokens"]).all()


def test_a_slice_of_a_table_gives_its_own_rows() -> None:
    table = image_table(20, 0)
    assert (arrays_of(table.slice(5, 3))["image"] == arrays_of(table)["image"][5:8]).all()
    assert (arrays_of(table.slice(5, 3))["label"] == arrays_of(table)["label"][5:8]).all()


def test_a_data_set_is_made_once(tmp_path: Path) -> None:
    rows = make_set(tmp_path, "images", shards=2, group_rows=10)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "images").iterdir()}
    assert rows == make_set(tmp_path, "images", shards=2, group_rows=10) == 40
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "images").iterdir()}
    assert {pq.ParquetFile(path).num_row_groups for path in made} == {2}


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    for name in ("a/x.bin", "a/b/y.bin", "a/b/z.bin", "c.bin"):
        path = tmp_path / "bucket" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(range(100)))
    with s3_server(tmp_path, 0) as (endpoint, _):
        yield endpoint


def test_the_s3_server_lists_and_reads_parts(endpoint: str) -> None:
    store = pafs.S3FileSystem(
        endpoint_override=endpoint.removeprefix("http://"),
        scheme="http",
        access_key="anyone",
        secret_key="anything",
        region="us-east-1",
    )
    whole = store.get_file_info(pafs.FileSelector("bucket", recursive=True))
    assert sorted(each.path for each in whole if each.is_file) == [
        "bucket/a/b/y.bin",
        "bucket/a/b/z.bin",
        "bucket/a/x.bin",
        "bucket/c.bin",
    ]
    flat = store.get_file_info(pafs.FileSelector("bucket/a"))
    assert sorted(each.path for each in flat) == ["bucket/a/b", "bucket/a/x.bin"]
    with store.open_input_file("bucket/a/x.bin") as file:
        assert file.size() == 100
        assert file.read_at(5, 10) == bytes(range(10, 15))
    with pytest.raises(FileNotFoundError):
        store.open_input_file("bucket/none")


def test_the_s3_server_answers_a_suffix_range(endpoint: str) -> None:
    asked = urllib.request.Request(f"{endpoint}/bucket/c.bin", headers={"Range": "bytes=-4"})
    with urllib.request.urlopen(asked) as answer:
        assert answer.status == 206
        assert answer.headers["Content-Range"] == "bytes 96-99/100"
        assert answer.read() == bytes([96, 97, 98, 99])


def test_goals_are_judged_by_the_worst_setting() -> None:
    fast, slow = {"cpu_s_per_million": 1.0}, {"cpu_s_per_million": 3.0}
    half = dict.fromkeys(("first_batch_s", "memory_mb", "rows_per_s"), 0.1)
    found = {
        "disk/tokens/1": {"raw": [fast | half], "rayway local": [fast | half]},
        "disk/tokens/2": {"raw": [fast | half], "rayway local": [slow | half]},
    }
    goals = judged(found)
    cpu = goals["local: rows per CPU second over raw >= 0.5"]
    assert not cpu["met"]
    assert [each["median"] for each in cpu["found"].values()] == [1.0, 0.3333]
    assert goals["local: first batch <= 0.5 s"]["met"]
    assert goals["local: rows per CPU second over LitData >= 5"]["met"] is None


@pytest.mark.slow
def test_rates_are_measured_and_a_missing_peer_is_told(tmp_path: Path) -> None:
    words = ("--cases", "raw;rayway local;LitData", "--sets", "tokens", "--consumers", "1")
    found = result("data_rate", *words, "--stores", "disk", folder=tmp_path)
    cases = found["figures"]["disk/tokens/1"]
    for name in ("raw", "rayway local"):
        for figure in ("rows_per_s", "cpu_s_per_million", "first_batch_s"):
            assert cases[name][figure]["median"] > 0
    assert cases["rayway local"]["of_raw"]["median"] > 0
    assert found["refused"] == {"disk/tokens/1: LitData": "not run: no --peers-python"}


@pytest.mark.slow
def test_a_resume_is_measured_beside_a_start(tmp_path: Path) -> None:
    found = result("data_resume", folder=tmp_path)
    assert set(found["first_batch_s"]) == {"start", "resume", "few files", "many files"}
    assert found["resume_over_start"]["median"] > 0
    assert found["memory_growth"]["median"] > 0
