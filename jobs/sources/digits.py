"""Scikit-learn's 1,797 handwritten digits, 8 x 8 grey levels each, as Parquet shards."""

import hashlib

import numpy as np
import pyarrow as pa
from sklearn.datasets import load_digits

from sources.shards import write_splits

PIXELS = 64
TEST_FRACTION = 0.2


def prepare(folder: str) -> None:
    """Write ``folder/train`` (8 shards) and ``folder/test`` (2 shards).

    Columns: ``image``, a list of 64 uint8 from 0 to 16, row by row; ``label``, int64 from 0 to 9.
    One image in five of each digit is held out; which ones, and the order of the rows, follows
    from a hash of the image. The same scikit-learn and pyarrow give the same bytes.

    Args:
        folder: The local folder to make.

    Raises:
        DataError: ``folder`` is not local, or holds something else.
    """
    images, labels = load_digits(return_X_y=True)
    images, labels = images.astype(np.uint8), labels.astype(np.int64)
    hashes = np.array([hashlib.sha256(image.tobytes()).hexdigest() for image in images])
    by_hash = np.argsort(hashes)  # an order that mixes the digits and depends on nothing else
    images, labels = images[by_hash], labels[by_hash]
    held_out = np.zeros(len(labels), dtype=bool)
    for digit in np.unique(labels):
        of_digit = np.flatnonzero(labels == digit)
        held_out[of_digit[: round(len(of_digit) * TEST_FRACTION)]] = True
    write_splits(
        folder,
        {
            "train": _table(images[~held_out], labels[~held_out]),
            "test": _table(images[held_out], labels[held_out]),
        },
        shard_rows=180,
        group_rows=60,
    )


def _table(images: np.ndarray, labels: np.ndarray) -> pa.Table:
    return pa.table(
        {
            "image": pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), PIXELS),
            "label": pa.array(labels),
        }
    )
