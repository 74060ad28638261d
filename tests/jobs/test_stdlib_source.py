"""The standard library's sources as bytes: how they are split, cut, and that it is repeatable."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sources.stdlib import SEQ_LEN, _table, prepare, split_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "stdlib"
    prepare(str(folder))
    return folder


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small stand-in for the standard library: 200 modules and some things to leave out."""
    root = tmp_path / "lib"
    for number in range(200):
        module = root / f"package{number % 7}" / f"module{number}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(f"VALUE = {number}\n")
    for unwanted in ("site-packages/other.py", "test/test_it.py", "package1/__pycache__/x.py"):
        (root / unwanted).parent.mkdir(parents=True, exist_ok=True)
        (root / unwanted).write_text("UNWANTED = 1\n")
    (root / "notes.txt").write_text("not Python")
    return root


def text_of(split: Path) -> np.ndarray:
    text = pq.read_table(split)["text"].combine_chunks()
    return np.frombuffer(text.buffers()[1], np.uint8).reshape(-1, SEQ_LEN + 1)


def test_rows_are_fixed_size_binary_of_one_byte_more_than_is_predicted(folder: Path) -> None:
    for split in ("train", "test"):
        schema = pq.read_schema(folder / split / "part-00000.parquet")
        assert schema.names == ["text"]
        assert schema.field("text").type == pa.binary(SEQ_LEN + 1)


def test_training_data_has_several_shards_of_several_row_groups(folder: Path) -> None:
    files = sorted((folder / "train").iterdir())
    assert len(files) > 4
    assert all(pq.read_metadata(file).num_row_groups > 1 for file in files[:-1])


def test_rows_overlap_by_one_byte_so_that_each_byte_is_predicted_once(folder: Path) -> None:
    text = text_of(folder / "test")
    np.testing.assert_array_equal(text[1:, 0], text[:-1, -1])


def test_rows_joined_give_the_files_back() -> None:
    contents = [b"import os\n" * 20, b"x = 1\n" * 50]
    rows = _table(contents)["text"].to_pylist()
    joined = rows[0][:1] + b"".join(row[1:] for row in rows)
    stream = b"".join(content + b"\0" for content in contents)
    assert stream.startswith(joined)
    assert len(stream) - len(joined) < SEQ_LEN


def test_each_file_is_in_one_split_only(library: Path) -> None:
    train, test = split_files(library)
    assert len(train) + len(test) == 200
    assert not set(train) & set(test)
    assert 0 < len(test) < 20


def test_files_with_the_same_content_are_used_once_and_never_in_both_splits(library: Path) -> None:
    before = split_files(library)
    for module in list(library.glob("package1/*.py")):
        (library / f"copy_of_{module.name}").write_bytes(module.read_bytes())
    after = split_files(library)
    assert [len(split) for split in after] == [len(split) for split in before]
    contents = [set(split.values()) for split in after]
    assert not contents[0] & contents[1]
    assert contents == [set(split.values()) for split in before]


def test_a_files_split_does_not_depend_on_the_other_files(library: Path) -> None:
    _, held_out = split_files(library)
    for module in library.glob("package2/*.py"):
        module.unlink()
    _, still_held_out = split_files(library)
    kept = {path for path in held_out if not path.startswith("package2/")}
    assert set(still_held_out) == kept


def test_tests_caches_installed_packages_and_other_files_are_left_out(library: Path) -> None:
    train, test = split_files(library)
    assert all(path.startswith("package") and path.endswith(".py") for path in train | test)
    assert b"UNWANTED = 1\n" not in (train | test).values()


def test_preparing_twice_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    prepare(str(tmp_path / "again"))
    files = sorted(folder.rglob("*.parquet"))
    assert files
    for file in files:
        again = tmp_path / "again" / file.relative_to(folder)
        assert again.read_bytes() == file.read_bytes()
