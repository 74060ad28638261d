"""Footers of very many files, read by tasks on Ray instead of by the threads of one process.

A footer costs a request or two, so a process reads a few hundred a second from an object store; a
hundred thousand files are minutes for one process and seconds for a cluster.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence

import ray

from rayway.data.files import StoredFile
from rayway.data.footers import MANY_FILES, Footer, read_footers
from rayway.errors import DataError, RaywayError
from rayway.launch.cluster import local_cluster

CHUNK = 500
"""Files that one task reads."""
_AHEAD = 2
"""Tasks for each CPU: one that runs and one that waits."""
_START_TIMEOUT_S = 60


def read_many_footers(
    folder: str, files: Sequence[StoredFile], *, many: int = MANY_FILES, cpus: int | None = None
) -> Iterator[Footer]:
    """Yield the footer of each file below ``folder``: by tasks on Ray if there are many.

    Takes the Ray that this process is connected to, else it starts one on this machine.

    Args:
        folder: Path or URL.
        files: Below the folder.
        many: From how many files on Ray is used.
        cpus: Of a Ray that is started here. ``None``: all of the machine.

    Raises:
        DataError: A file is empty, cut off, damaged or cannot be read; it is named.
        ClusterError: Ray does not start.
    """
    if len(files) < many:
        yield from read_footers(folder, files)
    elif ray.is_initialized():
        yield from _by_tasks(folder, files)
    else:
        cpus = cpus or os.cpu_count() or 1
        with local_cluster(cpus=cpus, start_timeout_s=_START_TIMEOUT_S):
            yield from _by_tasks(folder, files)


def _by_tasks(folder: str, files: Sequence[StoredFile]) -> Iterator[Footer]:
    """Yield footers in the order of the files, with no more tasks at a time than are of use."""
    task, here = ray.remote(_read_chunk), os.getcwd()
    ahead = _AHEAD * max(int(ray.cluster_resources().get("CPU", 1)), 1)
    running: deque[ray.ObjectRef[list[Footer] | str]] = deque()
    for begin in range(0, len(files), CHUNK):
        running.append(task.remote(here, folder, list(files[begin : begin + CHUNK])))
        if len(running) >= ahead:
            yield from _result(running.popleft())
    while running:
        yield from _result(running.popleft())


def _read_chunk(here: str, folder: str, files: Sequence[StoredFile]) -> list[Footer] | str:
    """Return the footers, or what is wrong: an error raised in a task would come back wrapped."""
    os.chdir(here)  # a relative folder means the same in every process of this machine
    try:
        return list(read_footers(folder, files))
    except RaywayError as error:
        return str(error)


def _result(done: "ray.ObjectRef[list[Footer] | str]") -> list[Footer]:
    result: list[Footer] | str = ray.get(done)
    if isinstance(result, str):
        raise DataError(result)
    return result
