"""The source code of Python's own standard library, as rows of bytes in Parquet shards."""

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa

from sources.shards import write_splits

SEQ_LEN = 128
"""Bytes that a model predicts in one row; a row holds one more, to predict the first from."""

END_OF_FILE = b"\0"
HELD_OUT_ONE_IN = 32
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def prepare(folder: str) -> None:
    """Write ``folder/train`` (about 90,000 rows) and ``folder/test`` (about 1,600).

    One column, ``text``: SEQ_LEN + 1 bytes. The files of a split are joined, each closed by a zero
    byte, and cut; a row begins with the byte the one before it ends with, so that each byte is
    predicted once. One file in 32 is held out, chosen by a hash of what is in it, and of files with
    the same content one is used. The same Python and pyarrow give the same bytes.

    Args:
        folder: The local folder to make.

    Raises:
        DataError: ``folder`` is not local, or holds something else.
    """
    train, test = split_files(Path(sysconfig.get_path("stdlib")))
    write_splits(
        folder,
        {"train": _table(list(train.values())), "test": _table(list(test.values()))},
        shard_rows=8192,
        group_rows=1024,
    )


def split_files(root: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the training and the held-out files below ``root``: path below it, content."""
    train: dict[str, bytes] = {}
    test: dict[str, bytes] = {}
    seen = set()
    for path in _source_files(root):
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if not content or digest in seen:
            continue
        seen.add(digest)
        split = test if int.from_bytes(digest[:8]) % HELD_OUT_ONE_IN == 0 else train
        split[path.relative_to(root).as_posix()] = content
    return train, test


def _source_files(root: Path) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return files


def _table(contents: list[bytes]) -> pa.Table:
    stream = np.frombuffer(b"".join(content + END_OF_FILE for content in contents), np.uint8)
    rows = (len(stream) - 1) // SEQ_LEN  # what does not fill a row at the very end is left out
    windows = np.lib.stride_tricks.sliding_window_view(stream, SEQ_LEN + 1)[::SEQ_LEN][:rows]
    buffer = pa.py_buffer(np.ascontiguousarray(windows))
    text = pa.FixedSizeBinaryArray.from_buffers(pa.binary(SEQ_LEN + 1), rows, [None, buffer])
    return pa.table({"text": text})
