from collections.abc import Callable
from pathlib import Path

import pytest

from rayway.errors import DataError, SpecError
from rayway.spec.load import load_job

Write = Callable[..., Path]
Edit = Callable[[str, str], Path]


@pytest.mark.parametrize(
    ("text", "start", "words"),
    [
        ("x = 1\n", "jobs/tiny.py: ", "no variable job. End the file in job = Job"),
        ("jobb = 1\n", "jobs/tiny.py: ", "nearest name is jobb"),
        ("x = 1\njob = 3\n", "jobs/tiny.py:2: ", "of type int; it needs a Job"),
        ("import json as job\n", "jobs/tiny.py:1: ", "of type module"),
        ("job = (\n", "jobs/tiny.py:1: ", "never closed"),
        ("a = 1\n  b = 2\n", "jobs/tiny.py:2: ", "indent"),
        ("job = '\0'\n", "jobs/tiny.py", "null bytes"),
        ("import sys\nsys.exit(0)\n", "jobs/tiny.py: ", "SystemExit"),
        ("", "jobs/tiny.py: ", "no variable job"),
    ],
)
def test_a_file_that_makes_no_job_is_refused(
    write: Write, text: str, start: str, words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(write(text=text))
    assert str(caught.value).startswith(start)
    assert words in str(caught.value)


def test_a_job_under_another_name_is_pointed_out(edit: Edit) -> None:
    with pytest.raises(
        SpecError, match=r"^jobs/tiny\.py:9: no variable job\. Rename my_job to job"
    ):
        load_job(edit("job = Job(", "my_job = Job("))


def test_a_missing_file_a_folder_and_no_python_are_refused(write: Write, folder: Path) -> None:
    write("jobs/x.py/y", "")
    for path, words in (
        ("jobs/none.py", "No such file"),
        ("jobs/x.py", "directory"),
        ("jobs/job.yaml", "ends in .py"),
    ):
        with pytest.raises(SpecError, match=words):
            load_job(Path(path))


def test_the_files_own_exception_ends_the_message_with_the_users_frames_only(
    write: Write, edit: Edit
) -> None:
    write("jobs/models_x.py", "import json\n\ndef size():\n    return json.loads('{')\n")
    with pytest.raises(SpecError) as caught:
        load_job(edit("job = Job(", "import models_x\nmodels_x.size()\njob = Job("))
    text = str(caught.value)
    assert text.startswith("jobs/tiny.py: the job file's own code raised JSONDecodeError.")
    assert text.count('  File "') == 2
    assert text.index("tiny.py") < text.index("models_x.py") < text.index("JSONDecodeError: ")
    assert "rayway/spec" not in text
    assert "decoder.py" not in text


def test_our_own_errors_pass_through_as_they_are(write: Write) -> None:
    text = "from rayway.errors import DataError\nraise DataError('no rows')\n"
    with pytest.raises(DataError, match=r"^no rows$"):
        load_job(write(text=text))


def test_what_the_file_prints_does_not_reach_stdout(
    edit: Edit, capsys: pytest.CaptureFixture[str]
) -> None:
    load_job(edit("job = Job(", "print('hello')\njob = Job("))
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize("name", ["queue", "test", "pydantic", "hypothesis", "rayway", "__init__"])
def test_a_job_file_named_like_another_module_is_refused(write: Write, name: str) -> None:
    file = write()
    renamed = file.rename(file.with_name(f"{name}.py"))
    with pytest.raises(SpecError, match=f"cannot be called {name}.py.*Rename it"):
        load_job(renamed)


def test_a_folder_of_the_same_name_is_no_other_module(
    write: Write, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("tiny/rows.txt", "")
    monkeypatch.syspath_prepend(str(folder))
    assert load_job(write()).job.loss == "tiny:loss"


def test_a_file_whose_name_cannot_be_imported_is_taken_without_functions_of_its_own(
    write: Write,
) -> None:
    file = write().rename("jobs/my-job.py")
    with pytest.raises(SpecError, match=r"jobs/my-job\.py:12: model\.build=.*Rename the file"):
        load_job(file)
    text = (
        file.read_text()
        .replace("build=build", "build='m:build'")
        .replace("loss=loss", "loss='m:l'")
    )
    file.write_text(text)
    assert load_job(file).job.loss == "m:l"
