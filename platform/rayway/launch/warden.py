"""Ends what is left of a cluster whose owner is gone. Run as a script, beside the owner.

The kernel ends Ray's daemons together with the process that started them. Their own children learn
of it in their own time: Ray's two agents stayed for more than a minute, measured. This process
waits for its standard input to close, which happens however the owner ends, and then ends every
process that belongs to the cluster, and removes the cluster's folder. A process belongs to it if it
has the cluster's mark in its environment, or a file of the cluster's folder open: Ray's own
processes overwrite their environment with their title, but each writes a log there.

It imports nothing of rayway, so that it is there in a tenth of a second.
"""

import shutil
import sys
import time
from pathlib import Path

import psutil

MARK = "RAYWAY_CLUSTER"
_DEADLINE_S = 10.0
_PAUSE_S = 0.05


def end_cluster(folder: str, *, owner: psutil.Process) -> None:
    """Kill every process of the cluster in ``folder`` but its owner, until none is left."""
    deadline = time.monotonic() + _DEADLINE_S
    spare = [owner, psutil.Process()]
    while (left := _members(folder, spare=spare)) and time.monotonic() < deadline:
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=_PAUSE_S)


def _members(folder: str, *, spare: list[psutil.Process]) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter()
        if process not in spare and _is_member(process, folder)
    ]


def _is_member(process: psutil.Process, folder: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.environ().get(MARK) == folder:
            return True
        return any(file.path.startswith(f"{folder}/") for file in process.open_files())
    except (psutil.Error, OSError):  # gone, or somebody else's
        return False


def main() -> None:
    """Wait for the owner's end, then clean up after it."""
    folder, owner = sys.argv[1], psutil.Process().parent()
    assert owner is not None, "it was started by somebody"
    sys.stdin.buffer.read()
    end_cluster(folder, owner=owner)
    shutil.rmtree(Path(folder), ignore_errors=True)


if __name__ == "__main__":
    main()
