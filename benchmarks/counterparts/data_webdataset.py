"""WebDataset over tar files, shuffled by its buffer."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import torch
import webdataset as wds

from data_consumer import SHUFFLE_ROWS, Asked, Batch, filesystem_of, serve, stored_arrays

TAR_ROWS = 2400


def batches(asked: Asked) -> Iterator[Batch]:
    """Yield batches for ever."""
    names = ("image.npy", "label.cls") if asked.images else ("tokens.npy",)
    tars = wds.WebDataset(
        _urls(asked), shardshuffle=100, nodesplitter=wds.split_by_node, empty_check=False
    )
    rows = tars.shuffle(SHUFFLE_ROWS).decode().to_tuple(*names).batched(asked.batch)
    while True:
        for batch in rows:
            yield [torch.as_tensor(column) for column in batch]


def convert(asked: Asked) -> None:
    """Write tar files."""
    Path(asked.own).mkdir(parents=True)
    number = 0
    with wds.ShardWriter(f"{asked.own}/%05d.tar", maxcount=TAR_ROWS, verbose=0) as writer:
        for arrays in stored_arrays(asked):
            for row in range(len(next(iter(arrays.values())))):
                sample: dict[str, Any] = {"__key__": f"{number:08d}"}
                for name, array in arrays.items():
                    ending = "cls" if name == "label" else "npy"
                    sample[f"{name}.{ending}"] = int(array[row]) if ending == "cls" else array[row]
                writer.write(sample)
                number += 1


def _urls(asked: Asked) -> list[str]:
    filesystem, folder = filesystem_of(asked.own)
    found = filesystem.get_file_info(pafs.FileSelector(folder))
    paths = sorted(each.path for each in found if each.path.endswith(".tar"))
    if not asked.own.startswith("s3://"):
        return paths
    return [f"pipe:curl -sf {os.environ['AWS_ENDPOINT_URL']}/{path}" for path in paths]


if __name__ == "__main__":
    serve(batches, convert)
