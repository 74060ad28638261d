"""rayway's own engine: threads of the training process read row groups.

The index is read from a file, as a worker reads that of its run.
"""

from collections.abc import Iterator
from pathlib import Path

from data_consumer import Asked, Batch, serve
from rayway.data.feed import Feed
from rayway.data.index import Index, build_index
from rayway.data.plan import Plan, plan_order

SEED = 1


def planned(asked: Asked) -> Plan:
    """Return the order, from the index that :func:`convert` wrote."""
    index = Index.from_bytes(Path(asked.own).read_bytes())
    return plan_order(index, global_batch=asked.batch * asked.world, seed=SEED)


def batches(asked: Asked) -> Iterator[Batch]:
    """Yield batches for ever."""
    with Feed(
        planned(asked), rank=asked.rank, world_size=asked.world, micro_batch=asked.batch
    ) as feed:
        for step in feed:
            for micro_batch in step:
                yield list(micro_batch.columns.values())


def convert(asked: Asked) -> None:
    """Write the index."""
    Path(asked.own).write_bytes(build_index(asked.source).to_bytes())


if __name__ == "__main__":
    serve(batches, convert)
