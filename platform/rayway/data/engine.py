"""What fills a feed: a function from units, in order of need, to their columns, in that order.

An engine only fetches; it cannot change the order of samples, so one may take another's place even
between two lives of a run.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from rayway.data.columns import Columns
from rayway.data.plan import Unit

Engine = Callable[[Iterator[Unit]], Generator[Columns, None, None]]
"""Takes units lazily; may take some ahead of what it gave. Closing what it returned ends its reads.

A feed may call it twice: a rank without a row asks for one apart from its own units.
"""


def local_engine(
    read: Callable[[Unit], Columns], *, threads: int = 1, ahead: int | None = None
) -> Engine:
    """Return the engine that reads in threads of this process.

    Args:
        read: Reads one unit; called from all threads.
        threads: Reads in flight. Storage latency x units needed per second is enough.
        ahead: Units read before they are asked for. ``None``: twice the threads.
    """
    most_ahead = 2 * threads if ahead is None else ahead

    def run(units: Iterator[Unit]) -> Generator[Columns, None, None]:
        waiting: deque[Future[Columns]] = deque()
        pool = ThreadPoolExecutor(threads, "rayway-read")
        try:
            for unit in units:
                waiting.append(pool.submit(read, unit))
                if len(waiting) > most_ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    return run
