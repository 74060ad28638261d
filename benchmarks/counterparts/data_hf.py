"""Hugging Face datasets, streaming Parquet, shuffled by its buffer, in torch's format."""

from collections.abc import Iterator

import torch
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from data_consumer import SHUFFLE_ROWS, Asked, Batch, parquet_files, serve


def batches(asked: Asked) -> Iterator[Batch]:
    """Yield batches for ever."""
    _, paths = parquet_files(asked)
    scheme = "s3://" if asked.source.startswith("s3://") else ""
    stored = load_dataset(
        "parquet", data_files=[scheme + path for path in paths], split="train", streaming=True
    )
    mine = split_dataset_by_node(stored, asked.rank, asked.world)
    mine = mine.shuffle(seed=0, buffer_size=SHUFFLE_ROWS).with_format("torch")
    epoch = 0
    while True:
        mine.set_epoch(epoch)
        for batch in DataLoader(mine, batch_size=asked.batch):
            yield [value for value in batch.values() if isinstance(value, torch.Tensor)]
        epoch += 1


if __name__ == "__main__":
    serve(batches)
