import io
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from rayway.data.files import filesystem_for, read_footer
from rayway.errors import DataError


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_local_paths_and_file_urls_are_arrows_own(tmp_path: Path, prefix: str) -> None:
    filesystem, path = filesystem_for(f"{prefix}{tmp_path}/")
    assert isinstance(filesystem, pafs.LocalFileSystem)
    assert path == str(tmp_path)


def test_other_schemes_go_through_fsspec() -> None:
    fsspec.filesystem("memory").pipe("/files-test/a", b"12")
    filesystem, path = filesystem_for("memory://files-test/")
    assert [i.size for i in filesystem.get_file_info(pafs.FileSelector(path))] == [2]


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(DataError, match="nosuch://bucket/set cannot be opened"):
        filesystem_for("nosuch://bucket/set")


def test_s3_uses_the_endpoint_of_the_environment(bucket: Any) -> None:
    bucket.objects["set/a"] = b"12"
    filesystem, path = filesystem_for("s3://bucket/set/")
    assert isinstance(filesystem, pafs.S3FileSystem)
    assert path == "bucket/set"
    assert [i.size for i in filesystem.get_file_info(pafs.FileSelector(path))] == [2]


def parquet_bytes(columns: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({f"column_{i:05}": [1, 2, 3] for i in range(columns)}), sink)
    return sink.getvalue()


@pytest.mark.parametrize("columns", [1, 1500])
def test_the_footer_alone_gives_the_metadata(tmp_path: Path, columns: int) -> None:
    content = parquet_bytes(columns)
    file = tmp_path / "a.parquet"
    file.write_bytes(content)
    footer = read_footer(pafs.LocalFileSystem(), str(file), len(content))
    assert (len(footer) > 64 << 10) == (columns > 1)
    assert content.endswith(footer)
    metadata = pq.read_metadata(pa.BufferReader(footer))
    assert (metadata.num_rows, metadata.num_columns) == (3, columns)


@pytest.mark.parametrize("keep", [1, 4, 11, 100, -1, -9])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, keep: int) -> None:
    content = parquet_bytes(1)[:keep]
    file = tmp_path / "part-3.parquet"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"part-3\.parquet .* was cut off"):
        read_footer(pafs.LocalFileSystem(), str(file), len(content))


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"part-3\.parquet is empty"):
        read_footer(pafs.LocalFileSystem(), str(tmp_path / "part-3.parquet"), 0)


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"part-3\.parquet cannot be read"):
        read_footer(pafs.LocalFileSystem(), str(tmp_path / "part-3.parquet"), 500)
