import io
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayway.data.files import filesystem_for
from rayway.data.footers import Footer
from rayway.data.index import Index, build_index, write_index
from rayway.errors import DataError


def write(file: Path, rows: int, *, group: int = 100, **columns: pa.Array) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": pa.array(range(rows), pa.int64()), **columns})
    pq.write_table(table, file, row_group_size=group)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """3 shards of 4, 5 and 3 rows; row groups of 2."""
    for name, rows in {"b": 5, "a": 4, "sub/c": 3}.items():
        write(tmp_path / "set" / f"{name}.parquet", rows, group=2)
    return tmp_path / "set"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """An index with all that one can say: nulls, an empty row group, ignored files."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder / "a.parquet", 5, group=2, x=pa.array([1, None, 2, None, None]))
    write(folder / "b.parquet", 0, x=pa.array([], pa.int64()))
    write(folder / "c.parquet", 3, x=pa.array([1, 2, 3]))
    (folder / "notes.txt").touch()
    return build_index(str(folder))


def test_shards_come_by_path_and_row_groups_in_file_order(folder: Path) -> None:
    index = build_index(str(folder))
    assert index.paths == ("a.parquet", "b.parquet", "sub/c.parquet")
    assert index.rows.tolist() == [2, 2, 2, 2, 1, 2, 1]
    assert index.shard.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert index.ordinal.tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert index.first.tolist() == [0, 2, 4, 6, 8, 9, 11, 12]
    assert index.total == 12
    assert index.schema == pa.schema({"id": pa.int64()})
    assert index.where(4) == f"{folder}/b.parquet (row group 2)"


def test_paths_sort_by_bytes_and_not_by_locale(tmp_path: Path) -> None:
    for name in ("b", "B", "ä", "a", "Z"):
        write(tmp_path / f"{name}.parquet", 1)
    assert build_index(str(tmp_path)).paths == tuple(f"{x}.parquet" for x in "BZabä")


def test_markers_are_ignored_and_named(folder: Path) -> None:
    # case H16
    before = build_index(str(folder))
    for name in ("_SUCCESS", ".part-0.crc", "_metadata.tmp", "notes.txt", ".hidden.parquet"):
        (folder / name).touch()
    (folder / "empty").mkdir()
    (folder / "folder.parquet").mkdir()
    write(folder / "_temporary" / "d.parquet", 9)
    index = build_index(str(folder))
    assert index.total == 12
    assert index.fingerprint == before.fingerprint
    names = {"_SUCCESS", ".part-0.crc", "_metadata.tmp", "notes.txt", ".hidden.parquet"}
    assert set(index.ignored) == {*names, "_temporary/d.parquet"}


def test_the_place_of_a_folder_is_no_part_of_its_fingerprint(folder: Path, bucket: Any) -> None:
    bucket.objects["set/sub/"] = b""  # the object that some tools write to stand for a folder
    memory = fsspec.filesystem("memory")
    for file in folder.rglob("*.parquet"):
        memory.pipe(f"/index-test/{file.relative_to(folder)}", file.read_bytes())
        bucket.objects[f"set/{file.relative_to(folder)}"] = file.read_bytes()
    local = build_index(str(folder))
    for url in ("memory://index-test", "s3://bucket/set", "s3://bucket/set/"):
        index = build_index(url)
        assert index.paths == local.paths
        assert index.rows.tolist() == local.rows.tolist()
        assert index.fingerprint == local.fingerprint
        index.check_unchanged()


def test_of_many_ignored_files_some_names_are_kept(folder: Path) -> None:
    for number in range(30):
        (folder / f"{number:02}.crc").touch()
    index = build_index(str(folder))
    assert (len(index.ignored), index.ignored_count) == (20, 30)
    back = Index.from_bytes(index.to_bytes())
    assert (back.ignored, back.ignored_count) == (index.ignored, 30)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://", "s3://"])
@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("*.parquet", ["a", "b"]),
        ("[b-z]*", ["b", "sub/c"]),
        ("s*/", ["sub/c"]),
        ("**/*.parquet", ["a", "b", "sub/c"]),
        ("*/c.parquet", ["sub/c"]),
        ("b.parquet", ["b"]),
        ("sub", ["c"]),
    ],
)
def test_a_glob_a_file_and_a_folder_are_data(
    folder: Path, bucket: Any, scheme: str, pattern: str, paths: list[str]
) -> None:
    memory = fsspec.filesystem("memory")
    for file in folder.rglob("*.parquet"):
        path = f"glob-test/{file.relative_to(folder)}"
        memory.pipe(f"/{path}", file.read_bytes())
        bucket.objects[path] = file.read_bytes()
    root = {"": f"{folder}", "file://": f"file://{folder}", "s3://": "s3://bucket/glob-test"}
    index = build_index(f"{root.get(scheme, 'memory://glob-test')}/{pattern}")
    assert index.paths == tuple(f"{path}.parquet" for path in paths)
    again = Index.from_bytes(index.to_bytes())
    again.check_unchanged()
    assert again.where(0).startswith(index.root)
    filesystem, root_path = filesystem_for(index.root)
    assert filesystem.get_file_info(f"{root_path}/{index.paths[0]}").size == index.sizes[0]


def test_a_new_file_that_the_glob_means_is_found(folder: Path) -> None:
    index = build_index(f"{folder}/*.parquet")
    write(folder / "sub" / "d.parquet", 1)
    index.check_unchanged()
    write(folder / "d.parquet", 1)
    with pytest.raises(DataError, match=r"set/\*\.parquet is not what .*\(added: d\.parquet\)"):
        index.check_unchanged()


def test_a_local_name_with_wildcards_in_it_is_meant_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "run[1]" / "a*.parquet", 2)
    write(tmp_path / "run[1]" / "ab.parquet", 2)
    assert build_index(str(tmp_path / "run[1]")).paths == ("a*.parquet", "ab.parquet")
    index = build_index(str(tmp_path / "run[1]" / "a*.parquet"))
    assert index.paths == ("a*.parquet",)
    index.check_unchanged()


def test_a_wildcard_in_the_buckets_name_is_refused() -> None:
    with pytest.raises(DataError, match="Name the bucket in full"):
        build_index("s3://buck*/set")


def test_a_zero_byte_shard_is_an_error_that_names_it(folder: Path) -> None:
    (folder / "part-3.parquet").touch()
    with pytest.raises(DataError, match=r"part-3\.parquet is empty"):
        build_index(str(folder))


def test_a_shard_cut_off_is_an_error_that_names_it(folder: Path) -> None:
    file = folder / "b.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"b\.parquet .* was cut off"):
        build_index(str(folder))


def test_a_damaged_footer_is_an_error_that_names_it(folder: Path) -> None:
    file = folder / "b.parquet"
    content = bytearray(file.read_bytes())
    content[-60:-8] = b"\xff" * 52
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"b\.parquet has a damaged footer"):
        build_index(str(folder))


def test_a_missing_folder_and_a_folder_without_shards_are_told_apart(folder: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist.*data\.prepare"):
        build_index(str(folder / "nowhere"))
    (folder / "csv").mkdir()
    with pytest.raises(DataError, match=r"holds no \.parquet file. It is empty"):
        build_index(str(folder / "csv"))
    for name in "abcde":
        (folder / "csv" / f"{name}.csv").touch()
    with pytest.raises(DataError, match=r"It holds a\.csv, b\.csv, c\.csv and 2 more"):
        build_index(str(folder / "csv"))


def test_no_rows_are_an_error_and_empty_row_groups_are_left_out(tmp_path: Path) -> None:
    # case H14, rows(0)
    write(tmp_path / "a.parquet", 0)
    with pytest.raises(DataError, match="0 rows in 1 Parquet file"):
        build_index(str(tmp_path))
    write(tmp_path / "b.parquet", 3)
    index = build_index(str(tmp_path))
    assert (index.rows.tolist(), index.shard.tolist()) == ([3], [1])


@pytest.mark.parametrize("other", [pa.array([1.5]), None])
def test_schema_drift_names_file_column_and_types(tmp_path: Path, other: pa.Array | None) -> None:
    write(tmp_path / "a.parquet", 1, y=pa.array([1]))
    write(tmp_path / "b.parquet", 1, **({} if other is None else {"y": other}))
    found = "missing" if other is None else "double"
    with pytest.raises(DataError, match=rf"'y' is {found} in .*b\.parquet but int64 in .*a\.parq"):
        build_index(str(tmp_path))
    assert build_index(str(tmp_path), columns=["id"]).schema.names == ["id"]


def test_a_column_that_only_later_shards_have_is_schema_drift(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 1)
    write(tmp_path / "b.parquet", 1, z=pa.array(["s"]))
    with pytest.raises(DataError, match=r"'z' is string in .*b\.parquet but missing in"):
        build_index(str(tmp_path))


def test_an_unknown_column_is_refused_with_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 1, label=pa.array([1]))
    with pytest.raises(DataError, match=r"no column 'lable'. Did you mean 'label'\? It has: id,"):
        build_index(str(tmp_path), columns=["id", "lable"])
    with pytest.raises(DataError, match=r"no column 'q9'. It has"):
        build_index(str(tmp_path), columns=["q9"])
    with pytest.raises(DataError, match=r"no column of .* is chosen"):
        build_index(str(tmp_path), columns=[])


def test_an_index_survives_bytes_and_pickling(folder: Path) -> None:
    index = build_index(str(folder))
    for back in (Index.from_bytes(index.to_bytes()), pickle.loads(pickle.dumps(index))):
        assert back.to_bytes() == index.to_bytes()
        assert back.fingerprint == index.fingerprint
        assert back.schema == index.schema
        assert back.first.tolist() == index.first.tolist()
        assert back.paths == index.paths
        back.check_unchanged()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


@settings(max_examples=60)
@given(at=st.floats(0, 1, exclude_max=True), cut=st.booleans())
def test_a_damaged_index_is_refused_or_says_the_same(whole: Index, at: float, cut: bool) -> None:
    data = whole.to_bytes()
    place = int(at * len(data))
    try:
        back = Index.from_bytes(data[:place] if cut else flipped(data, place))
    except DataError:
        return
    assert back.to_bytes() == data


def test_a_foreign_index_or_one_of_another_version_is_refused(whole: Index, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="damaged or something else"):
        Index.from_bytes(b"{}")
    write(tmp_path / "rows.parquet", 3)
    with pytest.raises(DataError, match="no data index of rayway"):
        Index.from_bytes((tmp_path / "rows.parquet").read_bytes())
    table = pq.read_table(io.BytesIO(whole.to_bytes()))
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"rayway": b"1"}), sink)
    with pytest.raises(DataError, match="has version 1; this rayway reads 2"):
        Index.from_bytes(sink.getvalue())


def test_a_changed_added_or_missing_shard_is_named(folder: Path) -> None:
    index = build_index(str(folder))
    file = folder / "b.parquet"
    size, content = file.stat().st_size, file.read_bytes()
    pq.write_table(pa.table({"id": pa.array([9, 1, 2, 3, 4])}), file, row_group_size=2)
    assert file.stat().st_size == size, "the same rows and size, other values"
    with pytest.raises(DataError, match=r"\(changed: b\.parquet\)"):
        index.check_unchanged()
    assert build_index(str(folder)).fingerprint != index.fingerprint
    file.write_bytes(content)
    index.check_unchanged()
    shutil.move(folder / "a.parquet", folder / "e.parquet")
    with pytest.raises(DataError, match=r"\(missing: a\.parquet; added: e\.parquet\)"):
        index.check_unchanged()


def test_a_copied_or_touched_shard_is_no_change(folder: Path) -> None:
    index = build_index(str(folder))
    assert index.check_unchanged() == ()
    os.utime(folder / "b.parquet")
    assert index.check_unchanged() == ("b.parquet",)
    os.utime(folder / "a.parquet")
    (folder / "a.parquet").write_bytes(b"x" * (folder / "a.parquet").stat().st_size)
    with pytest.raises(DataError, match=r"\(changed: a\.parquet\)"):
        index.check_unchanged()


def test_an_unchanged_bucket_is_found_so_by_one_listing(folder: Path, bucket: Any) -> None:
    for file in folder.rglob("*.parquet"):
        bucket.objects[f"set/{file.relative_to(folder)}"] = file.read_bytes()
    index = build_index("s3://bucket/set")
    bucket.requests.clear()
    assert index.check_unchanged() == ()
    assert bucket.requests == ["LIST"]
    file = bucket.objects["set/b.parquet"]
    bucket.objects["set/b.parquet"] = b"par1" + file[4:]
    assert index.check_unchanged() == ("b.parquet",), "another etag, the same footer"
    bucket.objects["set/b.parquet"] = file[:-100] + b"x" * 90 + file[-10:]
    with pytest.raises(DataError, match=r"\(changed: b\.parquet\)"):
        index.check_unchanged()
    bucket.objects["set/b.parquet"] = file + b"x"
    with pytest.raises(DataError, match=r"\(changed: b\.parquet\)"):
        index.check_unchanged()
    bucket.objects.clear()
    with pytest.raises(DataError, match=r"missing: a\.parquet, b\.parquet, sub/c\.parquet"):
        index.check_unchanged()


def refuse_footers(*_: object) -> Iterator[Footer]:
    raise AssertionError("no footer needs to be read")


def test_an_index_beside_the_data_saves_the_footers(folder: Path) -> None:
    index = build_index(str(folder))
    assert write_index(index) == f"{folder}/_rayway/index.parquet"
    stored = build_index(str(folder), read=refuse_footers)
    assert stored.to_bytes() == index.to_bytes()
    assert stored.ignored == ()
    with pytest.raises(AssertionError):
        build_index(str(folder), read=refuse_footers, stored=False)
    with pytest.raises(DataError, match=r"a part of a folder.*--out FILE"):
        write_index(build_index(str(folder / "a.parquet")))


def test_an_index_beside_the_data_gives_some_of_its_columns(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 4, x=pa.array([1.0, None, 2.0, 3.0]), s=pa.array(["a"] * 4))
    fresh = build_index(str(tmp_path), columns=["x"])
    write_index(build_index(str(tmp_path)))
    index = build_index(str(tmp_path), columns=["x"], read=refuse_footers)
    assert index.to_bytes() == fresh.to_bytes()
    assert (index.group_bytes, index.nulls["x"].tolist()) == (4 * 8, [1])
    assert not build_index(str(tmp_path), columns=["id"]).nulls
    with pytest.raises(DataError, match="no column 'y'"):
        build_index(str(tmp_path), columns=["y"])


@pytest.mark.parametrize("change", ["touched", "added", "damaged", "moved"])
def test_an_index_that_does_not_fit_is_as_if_it_was_not_there(folder: Path, change: str) -> None:
    at = write_index(build_index(str(folder)))
    if change == "touched":
        os.utime(folder / "a.parquet")
    elif change == "added":
        write(folder / "d.parquet", 9)
    elif change == "damaged":
        Path(at).write_bytes(b"PAR1")
    else:
        (folder / "a.parquet").rename(folder / "x.parquet")
    with pytest.raises(AssertionError):
        build_index(str(folder), read=refuse_footers)
    assert build_index(str(folder)).total == (21 if change == "added" else 12)


def test_a_moved_data_set_keeps_its_index_and_knows_its_new_place(folder: Path) -> None:
    index = build_index(str(folder))
    write_index(index)
    folder.rename(folder.parent / "new")
    moved = build_index(str(folder.parent / "new"), read=refuse_footers)
    assert moved.fingerprint == index.fingerprint
    assert moved.root == str(folder.parent / "new")
    moved.check_unchanged()


@pytest.mark.parametrize("above", [False, True])
def test_data_that_prepare_has_not_finished_is_refused(folder: Path, above: bool) -> None:
    (folder / "_rayway").mkdir()
    (folder / "_rayway" / "prepare.json").write_text("{}")
    with pytest.raises(DataError, match=rf"{folder} is not finished.*Start the same command"):
        build_index(str(folder.parent if above else folder))
    index = build_index(str(folder), stored=False)
    write_index(index)
    assert build_index(str(folder), read=refuse_footers).fingerprint == index.fingerprint


def test_nulls_are_counted_by_shard_and_column_where_the_footers_tell(whole: Index) -> None:
    assert {name: counts.tolist() for name, counts in whole.nulls.items()} == {"x": [3, 0, 0]}


def test_empty_lists_are_not_taken_for_nulls(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 3, x=pa.array([[1], [], [2, 3]]))
    assert build_index(str(tmp_path)).nulls == {}


def test_the_size_of_a_row_group_counts_decoded_values(tmp_path: Path) -> None:
    # the same value over and over is tiny in the file, not in memory
    vectors = pa.FixedSizeListArray.from_arrays(pa.array([0.0] * 8000), 8)
    write(tmp_path / "a.parquet", 1000, group=500, x=vectors)
    assert build_index(str(tmp_path)).group_bytes == 500 * (8 + 64)
