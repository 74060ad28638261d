import gzip
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.data.infer import csv_rows, find_types, join, json_rows, parse_types, settle
from rayway.data.source_rows import (
    Opened,
    Rows,
    image_rows,
    line_blocks,
    parquet_rows,
    text_files,
    text_lines,
)
from rayway.data.sources import Piece, Source, cut_into_pieces, find_source, label_names, merge
from rayway.errors import DataError, SpecError


def put(root: Path, **files: bytes | str) -> Path:
    """Write files; ``__`` in a name stands for a folder, ``_dot_`` for a dot."""
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def paths(source: Source) -> list[str]:
    return [file.path for file in source.files]


def everything(rows: Any) -> pa.Table:
    return pa.concat_tables(each.table for each in rows)


def whole(path: str) -> list[Piece]:
    return [Piece(path, 0, None, 1)]


def test_a_folder_means_all_below_it_but_for_markers(tmp_path: Path) -> None:
    put(
        tmp_path,
        b_dot_csv="x\n1\n",
        deep__a_dot_csv="x\n1\n",
        _SUCCESS="",
        deep___temporary__c_dot_csv="x\n",
        _dot_hidden="x",
        deep__a_dot_csv_dot_crc="x",
    )
    source = find_source(str(tmp_path))
    assert source.root == str(tmp_path)
    assert source.format == "csv"
    assert paths(source) == ["b.csv", "deep/a.csv"]
    assert len(source.ignored) == 4


def test_a_file_a_glob_and_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, a_dot_py="1", deep__b_dot_py="2", deep__c_dot_txt="3")
    monkeypatch.chdir(tmp_path)
    assert paths(find_source("a.py", format="text")) == ["a.py"]
    assert paths(find_source("*.py", format="text")) == ["a.py"]
    found = find_source("**/*.py", format="text")
    assert paths(found) == ["a.py", "deep/b.py"]
    assert found.root == str(tmp_path)
    assert paths(find_source("deep")) == ["c.txt"]


def test_objects_of_a_bucket(bucket: Any) -> None:
    bucket.objects |= {"raw/a.jsonl": b"{}\n", "raw/x/": b"", "raw/_SUCCESS": b"", "b.csv": b"x"}
    source = find_source("s3://bucket/raw")
    assert (source.root, paths(source)) == ("s3://bucket/raw", ["a.jsonl"])
    rows = text_lines(Opened.at(source.root), whole("a.jsonl"))
    assert everything(rows).to_pylist() == [{"text": "{}"}]


@pytest.mark.parametrize(
    ("files", "asked", "words"),
    [
        ({}, "auto", "holds no file"),
        ({"_SUCCESS": ""}, "auto", "only _SUCCESS"),
        ({"a_dot_csv": "x", "b_dot_txt": "y"}, "auto", r"csv \(a.csv\), text \(b.txt\)"),
        ({"a_dot_bin": "x"}, "auto", "Say which it is with --format: parquet"),
        ({"a_dot_csv": ""}, "auto", r"a.csv is empty \(0 bytes\)"),
        ({"a_dot_txt": ""}, "auto", "files of 0 bytes only"),
    ],
    ids=str,
)
def test_a_place_without_data_is_refused(
    tmp_path: Path, files: dict[str, str], asked: str, words: str
) -> None:
    put(tmp_path, **files)
    with pytest.raises(DataError, match=words):
        find_source(str(tmp_path), format=asked)


def test_a_missing_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        find_source(str(tmp_path / "nowhere"))


def test_empty_texts_are_left_out_and_named(tmp_path: Path) -> None:
    put(tmp_path, a_dot_txt="", b_dot_txt="x")
    source = find_source(str(tmp_path))
    assert (paths(source), source.empty) == (["b.txt"], ("a.txt",))


@given(
    st.lists(st.text("ab", max_size=5), max_size=30),
    st.booleans(),
    st.lists(st.integers(0, 80), max_size=4),
)
def test_lines_are_read_once_wherever_a_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], ends: bool, cuts: list[int]
) -> None:
    root = tmp_path_factory.getbasetemp()
    content = "\n".join(lines) + ("\n" if ends and lines else "")
    put(root, lines_dot_txt=content)
    bounds = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(content))]
    place = Opened.at(str(root))
    found = [
        block
        for first, stop in zip(bounds, [*bounds[1:], None], strict=True)
        for _, block in line_blocks(place, Piece("lines.txt", first, stop, 1))
    ]
    assert b"".join(found).decode() == content
    assert all(block.endswith(b"\n") for block in found[:-1])


def test_texts_by_line_and_by_file(tmp_path: Path) -> None:
    put(tmp_path, a_dot_txt="\ufeffone\r\n\r\ntwo", b_dot_txt="three\n")
    place = Opened.at(str(tmp_path))
    assert everything(text_lines(place, whole("a.txt")))["text"].to_pylist() == ["one", "", "two"]
    rows = everything(text_files(place, [*whole("a.txt"), *whole("b.txt")]))
    assert rows["text"].to_pylist() == ["one\r\n\r\ntwo", "three\n"]
    assert rows["path"].to_pylist() == ["a.txt", "b.txt"]


def test_packed_lines_are_unpacked(tmp_path: Path) -> None:
    put(tmp_path, a_dot_txt_dot_gz=gzip.compress(b"one\ntwo\n"))
    source = find_source(str(tmp_path))
    (piece,), _ = cut_into_pieces(source, by_line=True)
    rows = everything(text_lines(Opened.at(source.root), [piece]))
    assert rows["text"].to_pylist() == ["one", "two"]


def test_a_line_that_is_no_text_is_named(tmp_path: Path) -> None:
    put(tmp_path, a_dot_txt=b"one\nt\xffo\n")
    place = Opened.at(str(tmp_path))
    with pytest.raises(DataError, match=r"a.txt \(row 1\) is not UTF-8 text: byte 0xff at 1"):
        list(text_lines(place, whole("a.txt")))
    with pytest.raises(DataError, match=r"a.txt is not UTF-8 text: byte 0xff at 5"):
        list(text_files(place, whole("a.txt")))


def schema_of(root: Path, *names: str) -> pa.Schema:
    place = Opened.at(str(root))
    kind = "csv" if names[0].endswith("csv") else "jsonl"
    parts = [find_types(place, kind, whole(name)) for name in names]
    return settle(join(parts, texts=kind == "csv"), {})


def test_a_column_has_the_type_that_holds_all_of_its_values(tmp_path: Path) -> None:
    put(
        tmp_path,
        a_dot_csv="i,f,b,s,late,id,wide\n1,1,true,1,1,12345678901234567890,9007199254740993\n"
        "2,,false,x,2,1.5,1\n",
        b_dot_csv="f,i,b,s,late,id,wide\n2.5,3,TRUE,,x,1,0.5\n",
    )
    schema = schema_of(tmp_path, "a.csv", "b.csv")
    assert dict(zip(schema.names, map(str, schema.types), strict=True)) == {
        "i": "int64",
        "f": "double",
        "b": "bool",
        "s": "string",
        "late": "string",
        "id": "string",  # as numbers they would lose digits
        "wide": "string",
    }
    rows = everything(
        csv_rows(Opened.at(str(tmp_path)), [*whole("a.csv"), *whole("b.csv")], schema)
    )
    assert rows.drop(["id", "wide"]).to_pylist()[2] == (
        {"i": 3, "f": 2.5, "b": True, "s": "", "late": "x"}
    )
    assert rows["wide"].to_pylist() == ["9007199254740993", "1", "0.5"]
    assert rows["id"].to_pylist()[0] == "12345678901234567890"


def test_an_int_that_becomes_a_float_after_many_blocks_is_a_float_from_the_first(
    tmp_path: Path,
) -> None:
    put(tmp_path, a_dot_csv="x,y\n" + "1234567,abcdefgh\n" * 600_000 + "0.5,a\n")
    schema = schema_of(tmp_path, "a.csv")
    assert schema.field("x").type == pa.float64()
    rows = list(csv_rows(Opened.at(str(tmp_path)), whole("a.csv"), schema))
    assert len(rows) > 1
    assert {each.table.schema.field("x").type for each in rows} == {pa.float64()}


def test_json_lines_agree_on_their_types(tmp_path: Path) -> None:
    put(
        tmp_path,
        a_dot_jsonl='{"n": 1, "t": [1, 2], "d": "2024-01-01"}\n\n{"n": null}\n',
        b_dot_jsonl='\ufeff{"n": 1.5, "t": [], "e": {"a": true}}\n',
    )
    schema = schema_of(tmp_path, "a.jsonl", "b.jsonl")
    kinds = dict(zip(schema.names, map(str, schema.types), strict=True))
    assert kinds["n"] == "double"
    assert kinds["t"].startswith("list<")
    assert kinds["d"] == "string"
    rows = json_rows(Opened.at(str(tmp_path)), [*whole("a.jsonl"), *whole("b.jsonl")], schema)
    assert everything(rows).to_pylist() == [
        {"n": 1.0, "t": [1, 2], "d": "2024-01-01", "e": None},
        {"n": None, "t": None, "d": None, "e": None},
        {"n": 1.5, "t": [], "d": None, "e": {"a": True}},
    ]


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ("a.jsonl", "b.jsonl", r"'x' is int64 in .*a.jsonl but string in .*b.jsonl"),
        ("a.csv", "b.csv", r"'x' is in .*a.csv but missing in .*b.csv"),
    ],
)
def test_files_that_do_not_agree_are_both_named(
    tmp_path: Path, one: str, other: str, words: str
) -> None:
    put(tmp_path, a_dot_jsonl='{"x": 1}\n', b_dot_jsonl='{"x": "1"}\n')
    put(tmp_path, a_dot_csv="x,y\n1,2\n", b_dot_csv="y\n1\n")
    with pytest.raises(DataError, match=words):
        schema_of(tmp_path, one, other)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a_dot_csv", "x,y\n1,2\n3\n", r"a.csv cannot be read: .*Expected 2 columns, got 1"),
        ("a_dot_csv", "x,x\n1,2\n", "more than one column 'x'"),
        ("a_dot_csv", "x,y\n1,\n", "column 'y' holds nothing"),
        ("a_dot_jsonl", '{"x": 1}\n{"x": 2\n', r"a.jsonl cannot be read: .*row 1"),
        ("a_dot_jsonl", '[{"x": 1}]', "a.jsonl is one JSON array"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_named(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    put(tmp_path, **{name: content})
    with pytest.raises(DataError, match=words):
        schema_of(tmp_path, name.replace("_dot_", "."))


def test_given_types_go_before_what_is_found(tmp_path: Path) -> None:
    put(tmp_path, a_dot_jsonl='{"t": [1, 2]}\n')
    found = find_types(Opened.at(str(tmp_path)), "jsonl", whole("a.jsonl"))
    schema = settle(found, parse_types(["t:list<int32>"]))
    assert schema.field("t").type == pa.list_(pa.int32())
    rows = everything(json_rows(Opened.at(str(tmp_path)), whole("a.jsonl"), schema))
    assert rows.schema == schema
    with pytest.raises(SpecError, match=r"names the column 'u'. There are: t"):
        settle(found, parse_types(["u:int8"]))


@pytest.mark.parametrize("text", ["x", ":int8", "x:integer", "x:list<foo>"])
def test_types_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--types"):
        parse_types([text])


def test_parquet_is_cut_between_row_groups_and_read_in_bounded_tables(tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(3_000_000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2_000_000)
    source = find_source(str(tmp_path))
    pieces, schema = cut_into_pieces(source, by_line=True)
    assert (len(pieces), schema) == (2, table.schema)
    assert [(p.first, p.stop) for p in merge(pieces)] == [(0, 2)]
    rows = list(parquet_rows(Opened.at(source.root), pieces))
    assert max(len(each.table) for each in rows) <= 1 << 20
    assert everything(rows).combine_chunks() == table
    second = list(parquet_rows(Opened.at(source.root), pieces[1:]))
    assert second[0].where(1) == f"{tmp_path}/a.parquet (row 2000001)"


def test_parquet_files_with_other_columns_are_both_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"'x' is int64 in .*a.parquet but double in .*b.parquet"):
        cut_into_pieces(find_source(str(tmp_path)), by_line=True)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    put(tmp_path, a_dot_parquet=b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"a.parquet .* was cut off"):
        cut_into_pieces(find_source(str(tmp_path)), by_line=True)


def picture(color: tuple[int, int, int], size: tuple[int, int] = (6, 4)) -> bytes:
    image = pytest.importorskip("PIL.Image")  # an extra
    sink = io.BytesIO()
    image.new("RGB", size, color).save(sink, "png")
    return sink.getvalue()


def test_pictures_are_scaled_and_labelled_by_their_folders(tmp_path: Path) -> None:
    red, blue = picture((255, 0, 0)), picture((0, 0, 255))
    put(tmp_path, cat__a_dot_png=blue, dog__b_dot_png=red, dog__c_dot_png=red)
    source = find_source(str(tmp_path))
    labels = label_names(source)
    assert labels == ["cat", "dog"]
    pieces, _ = cut_into_pieces(source, by_line=True)
    place = Opened.at(source.root)
    table = everything(image_rows(place, pieces, labels, (3, 2)))
    assert sorted(table["label"].to_pylist()) == [0, 1, 1]
    tensor = table.schema.field("image").type
    assert (tensor.shape, tensor.value_type) == ([2, 3, 3], pa.uint8())
    pixels = table["image"].combine_chunks().to_numpy_ndarray()
    assert pixels.shape == (3, 2, 3, 3)
    cat = table["label"].to_pylist().index(0)
    assert (pixels[cat] == [0, 0, 255]).all()
    raw = everything(image_rows(place, pieces, labels, None))
    assert sorted(raw["image"].to_pylist()) == sorted([red, red, blue])


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("size", [None, (8, 8)])
def test_a_damaged_picture_is_named(
    tmp_path: Path, is_cut: bool, size: tuple[int, int] | None
) -> None:
    cut = picture((1, 2, 3), (60, 60))[:90]
    put(tmp_path, a__x_dot_png=cut if is_cut else b"no picture")
    with pytest.raises(DataError, match=r"a/x.png is (damaged|no image)"):
        list(image_rows(Opened.at(str(tmp_path)), whole("a/x.png"), ["a"], size))


def test_files_that_are_rows_come_in_a_mixed_order(tmp_path: Path) -> None:
    put(tmp_path, **{f"{label}__{i}_dot_txt": "x" for label in "ab" for i in range(50)})
    pieces, _ = cut_into_pieces(find_source(str(tmp_path)), by_line=False)
    first = [piece.path[0] for piece in pieces[:20]]
    assert 4 < first.count("a") < 16


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    place = Opened.at(str(tmp_path))
    os.mkdir(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a.txt cannot be read"):
        list(text_lines(place, whole("a.txt")))


def test_rows_say_where_they_are_from() -> None:
    table = pa.table({"x": [1, 2]})
    assert Rows(table, ("f",), 10).range() == "f (rows 10 to 11)"
    assert Rows(table, ("f",), 10, byte=99).where(1) == "f (row 11 after byte 99)"
    assert Rows(table, ("f", "g"), -1).where(1) == "g"
    assert Rows(table, ("f", "g"), -1).range() == "f to g"
