"""A copy of a state in host memory, most of it made while training goes on.

Nothing but the optimizer's update changes weights and moments. So they are copied by a thread,
beside the next forward and backward pass; only the next update has to wait for it. What else may
change at any time is copied before ``begin`` returns.

The buffers are kept: fresh memory costs more than the copy, since the kernel has to clear it.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rayway.checkpoint.share import Share, Tensors, plan_share
from rayway.checkpoint.tensors import storable
from rayway.errors import CheckpointError

_SHOWN = 3


class TornCopy(CheckpointError):  # noqa: N818 - reads as what it says
    """The state changed while it was copied."""


class Moment:
    """When a copy was begun: as which, its tensors are the same at its end."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._versions = {name: tensor._version for name, tensor in tensors.items()}
        self.ready = _mark(tensors)

    def changed(self) -> list[str]:
        """Return the names of tensors that were written to since."""
        return [
            name
            for name, tensor in self._tensors.items()
            if tensor._version != self._versions[name]
        ]


class Snapshot:
    """A copy under way. One thread makes it (``finish``), others may wait for it."""

    def __init__(
        self, plan: Callable[[], Share], buffers: "HostBuffers", early: set[str], later: Moment
    ) -> None:
        self._plan = plan
        self._buffers = buffers
        self._early = early
        self._later = later
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._waiting_since: float | None = None
        self.waited_s = 0.0
        """How long a thread stood still in ``wait`` so far, in seconds."""

    def finish(self) -> Share:
        """Make the rest of the copy, and return this rank's share of the state as it was.

        Raises:
            CheckpointError: A tensor cannot be stored.
            TornCopy: A tensor changed while it was copied, so the copy is of no moment.
        """
        try:
            share = self._plan()
            with _beside(self._later.ready):
                copies = {
                    name: self._buffers.kept(name)
                    if name in self._early
                    else self._buffers.fill(name, tensor)
                    for name, tensor in share.tensors.items()
                }
            changed = self._later.changed()
        finally:
            self._settle()
        if changed:
            raise TornCopy(
                f"{len(changed)} tensors were changed between a save and the next update of the "
                f"optimizer, while they were copied: {', '.join(sorted(changed)[:_SHOWN])}. "
                "The copy is thrown away."
            )
        self._buffers.keep_only(copies)
        return share.holding(copies)

    @property
    def done(self) -> bool:
        """Whether the state may change now."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the state may change."""
        if self._done.is_set():
            return
        with self._lock:
            self._waiting_since = time.perf_counter()
        self._done.wait()

    def _settle(self) -> None:
        # the waiting thread is on its way already when it could count for itself
        with self._lock:
            if self._waiting_since is not None:
                self.waited_s += time.perf_counter() - self._waiting_since
                self._waiting_since = None
            self._done.set()


def _mark(tensors: Mapping[str, Tensor]) -> torch.cuda.Event | None:
    """Return a mark in the GPU's queue of work, behind all that was asked of it so far."""
    device = next((t.device for t in tensors.values() if t.device.type == "cuda"), None)
    if device is None:
        return None
    with torch.cuda.device(device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's
        event.record()
    return event


@contextmanager
def _beside(ready: torch.cuda.Event | None) -> Iterator[None]:
    """Let copies run on a stream of their own, from a mark on, and wait for them at the end."""
    if ready is None:
        yield
        return
    with torch.cuda.device(ready.device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _copy(host: Tensor, tensor: Tensor, *, wait: bool) -> None:
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        # one core is enough and leaves the others to training; the interpreter is not held
        ctypes.memmove(host.data_ptr(), tensor.data_ptr(), host.nbytes)
    else:
        host.copy_(tensor, non_blocking=not wait)


class HostBuffers:
    """Host memory for copies of one rank's share, allocated once. One copy at a time."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def begin(
        self,
        tensors: Tensors,
        *,
        constant: Collection[str],
        replicated: Collection[str] = (),
        rank: int = 0,
        world_size: int = 1,
    ) -> Snapshot:
        """Begin a copy of a rank's share of a state; it overwrites the one before.

        Args:
            tensors: The state as this rank has it.
            constant: What only the optimizer's update changes, by ``stem/name``: it must stay as it
                is until the copy is done.
            replicated: What all ranks have equal, unless it is cut over them, by ``stem/name``.
            rank: This one.
            world_size: How many ranks save together.
        """
        early, later = set(), {}
        with torch.no_grad():
            for stem, part in tensors.items():
                for name, tensor in part.items():
                    full = f"{stem}/{name}"
                    block = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    if full in constant:
                        later[full] = block
                    elif rank == 0 or block is not tensor or full in replicated:  # maybe ours
                        self.fill(full, storable(full, block), wait=True)
                        early.add(full)
        return Snapshot(
            lambda: plan_share(tensors, rank=rank, world_size=world_size, replicated=replicated),
            self,
            early,
            Moment(later),
        )

    def fill(self, name: str, tensor: Tensor, *, wait: bool = False) -> Tensor:
        """Copy a tensor into the buffer of this name, and return that.

        Args:
            name: The buffer's.
            tensor: What to copy.
            wait: Until it is there. From a GPU it is on its way otherwise.
        """
        host = self._kept.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            on_gpu = tensor.device.type == "cuda"
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            self._kept[name] = host
        _copy(host, tensor, wait=wait)
        return host

    def kept(self, name: str) -> Tensor:
        """Return the buffer of this name."""
        return self._kept[name]

    def keep_only(self, names: Collection[str]) -> None:
        """Let go of all other buffers."""
        self._kept = {name: self._kept[name] for name in names}
