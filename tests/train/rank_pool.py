"""Real ranks for tests: processes that form a gloo group whenever a test asks for one.

A process costs seconds to start, so they are started once and asked many times. Run as a script,
this file is such a process: it answers requests until its connection ends.
"""

import importlib.util
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import ModuleType
from typing import Any

_COLLECTIVE_S = 30.0
_SILENT = "no answer in time, or its process ended"


class Ranks:
    """A number of rank processes, started at the first request.

    Args:
        folder: A fresh folder, for sockets and rendezvous files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = count()
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int,
        timeout_s: float = 120.0,
        dies: int | None = None,
    ) -> list[Any]:
        """Call a top-level function of a test file on each of ``world_size`` ranks.

        Args:
            function: What to call, and with which ``args``.
            world_size: Ranks of the group.
            timeout_s: Deadline of all answers.
            dies: A rank whose process is expected to end instead of answering.

        Returns:
            What each rank returned, by rank.

        Raises:
            AssertionError: A rank raised, or did not answer in time.
        """
        self._grow(world_size)
        meeting = f"file://{self._folder / f'meeting-{next(self._names)}'}"
        code = function.__code__.co_filename
        for rank, (_, connection) in enumerate(self._ranks[:world_size]):
            request = (meeting, rank, world_size, code, function.__name__, args)
            connection.send_bytes(pickle.dumps(request))
        answers = self._answers(world_size, time.monotonic() + timeout_s)
        failed = [
            f"rank {rank}: {text}"
            for rank, (good, text) in enumerate(answers)
            if not good and rank != dies
        ]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.wait()
        self._ranks.clear()

    def _answers(self, world_size: int, deadline: float) -> list[tuple[bool, Any]]:
        answers: list[tuple[bool, Any]] = []
        for _, connection in self._ranks[:world_size]:
            answer = (False, _SILENT)
            if connection.poll(max(deadline - time.monotonic(), 0)):
                with suppress(EOFError, ConnectionResetError):
                    # from a process we started, over a socket in a folder of ours
                    answer = pickle.loads(connection.recv_bytes())
            answers.append(answer)
        if (False, _SILENT) in answers:
            self.close()
        return answers

    def _grow(self, world_size: int) -> None:
        listeners = []
        for _ in range(world_size - len(self._ranks)):
            address = str(self._folder / f"socket-{next(self._names)}")
            listener = Listener(address, family="AF_UNIX")
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
            process = subprocess.Popen([sys.executable, __file__, address], env=environment)
            listeners.append((process, listener))
        for process, listener in listeners:
            with listener:
                self._ranks.append((process, listener.accept()))


def serve(address: str) -> None:
    """Answer requests until the connection ends."""
    import torch  # noqa: PLC0415 - the process that asks does not pay for it

    torch.set_num_threads(1)
    with Client(address, family="AF_UNIX") as connection:
        while True:
            try:
                # from the process that started us, over a socket in a folder of its own
                request = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            connection.send_bytes(pickle.dumps(_answer(*request)))


def _answer(
    meeting: str, rank: int, world_size: int, code: str, name: str, args: tuple[Any, ...]
) -> tuple[bool, Any]:
    import torch.distributed as dist  # noqa: PLC0415

    try:
        dist.init_process_group(
            "gloo",
            init_method=meeting,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_COLLECTIVE_S),
        )
        return True, getattr(_module(code), name)(*args)
    except BaseException:  # noqa: BLE001 - told to who asked
        return False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@cache
def _module(code: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(code).stem, code)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    serve(sys.argv[1])
