import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rayway.errors import SpecError, StorageError
from rayway.storage import runs
from rayway.storage.runs import RunFolder, find_run, list_runs, new_run_id

NOW = datetime(2026, 1, 31, 23, 59, 58, tzinfo=UTC)
JOB = '{"schema": 1, "name": "a"}'


def test_a_run_folder_is_made_once_even_for_the_same_job(storage: str) -> None:
    def create(_: int) -> bool:
        try:
            RunFolder.create(f"{storage}/a-1", JOB, now=NOW)
        except StorageError as error:
            assert "run a-1 exists already" in str(error)  # noqa: PT017 - eight threads try
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(create, range(8))).count(True) == 1


def test_a_run_folder_gives_back_what_it_was_made_of(storage: str) -> None:
    RunFolder.create(f"{storage}/a-1", JOB, now=NOW)
    folder = RunFolder.open(f"{storage}/a-1")
    assert folder.job_json() == JOB
    assert folder.run_id == "a-1"
    assert folder.created_at == NOW.timestamp()
    assert folder.url == f"{storage}/a-1"
    assert folder.attempts() == []
    assert folder.newest_attempt() == 0


def test_a_copied_run_keeps_its_id(tmp_path: Path) -> None:
    RunFolder.create(str(tmp_path / "a-1"), JOB, now=NOW)
    shutil.copytree(tmp_path / "a-1", tmp_path / "elsewhere" / "copy")
    assert RunFolder.open(str(tmp_path / "elsewhere" / "copy")).run_id == "a-1"


def test_an_id_that_is_no_plain_name_is_refused(tmp_path: Path) -> None:
    for name in ["A", ".hidden", "a b", "ü", "-a", "a" * 101]:
        with pytest.raises(SpecError, match="no run id"):
            RunFolder.create(str(tmp_path / name), JOB, now=NOW)
    assert list(tmp_path.iterdir()) == []


def test_attempts_are_numbered_and_sorted_as_numbers(storage: str) -> None:
    folder = RunFolder.create(f"{storage}/a-1", JOB, now=NOW)
    for number in [1, 9, 10, 99, 100, 998, 999, 1000]:
        folder.write(runs.attempt_key(number), {"attempt": number})
    assert folder.attempts() == [1, 9, 10, 99, 100, 998, 999, 1000]
    assert folder.next_attempt({"workers": 2}) == 1001
    record = folder.read(runs.attempt_key(1001))
    assert record is not None
    assert (record["attempt"], record["workers"]) == (1001, 2)


def test_each_attempt_gets_a_number_of_its_own(storage: str) -> None:
    folder = RunFolder.create(f"{storage}/a-1", JOB, now=NOW)
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda _: folder.next_attempt({}), range(12)))
    assert sorted(numbers) == list(range(1, 13))
    assert folder.newest_attempt() == 12


def test_only_the_newest_attempt_passes_the_fence(storage: str) -> None:
    folder = RunFolder.create(f"{storage}/a-1", JOB, now=NOW)
    first = folder.next_attempt({})
    assert folder.is_newest(first)
    second = folder.next_attempt({})
    assert not folder.is_newest(first)
    assert folder.is_newest(second)


def test_an_attempts_records_are_found_by_rank(storage: str) -> None:
    folder = RunFolder.create(f"{storage}/a-1", JOB, now=NOW)
    attempt = folder.next_attempt({})
    for rank in [0, 3, 11]:
        folder.objects.append(runs.events_key(attempt, rank), b"{}\n")
    folder.write(runs.error_key(attempt, 3), {"error": "x"})
    folder.write(runs.attempt_key(attempt, "end.json"), {"state": "FAILED"})
    folder.objects.append(runs.output_key(attempt, 0, "out"), b"text")
    assert folder.event_keys(attempt) == [runs.events_key(attempt, rank) for rank in [0, 3, 11]]
    assert folder.error_keys(attempt) == [runs.error_key(attempt, 3)]
    assert folder.read(runs.attempt_key(attempt, "end.json")) == {"state": "FAILED"}
    assert folder.read(runs.attempt_key(attempt, "alive.json")) is None


@pytest.mark.parametrize(
    "folder", ["step-5.attempt-1", "step-00000005", "x", ".", "step-00000005.attempt-001 "]
)
def test_other_folders_are_no_checkpoints(folder: str) -> None:
    assert runs.checkpoint_of(folder) is None


@pytest.mark.parametrize("step", [0, 500, 10**8, 10**12])
def test_a_checkpoints_folder_tells_step_and_attempt(step: int) -> None:
    assert runs.checkpoint_of(runs.checkpoint_folder(step, 1234)) == (step, 1234)


def test_a_run_is_found_by_id_path_and_url(storage: str) -> None:
    RunFolder.create(f"{storage}/a-1", JOB, now=NOW)
    for ref in ["a-1", f"{storage}/a-1", f"{storage}/a-1/"]:
        assert find_run(ref, storage).run_id == "a-1"


def test_a_run_that_is_not_there_is_answered_with_the_nearest(storage: str) -> None:
    for name in ["digits-1", "digits-2", "other"]:
        RunFolder.create(f"{storage}/{name}", JOB, now=NOW)
    with pytest.raises(SpecError, match=r"no run 'digit-1'.*Nearest: digits-1"):
        find_run("digit-1", storage)
    with pytest.raises(SpecError, match=r"has no job\.json.*Nearest: digits-1"):
        RunFolder.open(f"{storage}/digits-11")
    with pytest.raises(SpecError, match="No run is there"):
        find_run("a", f"{storage}/empty")


def test_listing_runs_shows_runs_only(storage: str) -> None:
    RunFolder.create(f"{storage}/b", JOB, now=NOW)
    RunFolder.create(f"{storage}/a", JOB, now=NOW)
    RunFolder(f"{storage}/no-run").objects.put("file", b"")
    assert list_runs(storage) == ["a", "b"]
    assert list_runs(f"{storage}/none") == []


def test_a_newer_schema_is_refused(storage: str) -> None:
    folder = RunFolder.create(f"{storage}/a", JOB, now=NOW)
    folder.write("run.json", {"schema": 3, "run_id": "a", "created_at": 0})
    with pytest.raises(StorageError, match="folder schema 3, this rayway reads 2"):
        RunFolder.open(folder.url)


def test_a_run_without_its_record_is_refused(storage: str) -> None:
    folder = RunFolder.create(f"{storage}/a", JOB, now=NOW)
    folder.objects.delete(["run.json"])
    with pytest.raises(StorageError, match=r"run\.json is missing"):
        RunFolder.open(folder.url)


def test_a_new_run_id_says_job_and_time() -> None:
    first, second = new_run_id("digits", NOW), new_run_id("digits", NOW)
    assert first.startswith("digits-20260131-235958-")
    assert first != second
    with pytest.raises(SpecError):
        new_run_id("../up", NOW)
