"""The job files: they load, name code that is there, and fit the data they ask for."""

from pathlib import Path

import pytest

from rayway.spec.batch import plan_batch
from rayway.spec.load import check_user_code, load_job
from sources.stdlib import SEQ_LEN

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.mark.parametrize("name", ["digits", "stdlib_lm"])
def test_a_job_file_names_functions_that_exist(name: str) -> None:
    check_user_code(load_job(JOBS / f"{name}.py"))


@pytest.mark.parametrize("name", ["digits", "stdlib_lm"])
@pytest.mark.parametrize("workers", [0, 1, 2, 4, 8])
def test_a_job_splits_over_any_usual_number_of_workers(name: str, workers: int) -> None:
    batch = load_job(JOBS / f"{name}.py").job.batch
    assert plan_batch(batch, dp_size=max(workers, 1)).accumulation == 1


def test_the_language_model_looks_back_on_a_whole_row() -> None:
    args = load_job(JOBS / "stdlib_lm.py").job.model.args
    assert args["seq_len"] == SEQ_LEN
