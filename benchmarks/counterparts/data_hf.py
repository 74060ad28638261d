"""Hugging Face datasets, streaming Parquet, shuffled by its buffer, in torch's format.

It refuses fixed-size binary, so the rows are written anew as lists.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node

from data_consumer import SHUFFLE_ROWS, Asked, Batch, parquet_files, serve, stored_arrays


def batches(asked: Asked) -> Iterator[Batch]:
    """Yield batches for ever."""
    _, paths = parquet_files(replace(asked, source=asked.own))
    scheme = "s3://" if asked.own.startswith("s3://") else ""
    stored = load_dataset(
        "parquet", data_files=[scheme + path for path in paths], split="train", streaming=True
    )
    mine = split_dataset_by_node(stored, asked.rank, asked.world)
    mine = mine.shuffle(seed=0, buffer_size=SHUFFLE_ROWS).with_format("torch")
    epoch = 0
    while True:
        mine.set_epoch(epoch)
        for batch in mine.iter(batch_size=asked.batch):  # half the CPU of a DataLoader
            yield [value for value in batch.values() if isinstance(value, torch.Tensor)]
        epoch += 1


def convert(asked: Asked) -> None:
    """Write a file for each row group."""
    Path(asked.own).mkdir(parents=True)
    for number, arrays in enumerate(stored_arrays(asked)):
        columns = {
            name: pa.array(array)
            if array.ndim == 1
            else pa.ListArray.from_arrays(
                pa.array(np.arange(len(array) + 1, dtype=np.int32) * array.shape[1]),
                pa.array(array.ravel()),
            )
            for name, array in arrays.items()
        }
        pq.write_table(pa.table(columns), f"{asked.own}/{number:05d}.parquet")


if __name__ == "__main__":
    serve(batches, convert)
