"""What a worker prints, kept in the run folder."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rayway.storage.runs import RunFolder, output_key


@contextmanager
def keep_output(run_url: str, attempt: int, rank: int) -> Iterator[None]:
    """Send this process's stdout and stderr into the run folder, what libraries print included.

    A local folder is written as the lines come; another one at the end.
    """
    folder = RunFolder.open(run_url)
    key = output_key(attempt, rank)
    local = folder.objects.local_path(key)
    if local is not None:
        folder.objects.append(key, b"")  # makes the folders
        with local.open("ab", buffering=0) as file:
            _redirect(file.fileno())
            yield
        return
    with tempfile.TemporaryFile(buffering=0) as file:
        _redirect(file.fileno())
        try:
            yield
        finally:
            _flush()
            file.seek(0)
            folder.objects.put(key, file.read())


def _redirect(descriptor: int) -> None:
    _flush()
    os.dup2(descriptor, sys.__stdout__.fileno() if sys.__stdout__ else 1)
    os.dup2(descriptor, sys.__stderr__.fileno() if sys.__stderr__ else 2)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
