"""``rayway data index`` and ``rayway data check``."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from rayway.cli.data import data
from rayway.data.index import Index, build_index
from rayway.data.judge import judge
from rayway.data.scan import Rules, scan
from rayway.errors import DataError, SpecError, StorageError
from rayway.report.data_page import data_page

JOB = """
from rayway import *
job = Job(
    name="tiny",
    model=ModelSpec(build="{name}:build"),
    loss="{name}:build",
    data=DataSpec(train="{train}", validation="{validation}", columns=("x", "label"){more}),
    batch=BatchSpec(global_batch=8, micro_batch=4),
    optim=OptimSpec(lr=0.1, steps=2),
)

def build():
    raise AssertionError("a check builds no model")
"""


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(data, list(arguments))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """2 files of 6 rows: x is right, a label is 12, some text."""
    (tmp_path / "set").mkdir()
    table = {"x": [1.0] * 6, "label": [0, 1, 2, 12, 4, 5], "text": ["a"] * 6}
    for name in "ab":
        file = tmp_path / "set" / f"{name}.parquet"
        pq.write_table(pa.table(table), file, write_page_checksum=True)
    return tmp_path / "set"


@pytest.fixture
def job(tmp_path: Path, folder: Path) -> Callable[..., str]:
    def write(more: str = "", train: Path = folder) -> str:
        file = tmp_path / "job.py"
        text = JOB.format(name="job", train=train, validation=folder, more=more)
        file.write_text(text)
        return str(file)

    return write


def test_an_index_is_stored_beside_the_data_and_told(folder: Path) -> None:
    (folder / "_SUCCESS").touch()
    result = ask("index", str(folder))
    assert result.exit_code == 0
    index = build_index(str(folder))
    lines = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert lines["data"] == str(folder)
    assert lines["size"].startswith("12 rows in 2 file(s)")
    assert lines["fingerprint"] == index.fingerprint
    assert lines["index"] == f"{folder}/_rayway/index.parquet"
    assert "_SUCCESS" in lines["left"]
    assert Index.from_bytes((folder / "_rayway" / "index.parquet").read_bytes()).total == 12


def test_an_index_as_json(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "my.index"
    result = ask("index", f"{folder}/a*", "--out", str(out), "--json")
    facts = json.loads(result.stdout)
    assert facts["rows"] == 6
    assert facts["columns"] == {"x": "double", "label": "int64", "text": "string"}
    assert facts["index"] == str(out)
    assert Index.from_bytes(out.read_bytes()).paths == ("a.parquet",)
    assert not (folder / "_rayway").exists()
    assert json.loads(ask("index", str(folder), "--no-write", "--json").stdout)["index"] is None


def test_an_index_that_cannot_be_stored_is_told(folder: Path, tmp_path: Path) -> None:
    (folder / "_rayway").touch()  # a file where the folder should be
    result = ask("index", str(folder), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["index"] is None
    assert "the index is not stored beside the data" in result.stderr
    assert isinstance(ask("index", str(folder), "--write").exception, StorageError)
    missing = str(tmp_path / "no" / "file")
    assert isinstance(ask("index", str(folder), "--out", missing).exception, StorageError)


def test_an_index_of_damaged_data_is_refused(folder: Path) -> None:
    os.truncate(folder / "b.parquet", 50)
    assert isinstance(ask("index", str(folder)).exception, DataError)


def test_a_check_tells_facts_and_a_verdict(folder: Path) -> None:
    result = ask("check", str(folder))
    assert result.exit_code == 0
    assert "12 rows in 2 files" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("fit for training, 2 pieces of advice")
    result = ask("check", str(folder), "--range", "label=0:9", "--range", "x=:1")
    assert result.exit_code == 2
    assert "2 value(s) outside 0:9, the first 12 in" in result.stdout
    assert "a.parquet (row group 0, row 3)" in result.stdout
    assert result.stdout.endswith("not fit for training: 1 problem\n")


def test_a_check_as_json_has_all_of_it(folder: Path) -> None:
    result = ask("check", str(folder), "--json", "--sample", "1")
    facts = json.loads(result.stdout)
    assert (facts["fit"], facts["problems"], facts["row_groups_read"]) == (True, 0, 1)
    assert facts["columns"]["label"]["high"] == 12
    assert facts["checksums"] is True
    assert {finding["level"] for finding in facts["findings"]} == {"advice"}


def test_a_check_for_a_job_asks_what_the_job_needs(folder: Path, job: Callable[..., str]) -> None:
    result = ask("check", str(folder), "--job", job())
    assert result.exit_code == 0
    assert "text" not in result.stdout, "it is not among the job's columns"
    assert "micro-batch  4 rows, 64 B as stored" in result.stdout
    result = ask("check", f"{folder}/a.parquet", "--job", job())
    assert result.exit_code == 2
    assert "6 rows, which do not fill one global batch of 8" in result.stdout
    assert ask("check", f"{folder}/a.parquet", "--job", job(", cover='all'")).exit_code == 0
    result = ask("check", str(folder), "--job", job(", pad={'x': 3}"))
    assert "data.pad names column 'x', which is double" in result.stdout


def test_a_check_of_a_job_reads_all_its_places(
    folder: Path, job: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "train").mkdir()
    table = pa.table({"x": [1.0] * 9, "label": [None] * 9})
    pq.write_table(table, tmp_path / "train" / "a.parquet")
    result = ask("check", "--job", job(train=tmp_path / "train"), "--json")
    train, validation = map(json.loads, result.stdout.splitlines())
    assert (train["url"], train["fit"]) == (str(tmp_path / "train"), False)
    assert (validation["url"], validation["fit"]) == (str(folder), True)
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to check"),
        (["set", "--range", "label"], "is not COLUMN=LOW:HIGH"),
        (["set", "--range", "label=a:b"], "is not COLUMN=LOW:HIGH"),
    ],
)
def test_what_cannot_be_checked_is_refused(arguments: list[str], words: str) -> None:
    result = ask("check", *arguments)
    assert isinstance(result.exception, SpecError)
    assert words in str(result.exception)


def test_the_page_fits_eighty_columns(folder: Path) -> None:
    rules = Rules(ranges={"label": (0, 9)})
    found = scan(str(folder), rules)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(data_page(found, *judge(found, rules), rules))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    (label,) = [line for line in lines if line.startswith("label ")]
    assert label.split() == ["label", "int64", "0", "0", "0", "0", "to", "12"]


@pytest.mark.parametrize("verb", ["index", "check"])
def test_a_half_prepared_set_is_neither_indexed_nor_found_fit(folder: Path, verb: str) -> None:
    (folder / "_rayway").mkdir()
    (folder / "_rayway/prepare.json").write_text("{}")
    result = ask(verb, str(folder))
    assert isinstance(result.exception, DataError)
    assert "is not finished" in str(result.exception)
    assert not (folder / "_rayway/index.parquet").exists()


@pytest.mark.parametrize("limits", ["labl=0:9", "label=nan:nan", "label=9:0"])
def test_a_range_that_checks_nothing_is_refused(folder: Path, limits: str) -> None:
    result = ask("check", str(folder), "--range", limits)
    assert isinstance(result.exception, DataError | SpecError)
    assert "labl" in str(result.exception) or "COLUMN=LOW:HIGH" in str(result.exception)


def test_durations_are_no_damage(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    column = pa.array([1, 2, None], pa.duration("us"))
    pq.write_table(pa.table({"took": column}), tmp_path / "set/a.parquet")
    assert "damaged" not in ask("check", str(tmp_path / "set")).output


@pytest.mark.parametrize("verb", ["index", "check"])
def test_an_empty_place_is_not_the_present_folder(verb: str) -> None:
    result = ask(verb, "")
    assert isinstance(result.exception, DataError)
    assert "the place of the data is empty" in str(result.exception)
