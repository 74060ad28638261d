"""The batch arithmetic: global batch = ranks x accumulation x micro-batch."""

from dataclasses import dataclass
from math import isqrt

from rayway.errors import SpecError
from rayway.spec.job import BatchSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """How one global batch is cut. ``global_batch == dp_size * accumulation * micro_batch``."""

    global_batch: int
    """Samples per optimizer step, over all ranks."""
    micro_batch: int
    """Samples per forward pass on one rank."""
    accumulation: int
    """Micro-batches per rank per step."""
    dp_size: int
    """Data-parallel ranks."""

    def sentence(self) -> str:
        """Say the plan in one sentence."""
        return (
            f"A step takes {_count(self.global_batch, 'sample')}: "
            f"{_count(self.dp_size, 'rank')} x {_count(self.accumulation, 'micro-batch')} "
            f"x {_count(self.micro_batch, 'sample')}."
        )


def plan_batch(spec: BatchSpec, *, dp_size: int) -> BatchPlan:
    """Cut the global batch for a number of ranks.

    Args:
        spec: Without ``micro_batch``, a rank takes its whole share in one forward pass.
        dp_size: Data-parallel ranks, 1 or more: ``max(workers, 1)``.

    Raises:
        SpecError: The numbers do not divide; the message has the nearest that do.
    """
    micro_batch = spec.micro_batch
    if micro_batch is None:
        share, left_over = divmod(spec.global_batch, dp_size)
        if left_over or not share:
            below, above = nearest_global_batches(spec.global_batch, per_pass=dp_size)
            raise SpecError(
                f"batch.global_batch={spec.global_batch} does not split evenly over "
                f"{_count(dp_size, 'rank')}. Use {_either(below, above)}, or change scale.workers."
            )
        micro_batch = share
    passes = accumulation(global_batch=spec.global_batch, micro_batch=micro_batch, dp_size=dp_size)
    return BatchPlan(
        global_batch=spec.global_batch,
        micro_batch=micro_batch,
        accumulation=passes,
        dp_size=dp_size,
    )


def accumulation(*, global_batch: int, micro_batch: int, dp_size: int) -> int:
    """Return how many micro-batches each rank adds up before one optimizer step.

    Args:
        global_batch: Samples per optimizer step, over all ranks.
        micro_batch: Samples per forward pass on one rank.
        dp_size: Data-parallel ranks; the world size, unless the model itself is split.

    Returns:
        Micro-batches per rank per step, 1 or more.

    Raises:
        SpecError: ``global_batch`` is not a whole multiple of ``micro_batch * dp_size``.
    """
    per_pass = micro_batch * dp_size
    passes, left_over = divmod(global_batch, per_pass)
    if left_over or not passes:
        below, above = nearest_global_batches(global_batch, per_pass=per_pass)
        micro = nearest_micro_batches(global_batch, micro_batch=micro_batch, dp_size=dp_size)
        change = f"batch.micro_batch={' or '.join(map(str, micro))}" if micro else ""
        raise SpecError(
            f"batch.global_batch={global_batch} does not split over {_count(dp_size, 'rank')}: it "
            f"is not a multiple of micro_batch x ranks = {micro_batch} x {dp_size} = {per_pass}. "
            f"Use {_either(below, above)}, or {change or 'change batch.micro_batch'}."
        )
    return passes


def nearest_global_batches(global_batch: int, *, per_pass: int) -> tuple[int | None, int]:
    """Return the nearest multiples of ``per_pass`` samples below (``None``: none) and above."""
    passes = global_batch // per_pass
    return passes * per_pass or None, (passes + 1) * per_pass


def nearest_micro_batches(global_batch: int, *, micro_batch: int, dp_size: int) -> list[int]:
    """Return the nearest micro-batches, below and above, that cut a rank's share evenly.

    Empty if the ranks' shares are not equal, whatever the micro-batch.
    """
    share, left_over = divmod(global_batch, dp_size)
    if left_over or not share:
        return []
    small = [size for size in range(1, isqrt(share) + 1) if share % size == 0]
    sizes = {*small, *(share // size for size in small)}
    below = max((size for size in sizes if size < micro_batch), default=None)
    above = min((size for size in sizes if size > micro_batch), default=None)
    return [size for size in (below, above) if size]


def _either(below: int | None, above: int) -> str:
    return f"{below} or {above}" if below else f"{above}"


def _count(number: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{number} {word if number == 1 else plural}"
