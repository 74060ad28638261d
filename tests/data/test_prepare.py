"""What ``prepare_data`` makes, in this process; on Ray, killed and stopped: tests/cli."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.data.index import build_index
from rayway.data.prepare import cut_groups
from rayway.errors import DataError, RaywayError, SpecError
from rayway.launch.prepare_data import PreparedData, parse_pack, parse_size, prepare_data
from rayway.storage.objects import Objects

TRANSFORM = """
import pyarrow as pa
import pyarrow.compute as pc

def even(table):
    return table.filter(pc.equal(pc.bit_wise_and(table["n"], 1), 0))

def none(table):
    return table.slice(0, 0)

def fails(table):
    if 1234 in table["n"].to_pylist():
        raise ValueError("no 1234")
    return table

def no_table(table):
    return table["n"]

def drifts(table):
    first = table["n"][0].as_py() == 0
    return pa.table({"n": table["n"].cast(pa.int8() if first else pa.int64(), safe=False)})

def ragged(table):
    rows = table["n"].to_pylist()
    return pa.table({"l": [[1] * (3 if n == 1999 else 2) for n in rows]})

def nothing_known(table):
    return table.append_column("x", pa.nulls(len(table)))

def categories(table):
    return table.append_column("c", table["text"].dictionary_encode())

TEN = 10
"""


def made(raw: Path, dst: Path, **options: Any) -> PreparedData:
    return prepare_data(raw, dst, workers=0, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*"))}


def rows(folder: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("part-*")))


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 4 files of 500 rows, in a folder with a module of transforms."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TRANSFORM)
    raw = tmp_path / "raw"
    raw.mkdir()
    for file in range(4):
        lines = [{"n": n, "text": f"row {n}"} for n in range(500 * file, 500 * file + 500)]
        (raw / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return raw


def test_rows_come_once_in_order_with_page_checksums_and_an_index(raw: Path) -> None:
    result = made(raw, Path("out"), shards=3)
    assert (result.rows, result.shards) == (2000, 3)
    assert rows(Path("out"))["n"].to_pylist() == list(range(2000))
    assert build_index("out").total == 2000
    assert not list(Path("out").glob(".*"))
    file = pq.ParquetFile("out/part-00001.parquet", page_checksum_verification=True)
    column = file.metadata.row_group(0).column(0)
    assert (column.compression, "RLE_DICTIONARY" in column.encodings) == ("ZSTD", False)
    assert column.statistics.null_count == 0
    damaged = bytearray(Path("out/part-00001.parquet").read_bytes())
    damaged[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(pa.BufferReader(damaged), page_checksum_verification=True).read()


def test_the_same_files_give_the_same_bytes_wherever_they_lie(raw: Path, tmp_path: Path) -> None:
    made(raw, Path("one"), shards=3, transform="mine:even")
    other = tmp_path / "other"
    other.mkdir()
    for path in sorted(raw.iterdir(), reverse=True):  # another order on the disk
        (other / path.name).write_bytes(path.read_bytes())
    made(other, Path("two"), shards=3, transform="mine:even")
    assert len(content(Path("one"))) == 3
    assert content(Path("one")) == content(Path("two"))


def test_what_is_missing_is_made_again_and_the_rest_is_left_alone(raw: Path) -> None:
    made(raw, Path("out"), shards=4)
    before = content(Path("out"))
    whole = os.stat("out/part-00000.parquet").st_mtime_ns
    os.remove("out/_rayway/index.parquet")
    os.remove("out/_rayway/done/00001.json")  # killed between the part and its marker
    os.remove("out/part-00002.parquet")
    Path("out/part-00003.parquet").write_bytes(before["part-00003.parquet"][:-9])
    Path("out/.part-00003.parquet.0123456789abcdef.tmp").write_bytes(b"half")
    with pytest.raises(DataError, match="is not finished"):
        build_index("out")
    made(raw, Path("out"), shards=4)
    assert content(Path("out")) == before
    assert os.stat("out/part-00000.parquet").st_mtime_ns == whole
    assert not list(Path("out").glob(".*"))


def test_a_finished_data_set_is_not_made_again_unasked(raw: Path) -> None:
    made(raw, Path("out"))
    before = content(Path("out"))
    with pytest.raises(DataError, match=r"out is finished: 2,000 rows in 1 shard.* --overwrite"):
        made(raw, Path("out"), transform="mine:even")
    assert content(Path("out")) == before
    Path("out/notes.txt").write_text("mine")
    assert made(raw, Path("out"), transform="mine:even", overwrite=True).rows == 1000
    assert Path("out/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_something_else_is_left_alone(raw: Path, overwrite: bool) -> None:
    Path("out").mkdir()
    Path("out/part-00000.parquet").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"1 file\(s\) that were not prepared, e.g. part-00000"):
        made(raw, Path("out"), overwrite=overwrite)
    assert Path("out/part-00000.parquet").read_bytes() == b"mine"


def change_source(raw: Path) -> dict[str, Any]:
    (raw / "2.jsonl").write_text('{"n": 1, "text": "x"}\n')
    return {}


def change_code(raw: Path) -> dict[str, Any]:
    Path("mine.py").write_text(TRANSFORM + "\n# changed\n")
    return {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_source, "source file 2.jsonl changed"),
        (change_code, "the code of the transform has changed"),
        (lambda _: {"rows_per_group": 7}, "--rows-per-group was not given and is 7"),
        (lambda _: {"transform": "mine:none"}, "--transform was mine:even and is mine:none"),
        (lambda _: {"shards": 2}, "--shards was 3 and is 2"),
    ],
)
def test_an_unfinished_one_asked_otherwise_is_refused(
    raw: Path, change: Callable[[Path], dict[str, Any]], words: str
) -> None:
    options = {"shards": 3, "transform": "mine:even"}
    made(raw, Path("out"), **options)
    os.remove("out/_rayway/index.parquet")
    options |= change(raw)
    with pytest.raises(DataError, match=f"3 shard.s. done.*{words}"):
        made(raw, Path("out"), **options)


def test_lists_are_fixed_where_all_of_all_shards_are_of_one_length(raw: Path) -> None:
    for file in range(4):
        lengths = [3 if file == 3 else 2] * 500
        lines = [{"a": [1.5] * n, "b": [1, 2], "c": [1] * i} for i, n in enumerate(lengths)]
        (raw / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made(raw, Path("out"), shards=4)
    schemas = [pq.read_schema(path) for path in sorted(Path("out").glob("part-*"))]
    wanted = {"a": pa.list_(pa.float64()), "b": pa.list_(pa.int64(), 2), "c": pa.list_(pa.int64())}
    assert len(schemas) == 4
    assert all(schema.equals(pa.schema(wanted)) for schema in schemas)
    assert [len(row) for row in rows(Path("out"))["a"].to_pylist()] == [2] * 1500 + [3] * 500


def test_a_list_that_differs_late_in_a_shard_stays_a_list(raw: Path) -> None:
    result = made(raw, Path("out"), transform="mine:ragged", shards=1)
    assert result.columns["l"] == "list<int64>"
    assert len(rows(Path("out"))) == 2000


def test_categories_are_stored_plainly(raw: Path) -> None:
    assert made(raw, Path("out"), transform="mine:categories").columns["c"] == "string"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("fails", RaywayError, r"mine:fails failed on .*2.jsonl \(row 234\):\n.*\n.*mine.py"),
        ("no_table", SpecError, "mine:no_table gave a ChunkedArray for .*0.jsonl"),
        ("drifts", SpecError, "'n' is int8 in the shard that begins with .*0.jsonl but int64 in"),
        ("none", DataError, "no row is left of the 2,000 that were read"),
        ("nothing_known", SpecError, "'x' has no type .*0.jsonl"),
        ("absent", SpecError, "module mine has no absent"),
        ("TEN", SpecError, "mine:TEN is of type int"),
    ],
)
def test_a_wrong_transform_is_named_and_leaves_nothing_that_looks_finished(
    raw: Path, name: str, kind: type[RaywayError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        made(raw, Path("out"), transform=f"mine:{name}", shards=4)
    assert "another exception occurred" not in str(caught.value)
    assert not Path("out/_rayway/index.parquet").exists()
    assert not list(Path("out").glob(".*"))


def test_files_without_rows_are_fine_beside_others(raw: Path) -> None:
    (raw / "4.jsonl").write_text("\n")
    assert made(raw, Path("out"), shards=5).rows == 2000


def test_packing_counts_what_it_leaves_out(raw: Path) -> None:
    lines = [{"t": list(range(1, n % 7 + 1))} for n in range(700)]
    for path in raw.iterdir():
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = made(raw, Path("out"), pack="t:12", types=["t:list<int32>"])
    table = rows(Path("out"))
    assert result.empty_documents == 400
    assert result.columns == {"t": "int32[12]", "segment": "int32[12]", "position": "int32[12]"}
    assert all(kind.equals(pa.list_(pa.int32(), 12)) for kind in table.schema.types)
    segments = np.array(table["segment"].to_pylist())
    assert (segments > 0).sum() == 4 * sum(len(line["t"]) for line in lines)
    assert result.fill == (segments > 0).mean() > 0.98


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pack": "tokens"}, "--pack tokens: write COLUMN:T"),
        ({"pack": "text:9"}, "'text' is of type string and cannot be packed"),
        ({"shards": 0}, "--shards 0: use 1 or more"),
        ({"shards": 9}, r"--shards 9: the source can be cut into 4 at most"),
        ({"rows_per_group": 0}, "--rows-per-group 0"),
        ({"format": "xml"}, "--format xml: there are auto, parquet"),
        ({"image_size": "8"}, "--image-size is for images; the files are jsonl"),
        ({"text_by": "file"}, "--text-by is for text; the files are jsonl"),
        ({"types": ["n"]}, "--types n: write column:type"),
        ({"transform": "mine"}, "--transform mine is not of the form module:name"),
        ({"transform": "yours:fn"}, "yours:fn: no module yours"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused(raw: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        made(raw, Path("out"), **options)
    assert not list(Path("out").glob("part-*"))


@pytest.mark.parametrize(
    ("src", "dst"), [("raw", "raw/out"), ("raw", "."), ("raw", "raw"), ("raw/*", "raw/o")]
)
def test_source_and_destination_in_one_another_are_refused(raw: Path, src: str, dst: str) -> None:
    with pytest.raises(SpecError, match="lie in one another"):
        made(Path(src), Path(dst))


@pytest.mark.parametrize("text", ["", "0", "8x", "8x8x8", "axb", "-8"])
def test_image_sizes_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--image-size"):
        parse_size(text)


def test_sizes_and_packs_are_parsed() -> None:
    assert (parse_size("64"), parse_size("64x48")) == ((64, 64), (64, 48))
    assert parse_pack("a:b:7") == ("a:b", 7)


def test_a_function_is_taken_as_well_as_its_path(
    raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(raw, Path("one"), transform="mine:even")
    import mine  # type: ignore[import-not-found]  # noqa: PLC0415 - it was just written

    made(raw, Path("two"), transform=mine.even)
    assert content(Path("one")) == content(Path("two"))


def test_row_groups_are_of_about_a_megabyte_or_as_asked(raw: Path) -> None:
    lines = "".join(json.dumps({"x": "y" * 1000}) + "\n" for _ in range(5000))
    (raw / "0.jsonl").write_text(lines)
    for file in (1, 2, 3):
        (raw / f"{file}.jsonl").unlink()
    made(raw, Path("out"), shards=1)
    about = pq.read_metadata("out/part-00000.parquet")
    sizes = [about.row_group(i).total_byte_size for i in range(about.num_row_groups)]
    assert about.num_row_groups == 6
    assert all(900_000 < size < 1_100_000 for size in sizes[:-1])
    made(raw, Path("out"), shards=1, rows_per_group=1999, overwrite=True)
    about = pq.read_metadata("out/part-00000.parquet")
    assert [about.row_group(i).num_rows for i in range(3)] == [1999, 1999, 1002]


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 40))
def test_groups_hold_all_rows_in_order_and_all_but_the_last_are_full(
    counts: list[int], rows: int
) -> None:
    ends = np.cumsum([0, *counts])
    tables = [pa.table({"x": np.arange(a, b)}) for a, b in itertools.pairwise(ends)]
    groups = list(cut_groups(tables, rows))
    assert [x for group in groups for x in group["x"].to_pylist()] == list(range(ends[-1]))
    assert all(len(group) == rows for group in groups[:-1])


def test_pictures_keep_the_names_of_their_labels(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")  # an extra
    for number in range(12):
        folder = tmp_path / "raw" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (9, 7), (number, 0, 0)).save(folder / f"{number}.png")
    result = made(tmp_path / "raw", tmp_path / "out", image_size="4x3")
    schema = pq.read_schema(tmp_path / "out" / "part-00000.parquet")
    assert json.loads(schema.metadata[b"rayway.labels"]) == ["cat", "dog"]
    assert schema.field("image").type == pa.fixed_shape_tensor(pa.uint8(), (3, 4, 3))
    assert (result.rows, result.columns) == (12, {"image": "uint8[3, 4, 3]", "label": "int64"})
    (tmp_path / "raw" / "dog" / "x.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"dog/x.png is no image"):
        made(tmp_path / "raw", tmp_path / "two", image_size="4x3")


def test_a_url_is_taken_if_other_processes_see_it_too(raw: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/out"
    assert prepare_data(str(raw), url, workers=0).rows == 2000
    assert len(content(tmp_path / "out")) == 1
    with pytest.raises(SpecError, match="memory of this process"):
        prepare_data(str(raw), "memory://out", workers=0)


def test_a_bucket_is_prepared_into_a_bucket(
    raw: Path, s3: Callable[[str, Path], str], tmp_path: Path
) -> None:
    made(raw, Path("out"), shards=2, transform="mine:even")
    src = s3("prepare", raw)
    dst = src.replace("/set", "/prepared")
    result = prepare_data(src, dst, workers=0, shards=2, transform="mine:even")
    assert (result.rows, build_index(dst).total) == (1000, 1000)
    objects = Objects(dst)
    assert {each.key: objects.get(each.key) for each in objects.list() if "part" in each.key} == (
        content(Path("out"))
    )
    with pytest.raises(DataError, match="is finished"):
        prepare_data(src, dst, workers=0)
    assert prepare_data(src, dst, workers=0, overwrite=True).rows == 2000
