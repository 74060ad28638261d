"""The digits data set: what is in it, how it is split, and that it is always the same."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sources.digits import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    prepare(str(folder))
    return folder


def images_and_labels(split: Path) -> tuple[list[bytes], np.ndarray]:
    table = pq.read_table(split)
    images = [bytes(image) for image in table["image"].to_pylist()]
    return images, table["label"].to_numpy()


def test_columns_are_64_grey_levels_and_a_label(folder: Path) -> None:
    for split in ("train", "test"):
        schema = pq.read_schema(folder / split / "part-00000.parquet")
        assert schema.field("image").type == pa.list_(pa.uint8(), 64)
        assert schema.field("label").type == pa.int64()


def test_each_split_has_several_shards_of_several_row_groups(folder: Path) -> None:
    for split, shards in (("train", 8), ("test", 2)):
        files = sorted((folder / split).iterdir())
        assert len(files) == shards
        assert all(pq.read_metadata(file).num_row_groups > 1 for file in files)


def test_every_image_is_in_one_split_only(folder: Path) -> None:
    train, _ = images_and_labels(folder / "train")
    test, _ = images_and_labels(folder / "test")
    assert len(train) + len(test) == 1797
    assert len(set(train) | set(test)) == 1797


def test_each_digit_is_held_out_in_the_same_proportion(folder: Path) -> None:
    _, train = images_and_labels(folder / "train")
    _, test = images_and_labels(folder / "test")
    held_out = np.bincount(test) / (np.bincount(train) + np.bincount(test))
    assert len(held_out) == 10
    np.testing.assert_allclose(held_out, 0.2, atol=0.004)


def test_digits_are_mixed_in_each_shard(folder: Path) -> None:
    for shard in (folder / "train").iterdir():
        labels = pq.ParquetFile(shard).read(["label"])["label"].to_numpy()
        assert set(labels) == set(range(10))


def test_image_and_label_still_belong_together(folder: Path) -> None:
    # The grey levels' mean differs from digit to digit by far more than chance would make it.
    images, labels = images_and_labels(folder / "train")
    pixels = np.frombuffer(b"".join(images), np.uint8).reshape(-1, 64).astype(float)
    prototypes = np.stack([pixels[labels == digit].mean(0) for digit in range(10)])
    nearest = ((pixels[:, None] - prototypes) ** 2).sum(-1).argmin(1)
    assert (nearest == labels).mean() > 0.85


def test_preparing_twice_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    prepare(str(tmp_path / "again"))
    for file in folder.rglob("*.parquet"):
        again = tmp_path / "again" / file.relative_to(folder)
        assert again.read_bytes() == file.read_bytes()
