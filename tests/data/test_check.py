"""Bad input, found before a training by the index, or all at once by reading everything."""

import os
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayway.data.check import Finding, check_cheap, no_tensor, refuse
from rayway.data.index import build_index, write_index
from rayway.data.judge import judge
from rayway.data.scan import Rules, scan
from rayway.errors import DataError

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write columns into a file; checksums on, row groups of 4 rows."""

    def save(columns: dict[str, Any], name: str = "a", **options: Any) -> None:
        options = {"row_group_size": 4, "write_page_checksum": True, **options}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet", **options)

    return save


def cheap(folder: Path, **asked: Any) -> list[Finding]:
    job: dict[str, Any] = {"global_batch": 2, "transform": False, "invalid": "error", "pad": {}}
    return check_cheap(build_index(str(folder)), **{**job, "workers": 2, **asked})


def whole(folder: Path, sample: int | None = None, **asked: Any) -> list[Finding]:
    rules = Rules(**asked)
    index, findings = judge(scan(str(folder), rules, sample=sample), rules)
    problems = [finding for finding in findings if finding.level == "problem"]
    assert findings[: len(problems)] == problems, "problems come first"
    assert index is not None or problems
    return findings


def problems(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.level == "problem"]


# ------------------------------------------------------------------------------ by the index


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        (["a"], pa.string(), "text"),
        (["a"], pa.large_string(), "text"),
        ([b"a"], pa.binary(), "bytes of any length"),
        ([Decimal("1.10")], pa.decimal128(5, 2), "decimals, which a float would round"),
        ([datetime(2026, 1, 1)], pa.timestamp("us"), "dates and times"),
        ([date(2026, 1, 1)], pa.date32(), "dates and times"),
        ([{"a": 1}], pa.struct({"a": pa.int64()}), "nested fields"),
        ([["a"]], pa.list_(pa.string()), "text"),
        ([[[{"a": 1}]]], pa.list_(pa.list_(pa.struct({"a": pa.int64()}))), "nested fields"),
        (["a"], pa.dictionary(pa.int8(), pa.string()), "categories"),
    ],
)
def test_a_column_that_is_no_tensor_is_refused_unless_there_is_a_transform(
    write: Write, tmp_path: Path, values: list[Any], kind: pa.DataType, words: str
) -> None:
    write({"id": [1, 2, 3], "c": pa.array(values * 3, kind)})
    (told,) = problems(cheap(tmp_path))
    assert f"column 'c' is {build_index(str(tmp_path)).schema.field('c').type}" in told
    assert f"no tensor can be made of {words}" in told
    assert "data.columns" in told
    assert cheap(tmp_path, transform=True) == []
    (advice,) = whole(tmp_path)
    assert (advice.level, words in advice.text) == ("advice", True)
    assert words in problems(whole(tmp_path, job=True))[0]


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.binary(4)),
        *(pa.list_(pa.float32(), 3), pa.list_(pa.int64()), pa.fixed_shape_tensor(pa.int8(), [2])),
    ],
)
def test_numbers_and_arrays_of_them_are_tensors(kind: pa.DataType) -> None:
    assert no_tensor(kind) is None


def test_lists_of_differing_length_have_to_be_padded(write: Write, tmp_path: Path) -> None:
    write(
        {
            "x": [[1, 2, 3], [1], [], [4, 5]],
            "nested": [[[1], [2]], [[1], [2]], [[3], [4]]] * 1 + [[[1], [1]]],
        }
    )
    (told,) = problems(cheap(tmp_path))
    assert "column 'x' has lists of 0 to 3 values in" in told
    assert "data.pad={'x': 3}" in told
    assert cheap(tmp_path, pad={"x": 3}) == []
    assert cheap(tmp_path, transform=True) == []
    write({"x": [[[1], [2, 3]], [[1], [2]]]})
    assert "column 'x' has lists of 1 to 2 values" in problems(cheap(tmp_path, pad={"x": 2}))[0]


@pytest.mark.parametrize(("name", "what"), [("y", "not there"), ("id", "int64")])
def test_only_lists_can_be_padded(write: Write, tmp_path: Path, name: str, what: str) -> None:
    write({"id": [1, 2]})
    (told,) = problems(cheap(tmp_path, pad={name: 3}))
    assert f"data.pad names column '{name}', which is {what}" in told


def test_nulls_are_refused_with_count_file_and_row(write: Write, tmp_path: Path) -> None:
    write({"x": [1, 2, 3]}, "a")
    write({"x": [1, 2, 3, 4, 5, 6, None, None]}, "b")
    write({"x": pa.array([None], pa.int64())}, "c")
    (told,) = problems(cheap(tmp_path))
    assert "column 'x' has 3 null(s) in 2 of 3 file(s)" in told
    assert "b.parquet (row group 1, row 2)" in told
    assert "data.invalid='skip' or 'fill'" in told
    for fine in ({"invalid": "skip"}, {"invalid": "fill"}, {"transform": True}):
        assert cheap(tmp_path, **fine) == []
    write_index(build_index(str(tmp_path)))
    assert problems(cheap(tmp_path)) == [told], "an index beside the data knows it too"


def test_fewer_rows_than_a_global_batch_are_refused(write: Write, tmp_path: Path) -> None:
    # case H14
    write({"x": [1, 2, 3]})
    (told,) = problems(cheap(tmp_path, global_batch=4))
    assert "3 rows, which do not fill one global batch of 4" in told
    assert cheap(tmp_path, global_batch=3) == []
    assert problems(whole(tmp_path, job=True, global_batch=4)) == [told]


def test_row_groups_that_memory_does_not_hold_are_refused(write: Write, tmp_path: Path) -> None:
    # a value over and over: small in the file, not in memory
    zeros = pa.FixedSizeListArray.from_arrays(pa.nulls(100 * 2000, pa.int8()).fill_null(0), 2000)
    table = pa.concat_tables([pa.table({"x": zeros})] * 50)
    pq.write_table(table.combine_chunks(), tmp_path / "a.parquet", row_group_size=10**6)
    assert cheap(tmp_path) == []
    index = build_index(str(tmp_path))
    assert index.group_bytes == 50 * 100 * 2000
    (told,) = problems(cheap(tmp_path, workers=200))
    for words in ("10 MB in memory", "5,000 rows", "4.0 GB", "2.1 GB is the limit", "prepare"):
        assert words in told


def test_large_row_groups_are_advised_against(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"x": np.zeros(9_000_000)}), tmp_path / "a.parquet", row_group_size=10**7
    )
    (advice,) = cheap(tmp_path)
    assert advice.level == "advice"
    assert "row groups take up to 72 MB in memory" in advice.text


def test_all_problems_are_told_at_once(write: Write, tmp_path: Path) -> None:
    write({"s": ["a", "b"], "x": [1, None]})
    with pytest.raises(DataError, match=r"for 3 reasons:\n  - column 's'(.|\n)*\n  - column 'x'"):
        refuse(cheap(tmp_path, global_batch=9))
    with pytest.raises(DataError, match=r"^column 's' is string"):
        refuse(cheap(tmp_path, invalid="skip"))
    assert refuse([Finding("advice", "look")]) == ["look"]


# --------------------------------------------------------------------------- by reading it all


def test_a_good_data_set_gives_no_findings(tmp_path: Path) -> None:
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(400_000, np.float32)), 400)
    table = pa.table({"x": x, "label": np.arange(1000) % 10})
    options = {"row_group_size": 400, "write_page_checksum": True}
    pq.write_table(table, tmp_path / "a.parquet", **options)
    rules = Rules(ranges={"label": (0, 9)}, job=True, global_batch=8)
    found = scan(str(tmp_path), rules)
    index, findings = judge(found, rules)
    assert findings == []
    assert index is not None
    assert index.fingerprint == build_index(str(tmp_path)).fingerprint
    assert (found.groups_read, found.checksums) == (3, True)
    assert (found.values["label"].low, found.values["label"].high) == (0, 9)
    assert (found.values["x"].shortest, found.values["x"].longest) == (400, 400)


def test_each_bad_value_is_told_with_its_place(write: Write, tmp_path: Path) -> None:
    write({"x": [1.0, 2.0, 3.0, 4.0, 5.0], "y": [0, 1, 2, 3, 4]}, "a")
    x = [0.0, 1.0, 2.0, 3.0, 4.0, float("nan"), float("inf"), float("nan")]
    write({"x": x, "y": [0, 1, None, 12, 4, -1, 6, 7]}, "b")
    told = problems(whole(tmp_path, ranges={"y": (0, 9)}))
    group = f"{tmp_path}/b.parquet (row group"
    assert f"column 'x' has 2 NaN value(s), the first in {group} 1, row 1)" in told[0]
    assert f"column 'x' has 1 infinite value(s), the first in {group} 1, row 2)" in told[1]
    assert f"column 'y' has 1 null value(s), the first in {group} 0, row 2)" in told[2]
    assert f"column 'y' has 2 value(s) outside 0:9, the first 12 in {group} 0, row 3)" in told[3]
    assert len(told) == 4
    for fine in ({"invalid": "skip"}, {"transform": True}):
        assert problems(whole(tmp_path, job=True, **fine)) == []
        assert "NaN" in whole(tmp_path, **fine)[0].text, "said all the same"


def test_the_place_is_right_far_into_a_large_row_group(write: Write, tmp_path: Path) -> None:
    x = np.zeros(200_000)
    x[150_001] = np.nan
    write({"x": x}, row_group_size=200_000)
    assert "(row group 0, row 150001)" in problems(whole(tmp_path))[0]


def test_values_inside_lists_have_the_place_of_their_row(write: Write, tmp_path: Path) -> None:
    rows = [[1.0], None, [], [2.0, float("nan")], [3.0], [4.0, 5.0, 6.0, None]]
    write({"x": rows})
    rules = Rules(pad={"x": 2}, job=True)
    found = scan(str(tmp_path), rules)
    told = problems(judge(found, rules)[1])
    values = found.values["x"]
    assert values.null.count == 2
    assert (values.null.first, values.nan.first) == ((0, 0, 1), (0, 0, 3))
    assert (values.low, values.high, values.shortest, values.longest) == (1.0, 6.0, 0, 4)
    assert any("1 list(s) longer than data.pad=2" in text for text in told)
    assert any("(row group 1, row 1) with 4 values. Raise it to 4" in text for text in told)


def test_damaged_files_are_all_told_in_one_pass(write: Write, tmp_path: Path) -> None:
    plain = {"compression": "none", "use_dictionary": False}
    for name in "abcdef":
        write({"x": list(range(20))}, name, **plain)
    (tmp_path / "b.parquet").write_bytes(b"")
    content = (tmp_path / "c.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(content[:-20])
    (tmp_path / "d.parquet").write_bytes(b"id,x\n1,2\n" * 9)
    (tmp_path / "e.parquet").write_bytes(content[:-60] + b"\xff" * 52 + content[-8:])
    first = pq.read_metadata(tmp_path / "f.parquet").row_group(2).column(0).data_page_offset
    flipped = bytearray(content)
    flipped[content.index(np.arange(8, 12).tobytes(), first)] ^= 1
    (tmp_path / "f.parquet").write_bytes(flipped)
    told = problems(whole(tmp_path))
    assert len(told) == 5
    for words in (
        "b.parquet is empty (0 bytes)",
        "c.parquet (",
        "d.parquet (81 bytes) does not end as a Parquet file",
        "e.parquet has a damaged footer",
        "f.parquet (row group 2) is damaged: its bytes do not match their checksum",
    ):
        assert any(words in text for text in told), words


def test_a_damaged_page_without_checksums_is_found_if_it_cannot_be_read(
    write: Write, tmp_path: Path
) -> None:
    write({"x": list(range(1000))}, write_page_checksum=False, compression="zstd")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[30:60] = b"\xff" * 30
    (tmp_path / "a.parquet").write_bytes(content)
    (told,) = problems(whole(tmp_path))
    assert "a.parquet (row group 0) is damaged" in told


def test_nothing_but_damage_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=r"no file of .* is a whole Parquet file.*is empty"):
        scan(str(tmp_path), Rules())
    (tmp_path / "a.parquet").rename(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"holds no \.parquet file"):
        scan(str(tmp_path), Rules())


def test_schema_drift_is_told_by_column_and_with_how_many_files(
    write: Write, tmp_path: Path
) -> None:
    write({"x": [1, 2], "y": [1, 2]}, "a")
    write({"y": [1, 2], "x": [3, 4]}, "b")  # another order is no drift
    for name in "cde":
        write({"x": [1.5], "y": [1]}, name)
    write({"x": [1]}, "f")
    write({"x": [1], "y": [1], "z": [1]}, "g")
    write({"x": pa.array([], pa.null()), "y": pa.array([], pa.null())}, "h")  # no rows, no types
    told = problems(whole(tmp_path))
    assert len(told) == 3
    assert "column 'x' is double in " in told[0]
    assert "c.parquet and 2 more file(s) but int64 in " in told[0]
    assert "column 'y' is missing in " in told[1]
    assert "column 'z' is int64 in " in told[2]
    assert len(problems(whole(tmp_path, columns=["x"]))) == 1
    assert [f.level for f in whole(tmp_path, columns=["y"])][:1] == ["problem"]
    with pytest.raises(DataError, match="no column 'q'"):
        scan(str(tmp_path), Rules(columns=["q"]))


def test_a_file_without_rows_may_have_any_types(write: Write, tmp_path: Path) -> None:
    write({"x": pa.array([], pa.null())}, "a")
    write({"x": [1, 2, 3]}, "b")
    assert build_index(str(tmp_path)).schema.field("x").type == pa.int64()
    assert "1 file(s) have no rows, e.g. a.parquet" in whole(tmp_path)[0].text


def test_a_column_that_is_there_twice_is_told(write: Write, tmp_path: Path) -> None:
    write({"x": [1, 2], "y": [1, 2]}, "a")
    pq.write_table(pa.table([[1], [2]], names=["x", "x"]), tmp_path / "b.parquet")
    (told,) = problems(whole(tmp_path))
    assert "column 'x' is there more than once in" in told
    with pytest.raises(DataError, match=r"b\.parquet has more than one column 'x'"):
        build_index(str(tmp_path))


def test_names_may_hold_anything(tmp_path: Path) -> None:
    names = ["größe", "a.b", "a b", "a/b", "nulls:x", "😀", "path", "c=1,d"]
    place = tmp_path / "ein ordner" / "k=ü"
    place.mkdir(parents=True)
    table = pa.table({name: pa.array([1, None]) for name in names})
    pq.write_table(table, place / "teil 1.parquet")
    index = build_index(str(tmp_path))
    again = type(index).from_bytes(index.to_bytes())
    assert again.schema.names == names
    assert {name: counts.tolist() for name, counts in again.nulls.items()} == {
        n: [1] for n in names
    }
    assert len(problems(whole(tmp_path, columns=names))) == len(names)


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_missing_checksums_are_advised(
    write: Write, tmp_path: Path, checksums: bool, version: str, dictionary: bool
) -> None:
    layout = {"data_page_version": version, "use_dictionary": dictionary}
    write(
        {"x": list(range(70_000))}, write_page_checksum=checksums, row_group_size=70_000, **layout
    )
    told = [finding.text for finding in whole(tmp_path)]
    assert told == [] if checksums else "pages have no checksums" in told[0]


def test_row_groups_far_from_a_megabyte_are_advised(write: Write, tmp_path: Path) -> None:
    write({"x": list(range(100))})
    (small,) = whole(tmp_path)
    assert "half of the row groups take less than 32 B" in small.text
    write({"x": np.zeros(3_000_000)}, row_group_size=3_000_000)
    (large,) = whole(tmp_path)
    assert (large.level, "up to 24 MB in memory" in large.text) == ("advice", True)


def test_a_sample_reads_some_row_groups_from_everywhere(write: Write, tmp_path: Path) -> None:
    for name in "abc":
        write({"x": list(range(16))}, name)
    ticks: list[tuple[int, int]] = []
    found = scan(str(tmp_path), Rules(), sample=3, on_progress=lambda *at: ticks.append(at))
    assert found.groups_read == 3
    assert (found.values["x"].low, found.values["x"].high) == (0, 3)
    assert ticks == [(1, 3), (2, 3), (3, 3)] * 2
    assert scan(str(tmp_path), Rules(), sample=99).groups_read == 12


def test_a_bucket_is_read_like_a_disk(bucket: Any, uneven: Path) -> None:
    for file in uneven.iterdir():
        bucket.objects[f"set/{file.name}"] = file.read_bytes()
    bucket.fail(r"(GET|HEAD) set/part-003\.parquet", status=404, code="NoSuchKey", message="Gone.")
    told = problems(whole("s3://bucket/set"))  # type: ignore[arg-type]  # a URL does as well
    assert len(told) == 1
    assert "s3://bucket/set/part-003.parquet cannot be read: NoSuchKey" in told[0]


@pytest.mark.slow
def test_ten_thousand_small_files_leave_no_file_open(tmp_path: Path, write: Write) -> None:
    write({"x": [1, 2]})
    content = (tmp_path / "a.parquet").read_bytes()
    for number in range(10_000):
        (tmp_path / f"{number:05}.parquet").write_bytes(content)
    before = len(os.listdir("/proc/self/fd"))
    index = build_index(str(tmp_path))
    assert index.total == 20_002
    assert scan(str(tmp_path), Rules()).values["x"].high == 2
    assert len(os.listdir("/proc/self/fd")) <= before + 2
