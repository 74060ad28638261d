"""What ranks ask of each other, with a group and without."""

import pytest
import torch
from rank_pool import Ranks

from rayway.train.ranks import barrier, dp_size, grouped, start_sum, sum_over_ranks


def everything() -> tuple[bool, int, list[float], list[float], bool]:
    rank = torch.distributed.get_rank() if grouped() else 0
    waited = sum_over_ranks(torch.tensor([1.0, float(rank)]))
    values = torch.tensor([2.0])
    pending = start_sum(values)
    first, second = pending.wait(), pending.wait()
    barrier()
    return grouped(), dp_size(), waited.tolist(), first.tolist(), first is second is values


def test_a_process_without_a_group_is_one_rank() -> None:
    assert everything() == (False, 1, [1.0, 0.0], [2.0], True)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums_are_the_same_on_every_rank(world_size: int, ranks: Ranks) -> None:
    total = float(sum(range(world_size)))
    several = world_size > 1  # a group of one has nobody to wait for
    expected = (several, world_size, [float(world_size), total], [2.0 * world_size], True)
    assert ranks.run(everything, world_size=world_size) == [expected] * world_size
