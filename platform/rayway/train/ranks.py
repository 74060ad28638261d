"""The few things the loop asks of the other ranks. Without a process group there are none."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class Pending:
    """A sum over ranks that is still on its way."""

    def __init__(self, values: Tensor, work: dist.Work | None) -> None:
        self._values = values
        self._work = work

    def wait(self) -> Tensor:
        """Return the sum, once it is there."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._values


def grouped() -> bool:
    """Is this process one of several ranks? One rank alone has nobody to wait for."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def dp_size() -> int:
    """Return the number of data-parallel ranks."""
    return dist.get_world_size() if grouped() else 1


def start_sum(values: Tensor) -> Pending:
    """Begin to add ``values`` up over all ranks, in place; training goes on meanwhile."""
    if not grouped():
        return Pending(values, None)
    return Pending(values, dist.all_reduce(values, async_op=True))


def sum_over_ranks(values: Tensor) -> Tensor:
    """Add ``values`` up over all ranks, in place, and wait for it."""
    return start_sum(values).wait()


def take_from_first(values: Iterable[Tensor]) -> None:
    """Overwrite each of ``values`` with what rank 0 has, and wait for it."""
    if grouped():
        for value in values:
            dist.broadcast(value, src=0)


def barrier() -> None:
    """Wait until every rank is here."""
    if grouped():
        sum_over_ranks(torch.zeros(1))
