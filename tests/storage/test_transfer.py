import io
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayway.errors import StorageError
from rayway.storage.folder import Piece, Stamp
from rayway.storage.transfer import AT_ONCE, Download, Upload, whole


class Store:
    """Takes an object in parts of 4 bytes, at most 6 of them."""

    part_bytes = 4
    most_parts = 6

    def __init__(self, *, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.lock = threading.Lock()
        self.parts: dict[int, bytes] = {}
        self.object: bytes | None = None
        self.dropped = False
        self.at_once = self.most_at_once = 0

    def put_whole(self, data: memoryview) -> None:
        self.object = bytes(data)

    def begin(self, writer: str) -> str:
        return f"upload of {writer}"

    def put_part(self, upload: str, number: int, data: memoryview) -> Stamp:
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(0.001)
        with self.lock:
            self.at_once -= 1
            if number == self.fail_at:
                raise StorageError("no")
            self.parts[number] = bytes(data)
        return (f"stamp {number}",)

    def finish(self, upload: str, stamps: list[Stamp], writer: str) -> None:
        assert upload == f"upload of {writer}"
        assert stamps == [(f"stamp {n}",) for n in range(1, len(self.parts) + 1)]
        self.object = b"".join(self.parts[n] for n in sorted(self.parts))

    def drop(self, upload: str) -> None:
        self.dropped = True


@settings(deadline=None)
@given(st.lists(st.binary(max_size=11), max_size=6))
def test_what_is_written_in_any_pieces_is_the_object(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    store, fits = Store(), len(data) <= Store.part_bytes * Store.most_parts
    upload = Upload(store)
    try:
        for piece in pieces:
            assert upload.write(memoryview(piece)) == len(piece)
        upload.finish()
    except StorageError:
        assert not fits
        assert store.object is None
        return
    assert fits
    assert store.object == data
    assert store.most_at_once <= AT_ONCE
    sizes = [len(store.parts[n]) for n in sorted(store.parts)]
    assert set(sizes[:-1]) <= {4}  # some stores insist on equal parts
    assert (sizes == []) == (len(data) <= 4)


def test_a_part_that_is_refused_ends_the_upload() -> None:
    store = Store(fail_at=2)
    upload = Upload(store)
    upload.write(bytes(24))
    with pytest.raises(StorageError, match="no"):
        upload.finish()
    upload.drop()
    assert store.dropped
    assert store.object is None


def test_dropping_waits_for_the_parts_on_their_way() -> None:
    store = Store()
    upload = Upload(store)
    upload.write(bytes(20))
    upload.drop()
    assert store.at_once == 0
    assert store.dropped


def test_an_upload_that_never_began_has_nothing_to_drop() -> None:
    store = Store()
    Upload(store).drop()
    assert not store.dropped


class Fetches:
    """Gives bytes, and remembers what it was asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[tuple[int, int]] = []

    def __call__(self, start: int, length: int) -> bytes:
        self.asked.append((start, length))
        assert 0 <= start < start + length <= len(self.data)
        return self.data[start : start + length]


def test_an_object_that_came_whole_is_not_asked_for_again() -> None:
    fetch = Fetches(b"abc")
    assert whole(Piece(b"abc", 3), fetch) == b"abc"
    assert fetch.asked == []
    assert whole(Piece(b"a", 3), fetch) == b"abc"


@given(
    st.binary(max_size=60),
    st.lists(st.tuples(st.integers(-5, 70), st.integers(0, 2), st.integers(0, 70)), max_size=8),
)
def test_a_download_reads_as_a_file_does(data: bytes, moves: list[tuple[int, int, int]]) -> None:
    file, remote = io.BytesIO(data), Download(Fetches(data), len(data))
    for offset, whence, length in moves:
        if not (whence == io.SEEK_SET and offset < 0):
            assert remote.seek(offset, whence) == file.seek(offset, whence)
        want, got = file.read(length), bytearray(length)
        count = 0
        while fresh := remote.readinto(memoryview(got)[count:]):
            count += fresh
        assert bytes(got[:count]) == want
        assert remote.tell() == file.tell()


def test_reading_on_asks_ahead_and_looking_in_does_not() -> None:
    data = bytes(40 << 20)
    fetch = Fetches(data)
    with io.BufferedReader(Download(fetch, len(data)), 1 << 20) as file:
        file.read(10)
        file.seek(30 << 20)
        file.read(10)
    assert fetch.asked == [(0, 1 << 20), (30 << 20, 1 << 20)]
    fetch.asked.clear()
    with io.BufferedReader(Download(fetch, len(data)), 1 << 20) as file:
        for _ in range(3):
            file.read(1 << 20)
        time.sleep(0.1)
        asked = sorted(fetch.asked)
    assert asked[0] == (0, 1 << 20)
    assert 2 <= len(asked) <= 2 + AT_ONCE
    assert all(length == 8 << 20 for _, length in asked[1:])
