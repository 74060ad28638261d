"""What fills a feed: a function from units, in order of need, to their rows, in that order.

An engine only fetches; it cannot change the order of samples, so one may take another's place even
between two lives of a run.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from rayway.data.columns import Rows
from rayway.data.stream import Unit

Engine = Callable[[Iterator[Unit]], Generator[Rows, None, None]]
"""Takes units lazily; may take some ahead of what it gave. Closing what it returned ends its reads.

A feed may call it twice: a rank without a row asks for one apart from its own units.
"""

_MAX_THREADS = 16
_FIRST_AHEAD = 2


def local_engine(read: Callable[[Unit], Rows], *, budget_bytes: int, unit_bytes: int) -> Engine:
    """Return the engine that reads in threads of this process.

    It reads two units ahead at first and one more each time the consumer had to wait, so that it
    finds by itself how much latency there is to hide.

    Args:
        read: Reads one unit; called from up to 16 threads at once.
        budget_bytes: What the units read ahead may hold. One unit is always read ahead.
        unit_bytes: The size of a unit in memory.
    """
    most = max(budget_bytes // max(unit_bytes, 1), 1)

    def run(units: Iterator[Unit]) -> Generator[Rows, None, None]:
        waiting: deque[Future[Rows]] = deque()
        ahead = min(_FIRST_AHEAD, most)
        pool = ThreadPoolExecutor(_MAX_THREADS, "rayway-read")

        def fill() -> None:
            """Have the next unit and ``ahead`` more in flight, as far as there are units."""
            for unit in islice(units, ahead + 1 - len(waiting)):
                waiting.append(pool.submit(read, unit))

        try:
            fill()
            while waiting:
                if not waiting[0].done() and ahead < most:
                    ahead += 1
                    fill()
                yield waiting.popleft().result()
                fill()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    return run
