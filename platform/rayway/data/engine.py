"""What fills a feed: a function from units, in order of need, to their rows, in that order.

An engine only fetches; it cannot change the order of samples, so one may take another's place even
between two lives of a run.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from rayway.data.columns import Rows
from rayway.data.stages import Stages
from rayway.data.stream import Unit

Engine = Callable[[Iterator[Unit]], Generator[Rows, None, None]]
"""Takes units lazily; may take some ahead of what it gave. Closing what it returned ends its reads.

A feed may call it twice: a rank without a row asks for one apart from its own units.
"""

_MAX_THREADS = 16
_FIRST = 2
_MOST_CONTENDED = 0.25


def local_engine(
    read: Callable[[Unit], Rows],
    *,
    budget_bytes: int,
    unit_bytes: int,
    stages: Stages | None = None,
) -> Engine:
    """Return the engine that reads in threads of this process.

    It begins with two threads and two units read ahead. Each time the consumer had to wait it reads
    one unit further ahead, and with one thread more: so it finds by itself how much latency there
    is to hide.

    Args:
        read: Reads one unit; called from up to 16 threads at once.
        budget_bytes: What the units read ahead may hold. One unit is always read ahead.
        unit_bytes: The size of a unit in memory.
        stages: Where ``read`` counts its time. If given, no thread is added while the threads
            there are get in each other's way, as they do where reading is bound by cores.
    """
    most = max(budget_bytes // max(unit_bytes, 1), 1)

    def run(units: Iterator[Unit]) -> Generator[Rows, None, None]:
        crew, waiting, ahead = _Crew(read, stages), deque[Future[Rows]](), min(_FIRST, most)
        try:
            while True:
                waiting.extend(map(crew.submit, islice(units, ahead + 1 - len(waiting))))
                if not waiting:
                    return
                head = waiting.popleft()
                late = not head.done()
                rows = head.result()
                if late:
                    ahead = min(ahead + 1, most)
                    crew.grow()
                waiting.extend(map(crew.submit, islice(units, ahead - len(waiting))))
                yield rows
        finally:
            crew.close()

    return run


class _Crew:
    """Threads that read units in the order submitted, only as many at once as was found to pay.

    More threads than cores to decode on cost up to twice the CPU time and are slower.
    """

    def __init__(self, read: Callable[[Unit], Rows], stages: Stages | None) -> None:
        self._read, self._stages = read, stages
        self._pool = ThreadPoolExecutor(_MAX_THREADS, "rayway-read")
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Unit, Future[Rows]]] = deque()
        self._working, self._most = 0, _FIRST
        self._counted = self._count()

    def submit(self, unit: Unit) -> "Future[Rows]":
        """Have a unit read; it is begun once a thread is free."""
        future: Future[Rows] = Future()
        with self._lock:
            self._jobs.append((unit, future))
            if self._working < self._most:
                self._working += 1
                self._pool.submit(self._work)
        return future

    def grow(self) -> None:
        """Read with one thread more, unless those there are get in each other's way."""
        spent, contended = self._count()
        spent, contended = spent - self._counted[0], contended - self._counted[1]
        if self._stages is not None and (not spent or contended > _MOST_CONTENDED * spent):
            return
        self._counted = self._count()
        with self._lock:
            self._most = min(self._most + 1, _MAX_THREADS)
            if self._jobs and self._working < self._most:
                self._working += 1
                self._pool.submit(self._work)

    def close(self) -> None:
        """Begin no more reads; those in flight end by themselves and are not waited for."""
        with self._lock:
            self._jobs.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count(self) -> tuple[float, float]:
        """Return the seconds that all threads spent on reads, and those lost to contention."""
        if self._stages is None:
            return 0.0, 0.0
        return sum(self._stages.seconds().values()), self._stages.contended_s

    def _work(self) -> None:
        """Read until nothing is left to be read."""
        while True:
            with self._lock:
                if not self._jobs:
                    self._working -= 1
                    return
                unit, future = self._jobs.popleft()
            try:
                future.set_result(self._read(unit))
            except BaseException as error:  # noqa: BLE001 - raised where the unit's rows are taken
                future.set_exception(error)
