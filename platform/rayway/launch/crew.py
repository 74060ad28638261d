"""Runs a function over tasks, each on a CPU of its own: a Ray Data job, or in this process."""

import importlib
import logging
import os
import pickle
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa
from ray._private import auto_init_hook

from rayway.errors import RaywayError
from rayway.launch.cluster import local_cluster

T = TypeVar("T")
R = TypeVar("R")
Tick = Callable[[dict[int, int]], None]
"""Told every 0.2 s how many bytes each task at work has read: place of the task -> bytes."""

_POLL_S = 0.2
_START_TIMEOUT_S = 60.0
_PUMP = "rayway-crew"
_PUMP_ENDS_S = 10.0


Call = Callable[[T, Callable[[int], None]], R]
"""What a task does; the second argument is told how many bytes it has read since."""


class Crew:
    """Starts a cluster when there is the first task, and ends it with itself.

    Args:
        cpus: How many tasks run at a time; 0 for one at a time, in this process.
    """

    def __init__(self, cpus: int) -> None:
        self._cpus = cpus
        self._open = ExitStack()
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    def map(self, call: Call[T, R], tasks: Sequence[T], *, tick: Tick) -> Iterator[tuple[int, R]]:
        """Yield (place of the task, answer) as they come, in any order.

        A task whose process dies is done again, three times at most.

        Raises:
            RaywayError: What a task raised; or its processes died again and again.
            ClusterError: Ray did not start.
        """
        if self._cpus == 0:
            for place, task in enumerate(tasks):
                yield place, call(task, _Meter(partial(_tell, tick, place)))
            return
        if not self._started:
            # two seconds, while the cluster starts
            threading.Thread(target=_import_ray_data, name="warm-up", daemon=True).start()
            self._open.enter_context(_no_other_cluster())
            self._open.enter_context(
                local_cluster(cpus=self._cpus, start_timeout_s=_START_TIMEOUT_S)
            )
            self._started = True
        yield from _map_on_ray(call, tasks, tick)


@contextmanager
def _no_other_cluster() -> Iterator[None]:
    """Have a thread that calls Ray after its cluster is gone fail; Ray would start another one."""
    before = auto_init_hook.enable_auto_connect
    auto_init_hook.enable_auto_connect = False
    try:
        yield
    finally:
        for thread in threading.enumerate():
            if thread.name == _PUMP:
                thread.join(timeout=_PUMP_ENDS_S)
        auto_init_hook.enable_auto_connect = before


def _tell(tick: Tick, place: int, read: int) -> None:
    tick({place: read})


class _Meter:
    """Adds up what a task has read, and tells."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell, self._read = tell, 0

    def __call__(self, more: int) -> None:
        self._read += more
        self._tell(self._read)


def _map_on_ray(call: Call[T, R], tasks: Sequence[T], tick: Tick) -> Iterator[tuple[int, R]]:
    answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="rayway-meters-", ignore_cleanup_errors=True) as meters:
        # Ray's loop may not run on the thread that has to answer signals
        threading.Thread(
            target=_pump, args=(call, tasks, meters, answers), name=_PUMP, daemon=True
        ).start()
        left = len(tasks)
        while left:
            try:
                place, answer = answers.get(timeout=_POLL_S)
            except queue.Empty:
                tick(_read_meters(Path(meters)))
                continue
            if isinstance(answer, RaywayError):
                raise answer
            if isinstance(answer, BaseException):
                raise _explain(answer) from answer
            left -= 1
            yield place, answer


def _pump(
    call: Call[T, R], tasks: Sequence[T], meters: str, answers: "queue.SimpleQueue[Any]"
) -> None:
    try:
        for row in _dataset(call, tasks, meters).iter_rows():
            answers.put((row["place"], pickle.loads(row["answer"])))  # noqa: S301 - our own task's
    except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
        answers.put((-1, error))


def _import_ray_data() -> Any:
    return importlib.import_module("ray.data")


def _dataset(call: Call[T, R], tasks: Sequence[T], meters: str) -> Any:
    data = _import_ray_data()
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    # an answer is small; Ray Data would hold back tasks for lack of room for 128 MB from each
    context.target_max_block_size = 1 << 20
    context.op_resource_reservation_enabled = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    items = [{"place": i, "task": pickle.dumps(task)} for i, task in enumerate(tasks)]
    return data.from_items(items, override_num_blocks=len(items)).map(
        _answer, fn_kwargs={"call": call, "meters": meters}, num_cpus=1
    )


def _answer(row: dict[str, Any], *, call: Call[Any, Any], meters: str) -> dict[str, Any]:
    """Do one task. Called by Ray in a worker."""
    pa.set_cpu_count(1)  # a task has one CPU
    place = int(row["place"])
    file = Path(meters, str(place))

    def tell(read: int) -> None:
        with suppress(OSError):  # it is only for the eye
            file.write_text(str(read))

    try:
        answer = call(pickle.loads(row["task"]), _Meter(tell))  # noqa: S301 - our own driver's
    except RaywayError as error:
        answer = error
    with suppress(OSError):
        file.unlink(missing_ok=True)
    return {"place": place, "answer": pickle.dumps(answer)}


def _read_meters(folder: Path) -> dict[int, int]:
    found = {}
    for file in os.scandir(folder):
        with suppress(OSError, ValueError):
            found[int(file.name)] = int(Path(file.path).read_text())
    return found


def _explain(error: BaseException) -> BaseException:
    """Return what a failed job is to be raised as: our own mistakes as they are."""
    if isinstance(getattr(error, "cause", None), Exception):  # raised by a task, unexpectedly
        return error
    return RaywayError(
        f"the process of a task died again and again (killed, crashed, or out of memory): "
        f"{type(error).__name__}: {error}. What is done stays; with fewer --workers each has more "
        f"memory."
    )
