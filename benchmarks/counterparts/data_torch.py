"""torch's DataLoader over Parquet: row groups in shuffled order, their rows shuffled.

``how`` is the number of worker processes. Each is an iterable data set that yields whole batches.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data_consumer import Asked, Batch, arrays_of, parquet_files, serve, tensors_of


class RowGroups(IterableDataset[list[torch.Tensor]]):
    """The batches of this consumer's row groups, for ever."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        """Yield batches; the rows of a batch are of one row group."""
        asked, worker = self.asked, get_worker_info()
        filesystem, paths = parquet_files(asked)
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = paths[asked.rank * workers + number :: asked.world * workers]
        shuffle = np.random.default_rng(asked.rank * workers + number)
        while True:
            for shard in shuffle.permutation(len(mine)).tolist():
                file = pq.ParquetFile(mine[shard], filesystem=filesystem, pre_buffer=True)
                for group in shuffle.permutation(file.num_row_groups).tolist():
                    arrays = arrays_of(file.read_row_group(group, use_threads=False))
                    order = shuffle.permutation(len(next(iter(arrays.values()))))
                    for begin in range(0, len(order), asked.batch):
                        rows = order[begin : begin + asked.batch]
                        yield list(tensors_of({k: x[rows] for k, x in arrays.items()}))


def batches(asked: Asked) -> Iterator[Batch]:
    """Yield batches."""
    yield from DataLoader(RowGroups(asked), batch_size=None, num_workers=int(asked.how))


if __name__ == "__main__":
    serve(batches)
