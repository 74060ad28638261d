"""What is found wrong before anything starts."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayway.errors import DataError, SpecError
from rayway.launch.preflight import available_cpus, check_scale, prepare
from rayway.spec.code import enter_code_root, leave_code_root
from rayway.spec.job import BatchSpec, DataSpec, Job, ModelSpec, OptimSpec, ScaleSpec
from rayway.spec.load import Resolved, resolve_job

CODE = """
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def build():
    raise AssertionError("not before the workers")


def loss(model, batch):
    raise AssertionError("not before the workers")


def make(folder):
    with open(Path(__file__).with_name("calls"), "a") as calls:
        calls.write(folder + "\\n")
    for name in ("train", "validation"):
        (Path(folder) / name).mkdir(parents=True)
        pq.write_table(pa.table({"x": list(range(20))}), Path(folder) / name / "a.parquet")


def make_half(folder):
    (Path(folder) / "train").mkdir(parents=True)
    (Path(folder) / "train/a.parquet").write_bytes(b"PAR1")
    raise OSError("died half-way")


def make_nothing(folder):
    pass


def make_trouble(folder):
    raise OSError("the mirror is down")


a_number = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "flight_code.py").write_text(CODE)
    enter_code_root(folder)
    yield folder
    leave_code_root()


def write(folder: Path, rows: int, column: str = "x") -> str:
    folder.mkdir(parents=True)
    pq.write_table(pa.table({column: np.arange(rows)}), folder / "a.parquet")
    return str(folder)


def job_of(train: str, *, data: dict[str, Any] | None = None, **changes: Any) -> Resolved:
    sections = {
        "name": "tiny",
        "model": ModelSpec(build="flight_code:build"),
        "loss": "flight_code:loss",
        "data": DataSpec(train=train, **(data or {})),
        "batch": BatchSpec(global_batch=8),
        "optim": OptimSpec(lr=0.1, epochs=2),
        "scale": ScaleSpec(workers=0),
    }
    return resolve_job(Job(**{**sections, **changes}))


def test_a_good_job_gets_all_it_needs(code: Path, tmp_path: Path) -> None:
    train, validation = write(tmp_path / "train", 20), write(tmp_path / "validation", 5)
    found = prepare(job_of(train, data={"validation": validation}), workers=0)
    assert [index.total for index in found.data.all] == [20, 5]
    assert found.plan.steps_per_epoch == 2
    assert found.course.steps == 4
    assert (found.batch.micro_batch, found.batch.dp_size) == (8, 1)


def test_it_loads_no_torch() -> None:
    import subprocess  # noqa: PLC0415

    program = "import sys, rayway.launch.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_data_that_is_not_there_is_made_once(code: Path, tmp_path: Path) -> None:
    data = {"validation": str(tmp_path / "made/validation"), "prepare": "flight_code:make"}
    job = job_of(str(tmp_path / "made/train"), data=data)
    for _ in range(2):
        assert prepare(job, workers=0).data.train[0].total == 20
    assert len((code / "calls").read_text().splitlines()) == 1
    assert sorted(each.name for each in (tmp_path / "made").iterdir()) == ["train", "validation"]


def test_data_that_was_half_made_is_made_anew(code: Path, tmp_path: Path) -> None:
    data = {"prepare": "flight_code:make_half"}
    with pytest.raises(SpecError, match="died half-way"):
        prepare(job_of(str(tmp_path / "made/train"), data=data), workers=0)
    assert not list((tmp_path / "made").iterdir())
    job = job_of(str(tmp_path / "made/train"), data={"prepare": "flight_code:make"})
    assert prepare(job, workers=0).data.train[0].total == 20


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("make_nothing", r"did not make data.train=.*Let it write there"),
        ("make_trouble", r"failed to make .*\n(.*\n)*.*make_trouble\n(.*\n)*.*the mirror is down"),
    ],
)
def test_data_that_cannot_be_made_is_refused(
    function: str, says: str, code: Path, tmp_path: Path
) -> None:
    job = job_of(str(tmp_path / "made/train"), data={"prepare": f"flight_code:{function}"})
    with pytest.raises(SpecError, match=says):
        prepare(job, workers=0)


def test_data_at_a_url_is_looked_for_where_it_is(code: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "train", 20)
    job = job_of(f"file://{train}", data={"prepare": "flight_code:make_trouble"})
    assert prepare(job, workers=0).data.train[0].total == 20
    job = job_of(f"file://{tmp_path}/nowhere", data={"prepare": "flight_code:make_trouble"})
    with pytest.raises(SpecError, match="the mirror is down"):
        prepare(job, workers=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": "flight_code:los"}, r"loss=flight_code:los: .*nearest: loss"),
        ({"loss": "flight_code:a_number"}, "is of type int; it needs a function"),
        ({"model": ModelSpec(build="nowhere:build")}, "model.build=nowhere:build: no module"),
        ({"batch": BatchSpec(global_batch=8, micro_batch=3)}, "global_batch=8 does not split"),
    ],
)
def test_a_wrong_job_is_refused_before_data_is_made(
    changes: dict[str, Any], says: str, code: Path, tmp_path: Path
) -> None:
    data = {"prepare": "flight_code:make"}
    with pytest.raises(SpecError, match=says):
        prepare(job_of(str(tmp_path / "made/train"), data=data, **changes), workers=0)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("rows", [0, 7])
def test_too_few_rows_are_refused(rows: int, code: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0 rows|7 rows do not fill one global batch of 8"):
        prepare(job_of(write(tmp_path / "train", rows)), workers=0)


def test_missing_data_and_validation_data_are_refused(code: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        prepare(job_of(str(tmp_path / "nowhere")), workers=0)
    data = {"validation": str(tmp_path / "also_nowhere")}
    with pytest.raises(DataError, match="also_nowhere"):
        prepare(job_of(write(tmp_path / "train", 20), data=data), workers=0)


def scaled(cpus: float, global_batch: int = 2**20) -> Job:
    return job_of(
        "/rows", scale=ScaleSpec(workers=0, cpus_per_worker=cpus),
        batch=BatchSpec(global_batch=global_batch),
    ).job  # fmt: skip


def test_more_workers_than_cpus_are_refused_with_what_fits() -> None:
    cpus = available_cpus()
    assert check_scale(scaled(1.0, cpus), workers=cpus).dp_size == cpus
    with pytest.raises(SpecError, match=rf"Use {cpus} workers or fewer, or a smaller"):
        check_scale(scaled(1.0, cpus + 1), workers=cpus + 1)
    with pytest.raises(SpecError, match="Use --workers 0, or a smaller"):
        check_scale(scaled(cpus + 1.0), workers=1)


def test_a_fraction_of_a_cpu_makes_room_and_no_worker_needs_none() -> None:
    cpus = available_cpus()
    assert check_scale(scaled(0.5, 2 * cpus), workers=2 * cpus).micro_batch == 1
    assert check_scale(scaled(cpus + 1.0), workers=0).dp_size == 1
