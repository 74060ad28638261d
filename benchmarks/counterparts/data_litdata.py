"""LitData over its own format: its TokensLoader for tokens, plain items for pictures."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from data_consumer import TOKENS, Asked, Batch, read_asked, serve, stored_arrays

CHUNK_ROWS = 16_384


def batches(asked: Asked) -> Iterator[Batch]:
    """Yield batches for ever."""
    loader: dict[str, Any] = {}
    if not asked.images:
        loader["item_loader"] = TokensLoader(block_size=TOKENS)
    if asked.own.startswith("s3://"):
        loader["storage_options"] = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        loader["cache_dir"] = f"{asked.scratch}/litdata"
    stored = StreamingDataset(asked.own, shuffle=True, drop_last=True, **loader)
    while True:
        for batch in StreamingDataLoader(stored, batch_size=asked.batch):
            yield [batch] if isinstance(batch, torch.Tensor) else list(batch.values())


def rows(asked: Asked) -> Iterator[Any]:
    """Yield the source's rows as its items."""
    for arrays in stored_arrays(asked):
        for row in range(len(next(iter(arrays.values())))):
            if asked.images:  # as numpy: its tensors take 20 times as long to read
                yield {"image": arrays["image"][row], "label": int(arrays["label"][row])}
            else:
                yield torch.from_numpy(arrays["tokens"][row].copy())


def convert(asked: Asked) -> None:
    """Write its format."""
    size = {"chunk_size": CHUNK_ROWS * (1 if asked.images else TOKENS)}
    loader = {} if asked.images else {"item_loader": TokensLoader()}
    if asked.images:
        size["chunk_size"] //= 8
    optimize(rows, [asked], asked.own, num_workers=1, verbose=False, **size, **loader)


if __name__ == "__main__":
    group = read_asked()
    if group.world > 1:  # it asks torch who reads what
        torch.distributed.init_process_group("gloo", rank=group.rank, world_size=group.world)
    serve(batches, convert)
