import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from rayway.storage.disk import Disk
from rayway.storage.folder import Page
from rayway.storage.local import LocalFolder


class TracedDisk(Disk):
    """The real disk, keeping a list of what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def create_file(self, path: Path) -> BinaryIO:
        self.calls.append(("create", path.name))
        return super().create_file(path)

    def sync_file(self, file: BinaryIO) -> None:
        self.calls.append(("sync file", Path(file.name).name))
        super().sync_file(file)

    def sync_folder(self, path: Path) -> None:
        self.calls.append(("sync folder", path.name))
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self.calls.append(("rename", target.name))
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self.calls.append(("link", target.name))
        super().link(source, target)


class DiskWithoutLinks(Disk):
    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_a_write_is_durable_before_it_has_its_name_and_its_name_before_it_is_told(
    tmp_path: Path,
) -> None:
    disk = TracedDisk()
    LocalFolder(tmp_path, disk=disk).write("a/b", [b"1"])
    (_, draft), *_ = [call for call in disk.calls if call[0] == "create"]
    assert disk.calls == [
        ("sync folder", tmp_path.name),
        ("create", draft),
        ("sync file", draft),
        ("rename", "b"),
        ("sync folder", "a"),
    ]


def test_a_create_is_durable_before_it_has_its_name(tmp_path: Path) -> None:
    disk = TracedDisk()
    LocalFolder(tmp_path, disk=disk).create("b", b"1")
    assert [verb for verb, _ in disk.calls] == ["create", "sync file", "link", "sync folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_deletion_is_durable_before_it_is_told(tmp_path: Path) -> None:
    disk = TracedDisk()
    folder = LocalFolder(tmp_path, disk=disk)
    folder.write("a/b", [b"1"])
    disk.calls.clear()
    folder.delete("a/b")
    folder.delete_rest("a")
    assert disk.calls == [("sync folder", "a"), ("sync folder", tmp_path.name)]


def test_a_create_is_exclusive_without_hard_links_too(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path, disk=DiskWithoutLinks())
    folder.create("a", b"mine")
    with pytest.raises(FileExistsError):
        folder.create("a", b"theirs")
    assert folder.fetch("a").data == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_dead_writers_draft_is_no_object_and_goes_with_its_folder(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.write("a/b", [b"1"])
    (tmp_path / "a" / ".b.0123456789abcdef.tmp").touch()
    (tmp_path / "a" / "b.tmp").touch()
    assert [key for key, _ in sorted(folder.list("a", deep=True).sizes)] == ["a/b", "a/b.tmp"]
    folder.delete_rest("a")
    assert list(tmp_path.iterdir()) == []


def test_deleting_a_folder_does_not_follow_links_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    folder = LocalFolder(tmp_path / "root")
    folder.write("a/b", [b"1"])
    (tmp_path / "root/a/way").symlink_to(tmp_path / "outside")
    assert [key for key, _ in folder.list("a", deep=True).sizes] == ["a/b"]
    folder.delete_rest("a")
    assert (tmp_path / "outside" / "file").exists()
    assert not (tmp_path / "root" / "a").exists()


def test_a_folder_that_cannot_be_listed_is_an_error_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for deep in (True, False):
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            LocalFolder(tmp_path).list("loop", deep=deep)


def test_a_file_holds_no_objects(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = LocalFolder(tmp_path / "file")
    assert folder.list("a", deep=True) == folder.list("a", deep=False) == Page([], [])
    with pytest.raises(NotADirectoryError):
        folder.create("a", b"1")
