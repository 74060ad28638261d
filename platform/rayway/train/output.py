"""What a worker prints, kept in the run folder."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

from rayway.storage.runs import RunFolder, output_key

_STREAMS = {"out": 1, "err": 2}


@contextmanager
def keep_output(run_url: str, attempt: int, rank: int) -> Iterator[None]:
    """Send this process's stdout and stderr into the run folder, what libraries print included.

    A local folder gets the lines as they come; another one gets them at the end.
    """
    folder = RunFolder.open(run_url)
    with ExitStack() as stack:
        for stream, descriptor in _STREAMS.items():
            key = output_key(attempt, rank, stream)
            stack.enter_context(_redirect(descriptor, folder, key))
        yield


@contextmanager
def _redirect(descriptor: int, folder: RunFolder, key: str) -> Iterator[None]:
    local = folder.objects.local_path(key)
    if local is not None:
        folder.objects.append(key, b"")  # makes the folders above it
    with tempfile.TemporaryFile() if local is None else local.open("ab") as file:
        before = os.dup(descriptor)
        _flush()
        os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            _flush()
            os.dup2(before, descriptor)
            os.close(before)
            if local is None:
                _upload(file, folder, key)


def _upload(file: IO[bytes], folder: RunFolder, key: str) -> None:
    file.seek(0)
    folder.objects.put(key, file.read())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
