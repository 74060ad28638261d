"""MosaicML's StreamingDataset over its own format, shuffled by its default, py1e."""

import importlib.machinery
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from data_consumer import PIXELS, TOKENS, Asked, Batch, serve, stored_arrays

try:
    import torchvision  # noqa: F401 - only to see whether it fits the torch that is here
except (ImportError, RuntimeError):
    # streaming imports it for picture data sets that are not used here; PyPI's CPU torch has none
    for _name in ("torchvision", "torchvision.datasets", "torchvision.transforms.functional"):
        sys.modules.pop(_name, None)
        _module: Any = ModuleType(_name)
        _module.__spec__ = importlib.machinery.ModuleSpec(_name, None)
        _module.__path__ = []
        _module.VisionDataset, _module.to_tensor = object, None
        sys.modules[_name] = _module
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

SHARD_BYTES = "8mb"


def batches(asked: Asked) -> Iterator[Batch]:
    """Yield batches for ever."""
    if asked.rank == 0:
        clean_stale_shared_memory()
    if asked.own.startswith("s3://"):
        os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
        place = {"remote": asked.own, "local": f"{asked.scratch}/mds"}
    else:
        place = {"local": asked.own}
    stored = StreamingDataset(**place, shuffle=True, batch_size=asked.batch)
    while True:
        for batch in DataLoader(stored, batch_size=asked.batch):
            yield list(batch.values())


def convert(asked: Asked) -> None:
    """Write its format."""
    kinds = (
        {"image": f"ndarray:uint8:{PIXELS}", "label": "int"}
        if asked.images
        else {"tokens": f"ndarray:int32:{TOKENS}"}
    )
    with MDSWriter(out=asked.own, columns=kinds, size_limit=SHARD_BYTES) as writer:
        for arrays in stored_arrays(asked):
            for row in range(len(next(iter(arrays.values())))):
                values = {name: array[row] for name, array in arrays.items()}
                if asked.images:
                    values["label"] = int(values["label"])
                writer.write(values)


if __name__ == "__main__":
    serve(batches, convert)
