import os
from pathlib import Path

import pytest

from rayway.storage.disk import Disk


def test_syncing_a_file_asks_the_kernel(tmp_path: Path) -> None:
    """A pipe cannot be synced, so asking for it is seen in the kernel's answer."""
    read, write = os.pipe()
    with (
        os.fdopen(read, "rb"),
        os.fdopen(write, "wb") as pipe,
        pytest.raises(OSError, match="Invalid argument"),
    ):
        Disk().sync_file(pipe)


def test_syncing_a_folder_asks_the_kernel() -> None:
    """A folder of /proc cannot be synced either."""
    if not Path("/proc/self").exists():
        pytest.skip("needs /proc")
    with pytest.raises(OSError, match="Invalid argument"):
        Disk().sync_folder(Path("/proc/self"))


def test_syncing_writes_what_python_still_holds(tmp_path: Path) -> None:
    with Disk().create_file(tmp_path / "a") as file:
        file.write(b"1")
        Disk().sync_file(file)
        assert (tmp_path / "a").read_bytes() == b"1"
    Disk().sync_folder(tmp_path)


def test_a_new_file_is_new(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(FileExistsError):
        Disk().create_file(tmp_path / "a")
    with pytest.raises(FileExistsError):
        Disk().link(tmp_path / "a", tmp_path / "a")


def test_what_is_there_or_gone_already_is_no_error(tmp_path: Path) -> None:
    Disk().create_folder(tmp_path / "folder")
    Disk().create_folder(tmp_path / "folder")
    Disk().remove_file(tmp_path / "none")
    Disk().remove_folder(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []
