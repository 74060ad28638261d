import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rayway.data.groups import Groups
from rayway.data.index import Index, build_index
from rayway.errors import DataError

ROWS = 4000


def values() -> pa.Table:
    draws = np.random.default_rng(0).standard_normal(ROWS)
    return pa.table({"x": draws, "n": range(ROWS), "s": [[i, i + 1] for i in range(ROWS)]})


def written(folder: Path, **how: Any) -> Index:
    folder.mkdir(exist_ok=True)
    pq.write_table(values(), folder / "a.parquet", row_group_size=1000, **how)
    return build_index(str(folder))


@pytest.fixture
def memory() -> Any:
    """A remote store that fails when it is told to: the exceptions in ``failures``, in turn."""

    class Failing(MemoryFileSystem):
        protocol = "failing"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]
        failures: ClassVar[list[Exception]] = []
        opened: ClassVar[list[str]] = []
        cachable = False

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(path.removeprefix("failing://")))

        def _open(self, path: str, *args: Any, **more: Any) -> Any:
            self.opened.append(path)
            if self.failures:
                raise self.failures.pop(0)
            return super()._open(path, *args, **more)

    fsspec.register_implementation("failing", Failing, clobber=True)
    return Failing


def in_memory(memory: Any, folder: Path) -> Index:
    with memory().open("/set/a.parquet", "wb") as file:
        file.write((folder / "a.parquet").read_bytes())
    index = build_index("failing://set")
    memory.opened.clear()
    return index


@pytest.mark.parametrize("remote", [False, True])
def test_the_chosen_columns_come_in_their_order(tmp_path: Path, memory: Any, remote: bool) -> None:
    index = written(tmp_path / "set")
    if remote:
        index = in_memory(memory, tmp_path / "set")
    for columns in (["n", "x"], ["x", "n"], ["s"]):
        for group in (2, 0):
            table = Groups(index, columns)(group)
            assert table.equals(values().select(columns).slice(1000 * group, 1000))


@pytest.mark.parametrize("remote", [False, True])
def test_names_with_dots_spaces_and_signs_are_names(
    tmp_path: Path, memory: Any, remote: bool
) -> None:
    names = ["a.b", "a", "a.b.c", "ä b", "list", "x.list.element", "`"]
    lists = {name: [[number], [2]] for number, name in enumerate(names)}
    table = pa.table({**lists, "n.m": [1, 2], "n": [3, 4]})
    names = table.column_names
    pq.write_table(table, tmp_path / "a.parquet")
    index = in_memory(memory, tmp_path) if remote else build_index(str(tmp_path))
    for name in names:
        assert Groups(index, [name])(0).equals(table.select([name]))


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("codec", ["zstd", "snappy", "none", "gzip"])
def test_a_bit_flip_in_a_page_is_found_where_pages_have_checksums(
    tmp_path: Path, memory: Any, codec: str, remote: bool
) -> None:
    index = written(
        tmp_path / "set", compression=codec, write_page_checksum=True, use_dictionary=False
    )
    good = (tmp_path / "set" / "a.parquet").read_bytes()
    pages = pq.read_metadata(tmp_path / "set" / "a.parquet").row_group(1).column(0)
    begin, size = pages.data_page_offset + 40, pages.total_compressed_size - 40
    draws = random.Random(0)
    for _ in range(20):
        bad = bytearray(good)
        bad[draws.randrange(begin, begin + size)] ^= 1 << draws.randrange(8)
        (tmp_path / "set" / "a.parquet").write_bytes(bad)
        found = in_memory(memory, tmp_path / "set") if remote else index
        slept: list[float] = []
        groups = Groups(found, ["x"], sleep=slept.append)
        with pytest.raises(DataError, match=r"a\.parquet \(row group 1\) cannot be read:") as error:
            groups(1)
        assert "CRC checksum" in str(error.value)
        assert not slept, "damage is not read again"
        assert groups(0).num_rows == 1000


def test_a_shard_that_is_not_what_it_was_is_named(tmp_path: Path) -> None:
    index = written(tmp_path / "set")
    file = tmp_path / "set" / "a.parquet"
    good = file.read_bytes()

    def says(words: str, groups: Callable[[int], pa.Table], group: int = 1) -> None:
        with pytest.raises(DataError, match=words):
            groups(group)

    open_already = Groups(index, ["x"])
    open_already(0)
    for bad in (good[:-10], good[: len(good) // 2], b""):
        file.write_bytes(bad)
        says(rf"set/a\.parquet has {len(bad)} bytes and had {len(good)} when", Groups(index, ["x"]))
        says(r"a\.parquet \(row group 1\) was written to while this run", open_already)
    file.write_bytes(good)
    says("was written to while", open_already)  # and what it holds now, nobody knows
    file.unlink()
    says(r"a\.parquet \(row group 1\) cannot be read: .*No such file", Groups(index, ["x"]))
    file.write_bytes(b"PAR1" * (len(good) // 4) + good[len(good) // 4 * 4 :])
    says(r"a\.parquet \(row group 1\) cannot be read", Groups(index, ["x"]))


def test_a_shard_of_the_same_size_with_other_rows_or_types_is_refused(
    tmp_path: Path, memory: Any
) -> None:
    first = written(tmp_path / "set", compression="none", use_dictionary=False)
    size = first.sizes[0]

    def replaced(table: pa.Table, row_group_size: int = 1000) -> Index:
        file = tmp_path / "set" / "a.parquet"
        pq.write_table(table, file, row_group_size=row_group_size, compression="none")
        return Index(**{**fields(first), "sizes": (file.stat().st_size,)})

    for table, words in (
        (values().slice(0, 3500), "has 500 rows and had 1000 when it was indexed"),
        (values().slice(0, 2000), r"\(row group 3\) cannot be read"),
        (values().set_column(0, "x", values()["n"]), "column 'x' is int64 in .* was double"),
        (values().drop_columns("x"), r"\(row group 3\) cannot be read|no column 'x'"),
    ):
        with pytest.raises(DataError, match=words):
            Groups(replaced(table), ["x"])(3)
    assert size


def fields(index: Index) -> dict[str, Any]:
    return {name: getattr(index, name) for name in index.__dataclass_fields__}


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
def test_what_a_remote_store_may_do_better_is_tried_three_times(
    tmp_path: Path, memory: Any, failures: int
) -> None:
    written(tmp_path / "set")
    index, slept = in_memory(memory, tmp_path / "set"), list[float]()
    groups = Groups(index, ["n"], sleep=slept.append)
    groups(0)
    memory.failures = [OSError("503 slow down"), PermissionError("403"), FileNotFoundError("404")]
    memory.failures = memory.failures[:failures]
    if failures < 3:
        assert groups(1)["n"][0].as_py() == 1000
    else:
        with pytest.raises(DataError, match=r"a\.parquet \(row group 1\) cannot be read in 3 tr"):
            groups(1)
    assert len(slept) == min(failures, 2)
    assert slept == sorted(slept)
    assert sum(slept) < 2


def test_errors_that_are_no_io_errors_are_named_at_once(tmp_path: Path, memory: Any) -> None:
    written(tmp_path / "set")
    index, slept = in_memory(memory, tmp_path / "set"), list[float]()
    memory.failures = [KeyError("a bug in a filesystem")]
    with pytest.raises(DataError, match=r"\(row group 1\) cannot be read: .*a bug in a filesystem"):
        Groups(index, ["n"], sleep=slept.append)(1)
    assert not slept
    memory.failures = []


def test_local_files_are_not_tried_again(tmp_path: Path) -> None:
    index, slept = written(tmp_path / "set"), list[float]()
    os.rename(tmp_path / "set", tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"cannot be read: "):
        Groups(index, ["n"], sleep=slept.append)(0)
    assert not slept


@pytest.mark.parametrize("status", [403, 404, 500])
def test_an_answer_of_s3_that_is_soon_better_is_survived(
    uneven: Path, bucket: Any, status: int
) -> None:
    for file in uneven.iterdir():
        bucket.objects[f"set/{file.name}"] = file.read_bytes()
    index = build_index("s3://bucket/set")
    slept: list[float] = []
    groups = Groups(index, ["id"], sleep=slept.append)
    groups(0)
    bucket.fail("GET .*", status=status, times=2)
    assert groups(1).num_rows == index.rows[1]
    if status == 500:
        return  # Arrow itself tries that four times each time, and waits
    asked = len(bucket.requests)
    bucket.fail("GET .*", status=status)
    with pytest.raises(DataError, match=r"part-000\.parquet \(row group 0\) cannot be read in 3 t"):
        groups(0)
    assert len(bucket.requests) - asked == 3
