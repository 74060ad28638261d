"""What a worker prints is in the run folder, whoever printed it."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rayway.storage.runs import RunFolder, output_key

PROGRAM = """
import os, sys
from rayway.storage.runs import RunFolder, output_key
from rayway.train.output import keep_output
url, how = sys.argv[1:]
print("before")
try:
    with keep_output(url, 1, 3):
        print("printed")
        print("complained", file=sys.stderr)
        os.write(2, b"a library\\n")
        if how == "die":
            os._exit(9)
        raise ValueError("out of it")
except ValueError:
    pass
print("after")
if how == "show":
    for stream in ("out", "err"):
        print(stream, RunFolder.open(url).objects.get(output_key(1, 3, stream)))
"""


def run(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-u", "-c", before + PROGRAM, *words]
    return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)


def new_folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(str(tmp_path / "run-1"), "{}", now=datetime.now(UTC))


@pytest.mark.parametrize("how", ["live", "die"])
def test_a_local_folder_has_what_was_printed_even_after_a_sudden_death(
    how: str, tmp_path: Path
) -> None:
    folder = new_folder(tmp_path)
    done = run(folder.url, how)
    assert done.returncode == {"live": 0, "die": 9}[how], done.stderr
    assert folder.objects.get(output_key(1, 3, "out")) == b"printed\n"
    assert folder.objects.get(output_key(1, 3, "err")) == b"complained\na library\n"
    assert done.stderr == ""
    assert done.stdout == {"live": "before\nafter\n", "die": "before\n"}[how]


def test_a_remote_folder_has_it_at_the_end() -> None:
    before = (
        "from datetime import UTC, datetime\nfrom rayway.storage.runs import RunFolder\n"
        "RunFolder.create('memory://runs/run-1', '{}', now=datetime.now(UTC))\n"
    )
    done = run("memory://runs/run-1", "show", before=before)
    assert done.stdout.splitlines() == [
        "before",
        "after",
        r"out b'printed\n'",
        r"err b'complained\na library\n'",
    ]
