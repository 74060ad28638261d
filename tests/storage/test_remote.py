from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from rayway.storage.remote import RemoteFolder


def folder_at(path: Path) -> RemoteFolder:
    """A file system other than memory: fsspec's own for local files, which commits by a move."""
    return RemoteFolder(str(path), filesystem=LocalFileSystem(auto_mkdir=True))


def test_any_fsspec_file_system_serves(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    folder.write("a/b", [b"1" * (9 << 20), b"2"])
    folder.append("a/log", b"3")
    assert folder.is_shared
    assert not folder.is_local
    assert folder.read("a/b")[-2:] == b"12"
    assert sorted(folder.list("")) == [("a/b", (9 << 20) + 1), ("a/log", 1)]
    assert folder.folders("") == ["a"]
    assert folder.exists("a/b")
    assert not folder.exists("a")
    with folder.open_read("a/log") as file:
        assert file.read() == b"3"
    folder.delete_folder("a")
    assert folder.list("") == []


def test_an_upload_that_fails_is_discarded(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise ZeroDivisionError

    folder = folder_at(tmp_path)
    folder.write("a", [b"old"])
    with pytest.raises(ZeroDivisionError):
        folder.write("a", chunks())
    assert folder.read("a") == b"old"
    assert folder.list("") == [("a", 3)]


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
    assert folder.list("") == [("a/b", 1)]
