import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from rayway.cli.data_prepare import prepare
from rayway.data.index import build_index

MAIN = """
import click
from rayway.cli.data_prepare import prepare
from rayway.cli.main import main, rayway
rayway.add_command(prepare)
main()
"""

CODE = """
import os, time
from pathlib import Path

def slow(table):
    time.sleep(float(os.environ.get("TEST_SLEEP_S", "0")))
    if table["n"][0].as_py() == 0:
        try:
            os.remove("die")
        except FileNotFoundError:
            return table
        os.kill(os.getpid(), 9)
    return table
"""


def start(*arguments: str, sleep_s: float = 0.0) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "prepare", *arguments],
        env={**os.environ, "TEST_SLEEP_S": str(sleep_s)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with eight files of 100 rows in ``raw``, and code."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    Path("raw").mkdir()
    for file in range(8):
        lines = [f"{n},row {n}\n" for n in range(100 * file, 100 * file + 100)]
        Path(f"raw/{file}.csv").write_text("n,text\n" + "".join(lines))
    yield tmp_path
    sys.modules.pop("mine", None)


def parts(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(name).glob("part-*"))}


def done(name: str) -> set[str]:
    return {path.name for path in Path(name, "_rayway", "done").glob("0*.json")}


def wait_for_shards(name: str, count: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 90
    while len(done(name)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_folder_goes_to_stdout_alone(folder: Path) -> None:
    result = CliRunner().invoke(prepare, ["raw", "out", "--workers", "0"])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{folder}/out\n"
    assert "raw: 8 files (csv," in result.stderr
    assert "800 rows (800 read) in 1 shard(s)" in result.stderr


def test_json_says_what_was_made(folder: Path) -> None:
    asked = ["raw", "out", "--workers", "0", "--shards", "8", "--json", "--types", "n:float32"]
    result = CliRunner().invoke(prepare, asked)
    record = json.loads(result.stdout)
    assert (record["rows"], record["shards"], record["files"]) == (800, 8, 8)
    assert record["columns"] == {"n": "float", "text": "string"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "out"], "nowhere does not exist"),
        (["raw", "raw/out"], "lie in one another"),
        (["raw", "out", "--transform", "mine:absent"], "module mine has no absent"),
        (["raw", "out", "--format", "images", "--pack", "n"], "--pack n: write COLUMN:T"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    folder: Path, arguments: list[str], words: str
) -> None:
    code, out, err = end(start(*arguments, "--workers", "0"))
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("rayway: ")
    assert words in line
    assert not Path("out").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_stopped_then_killed_then_with_a_dying_task_it_still_gives_the_same_bytes(
    folder: Path,
) -> None:
    asked = ["--shards", "8", "--transform", "mine:slow"]
    result = CliRunner().invoke(prepare, ["raw", "whole", "--workers", "0", *asked])
    assert result.exit_code == 0, result.output

    stopped = start("raw", "out", "--workers", "2", *asked, sleep_s=1.5)
    wait_for_shards("out", 1, stopped)
    stopped.send_signal(signal.SIGINT)
    code, out, err = end(stopped)
    assert (code, out) == (130, "")
    assert "of 8 shards done; they stay in" in err
    *progress, last = err.splitlines()
    assert last.endswith("The same command goes on from there.")
    assert all(line[2] == ":" for line in progress), err  # Ray itself says nothing
    assert not list(Path("out").glob(".*"))

    before = len(done("out"))
    kept = {name: os.stat(f"out/{name}").st_mtime_ns for name in parts("out")}
    killed = start("raw", "out", "--workers", "2", *asked, sleep_s=1.5)
    wait_for_shards("out", before + 2, killed)
    killed.kill()
    end(killed)
    assert not Path("out/_rayway/index.parquet").exists()

    Path("die").touch()
    os.remove("out/_rayway/done/00000.json")  # so that the task which dies is among those made
    kept.pop("part-00000.parquet", None)
    code, out, err = end(start("raw", "out", "--workers", "2", *asked))
    assert (code, out) == (0, f"{folder}/out\n"), err
    assert not Path("die").exists()
    assert parts("out") == parts("whole")
    assert build_index("out").total == 800
    assert {name: os.stat(f"out/{name}").st_mtime_ns for name in kept} == kept
