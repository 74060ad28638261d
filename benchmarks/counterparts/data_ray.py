"""Consumers as Ray actors: Ray Data's ``streaming_split``, and rayway's ``ray`` engine.

``how`` is ``data`` or ``rayway``. One process starts a cluster of its own and all consumers, who
have imported everything and wait when it says that it is ready. Ray Data shuffles files only, so
that it is not charged for a shuffle buffer.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch
from ray.data import DataContext

from data_consumer import (
    Asked,
    Batch,
    Taken,
    arrays_of,
    drain,
    finish,
    parquet_files,
    read_asked,
    tensors_of,
    wait_for_go,
)
from data_rayway import SEED, convert, planned
from rayway.data.recipe import Order, ReaderRecipe
from rayway.data.router import start_router
from rayway.data.rows import ray_engine

CPUS = 2
STORE_BYTES = 1 << 30
Open = Callable[[], Iterable[Batch]]


class Consumer:
    """One consumer."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def drain(self, batches: Open, asked: Asked, family: int) -> Taken:
        """Take batches; see :func:`data_consumer.drain`."""
        return drain(batches, asked, family)


def split_by_ray_data(asked: Asked) -> list[Open]:
    """Return how each consumer opens its part of one Ray Data pipeline.

    One pass over a folder of copies of the shards, as each pass costs a new start. Naming a file
    several times would not do: Ray Data then leaves out rows.
    """
    filesystem, paths = parquet_files(replace(asked, source=f"{asked.source}_copies"))
    stored = ray.data.read_parquet(paths, filesystem=filesystem, shuffle="files")
    return [partial(_batches_of, each, asked) for each in stored.streaming_split(asked.world)]


def split_by_rayway(asked: Asked) -> list[Open]:
    """Return how each consumer opens its rank of rayway's pipeline."""
    plan = planned(asked)
    router = start_router(world_size=asked.world, data_cpus=CPUS, store_bytes=STORE_BYTES // 2)
    order = Order(
        plan=plan,
        recipe=ReaderRecipe(seed=SEED),
        start=0,
        stop=max(1, round(asked.rows * asked.world / _rows_in(asked))) * plan.steps_per_epoch,
        world_size=asked.world,
    )
    return [partial(_steps_of, router, order, rank, asked) for rank in range(asked.world)]


def _batches_of(split: Any, asked: Asked) -> Iterator[Batch]:
    for table in split.iter_batches(batch_size=asked.batch, batch_format="pyarrow"):
        yield tensors_of(arrays_of(table))


def _steps_of(router: Any, order: Order, rank: int, asked: Asked) -> Iterator[Batch]:
    from rayway.data.feed import Feed  # noqa: PLC0415 - in the consumer's process

    with Feed(
        order.plan,
        rank=rank,
        world_size=asked.world,
        micro_batch=asked.batch,
        stop_step=order.stop,
        engine=ray_engine(router, "train", order, rank=rank),
    ) as feed:
        for step in feed:
            for micro_batch in step:
                yield list(micro_batch.columns.values())


def _rows_in(asked: Asked) -> int:
    return int(planned(asked).streams[0].index.total)


def main() -> None:
    """Be the driver of all consumers."""
    asked = read_asked()
    if asked.convert:
        convert(asked)
        return
    # its sockets lie in here, and their paths must be short
    with tempfile.TemporaryDirectory(prefix="rd-", ignore_cleanup_errors=True) as folder:
        ray.init(
            "local",
            num_cpus=CPUS,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=folder,
        )
        DataContext.get_current().enable_progress_bars = False
        consumers = [ray.remote(num_cpus=0)(Consumer).remote() for _ in range(asked.world)]
        ray.get([each.__ray_ready__.remote() for each in consumers])
        warm = ray.remote(_warm)
        ray.get([warm.remote() for _ in range(CPUS)])
        wait_for_go()
        opens = (split_by_rayway if asked.how == "rayway" else split_by_ray_data)(asked)
        taken = ray.get(
            [
                each.drain.remote(batches, asked, os.getpid())
                for each, batches in zip(consumers, opens, strict=True)
            ]
        )
        ray.shutdown()
        finish(taken)


def _warm() -> None:
    """Do nothing, so that there are idle worker processes as on a cluster that has run before."""


if __name__ == "__main__":
    main()
