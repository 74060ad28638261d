from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from rayway.errors import StorageError
from rayway.storage.folder import Piece
from rayway.storage.objects import Objects
from rayway.storage.remote import RemoteFolder


def folder_at(path: Path) -> RemoteFolder:
    """A file system other than memory: fsspec's own for local files, which commits by a move."""
    return RemoteFolder(str(path), filesystem=LocalFileSystem(auto_mkdir=True))


def test_any_fsspec_file_system_serves(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    folder.write("a/b", [b"1" * (9 << 20), b"2"])
    folder.write("a/log", [b"3"])
    assert folder.is_shared
    assert not folder.is_local
    assert folder.append is None
    assert folder.fetch("a/b").data[-2:] == b"12"
    assert folder.fetch("a/b", 9 << 20, 5) == Piece(b"2", (9 << 20) + 1)
    assert folder.fetch("a/b", 10 << 20, 5).data == b""
    assert sorted(folder.list("", deep=True).sizes) == [("a/b", (9 << 20) + 1), ("a/log", 1)]
    assert folder.list("", deep=False).folders == ["a"]
    assert folder.exists("a/b")
    assert not folder.exists("a")
    assert folder.open_read("a/log") is None
    folder.delete_all(["a/log", "a/b", "a/none"])
    assert folder.list("", deep=True).sizes == []


def test_an_upload_that_fails_is_discarded(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise ZeroDivisionError

    folder = folder_at(tmp_path)
    folder.write("a", [b"old"])
    with pytest.raises(ZeroDivisionError):
        folder.write("a", chunks())
    assert folder.fetch("a").data == b"old"
    assert folder.list("", deep=True).sizes == [("a", 3)]


class WithMarkers(DirFileSystem):
    """An object store where somebody made "folders", which are empty objects."""

    cachable = False

    def find(self, path: str, **kwargs: Any) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = super().find(path, **kwargs)
        marker = {"type": "file", "size": 0}
        return {path: marker, f"{path}/a/": marker} | found


def test_folder_markers_are_no_objects(tmp_path: Path) -> None:
    files = WithMarkers(path=str(tmp_path), fs=LocalFileSystem(auto_mkdir=True))
    folder = RemoteFolder("runs", filesystem=files)
    folder.write("a/b", [b"1"])
    assert folder.list("", deep=True).sizes == [("a/b", 1)]


def test_an_object_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """These file systems tell no versions, so that only the length can give it away."""
    objects = Objects(f"memory://{tmp_path}", folder=folder_at(tmp_path))
    objects.put("a", bytes(3 << 20))
    with objects.open_read("a") as file:
        file.read(10)
        objects.put("a", bytes(2 << 20))
        with pytest.raises(StorageError, match="ended while it was read"):
            file.read()


def test_a_log_grows_on_any_file_system(tmp_path: Path) -> None:
    objects = Objects(f"memory://{tmp_path}", folder=folder_at(tmp_path))
    for number in range(4):
        objects.append("a/log", bytes([number]) * (200 << 10))
    with objects.open_log("a/log") as log:
        assert log.read() == b"".join(bytes([number]) * (200 << 10) for number in range(4))
    assert [info.bytes >> 10 for info in objects.list()] == [400, 400]
