"""The rows of source files: Parquet, text and pictures.

They come as tables of a bounded size, cut where the files and the format say and nowhere else, so
that the same files give the same tables on any number of processes.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rayway.data.files import filesystem_for
from rayway.data.sources import COMPRESSED, Piece, merge
from rayway.errors import DataError, SpecError

BLOCK_BYTES = 8 << 20
"""About how much of a file becomes one table."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_LINE_BYTES = 512 << 20


@dataclass(frozen=True)
class Rows:
    """Some rows and where they are from."""

    table: pa.Table
    paths: tuple[str, ...]
    """The file; or the file of each row."""
    first: int = 0
    """How many rows of the file, or of the file after ``byte``, were before these."""
    byte: int = 0
    weight: int = 0
    """About how many bytes of the source they are."""

    def where(self, row: int) -> str:
        """Return the words for a row in a message."""
        if len(self.paths) > 1 or self.first < 0:
            return self.paths[row]
        after = f" after byte {self.byte}" if self.byte else ""
        return f"{self.paths[0]} (row {self.first + row}{after})"

    def range(self) -> str:
        """Return the words for all of the rows."""
        if len(self.paths) > 1:
            return f"{self.paths[0]} to {self.paths[-1]}"
        if self.first < 0:
            return self.paths[0]
        after = f" after byte {self.byte}" if self.byte else ""
        return f"{self.paths[0]} (rows {self.first} to {self.first + len(self.table) - 1}{after})"


@dataclass(frozen=True)
class Opened:
    """A source's place, as the process that reads it sees it."""

    filesystem: pafs.FileSystem
    folder: str
    root: str

    @classmethod
    def at(cls, root: str) -> "Opened":
        """Return the place of a source's root."""
        return cls(*filesystem_for(root), root)

    def name(self, path: str) -> str:
        """Return a file's name in a message."""
        return f"{self.root}/{path}"

    def stream(self, path: str) -> Any:
        """Open a file to be read from its beginning, unpacked if its name says it is packed."""
        packed = COMPRESSED.get(path.rpartition(".")[2].lower())
        return self.filesystem.open_input_stream(f"{self.folder}/{path}", compression=packed)

    def whole(self, path: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            DataError: It cannot be read; it is named.
        """
        try:
            with self.stream(path) as stream:
                return bytes(stream.read())
        except (OSError, pa.ArrowException) as error:
            raise unreadable(self.name(path), error) from error


def unreadable(name: str, error: Exception | str) -> DataError:
    """Return the error for a file that cannot be read."""
    return DataError(f"{name} cannot be read: {error}")


def parquet_rows(place: Opened, pieces: Sequence[Piece]) -> Iterator[Rows]:
    """Yield the rows of Parquet files, a bounded number at a time, whatever their row groups.

    Raises:
        DataError: A file cannot be read; it is named.
    """
    for piece in merge(pieces):
        name = place.name(piece.path)
        try:
            with place.filesystem.open_input_file(f"{place.folder}/{piece.path}") as source:
                file = pq.ParquetFile(
                    source, buffer_size=1 << 20, page_checksum_verification=True, pre_buffer=False
                )
                groups = range(piece.first, piece.stop or file.num_row_groups)
                about = [file.metadata.row_group(i) for i in range(groups.stop)]
                row = sum(group.num_rows for group in about[: groups.start])
                rows = sum(about[i].num_rows for i in groups)
                size = sum(about[i].total_byte_size for i in groups)
                some = max(min(rows * BLOCK_BYTES // max(size, 1), 1 << 20), 1)
                for batch in file.iter_batches(some, row_groups=list(groups), use_threads=False):
                    weight = size * len(batch) // rows
                    yield Rows(pa.Table.from_batches([batch]), (name,), row, weight=weight)
                    row += len(batch)
        except (OSError, pa.ArrowException) as error:
            raise unreadable(name, error) from error


def line_blocks(place: Opened, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield (byte, whole lines) of those lines of a file that begin in a piece.

    Raises:
        DataError: The file cannot be read, or has a line that is too long to hold.
    """
    name = place.name(piece.path)
    packed = piece.path.rpartition(".")[2].lower() in COMPRESSED
    stop = None if packed else piece.stop
    at = max(piece.first - 1, 0)  # from the byte before on: it says whether a line begins at first
    held = b""
    try:
        with (
            place.stream(piece.path)
            if packed
            else place.filesystem.open_input_file(f"{place.folder}/{piece.path}") as stream
        ):
            if at < piece.first:
                stream.seek(at)
            skipping = at < piece.first
            while chunk := stream.read(BLOCK_BYTES):
                held += chunk
                if skipping:
                    begin = held.find(b"\n") + 1
                    skipping = begin == 0
                    at, held = at + (begin or len(held)), held[begin:] if begin else b""
                if stop is not None and at >= stop:
                    return
                if stop is not None and (end := held.find(b"\n", max(stop - 1 - at, 0)) + 1):
                    yield at, held[:end]
                    return
                if end := held.rfind(b"\n") + 1:
                    yield at, held[:end]
                    at, held = at + end, held[end:]
                if len(held) > _LONGEST_LINE_BYTES:
                    raise DataError(f"{name} has a line of more than 512 MiB at byte {at}.")
            if held:
                yield at, held
    except (OSError, pa.ArrowException) as error:
        raise unreadable(name, error) from error


def text_lines(place: Opened, pieces: Sequence[Piece]) -> Iterator[Rows]:
    """Yield a row a line, column ``text``, without the line's end.

    Raises:
        DataError: A file cannot be read or is not UTF-8; file and line are named.
    """
    for piece in merge(pieces):
        row = 0
        for at, block in line_blocks(place, piece):
            text = block.removeprefix(BYTE_ORDER_MARK) if at == 0 else block
            lines = text.removesuffix(b"\n").split(b"\n")
            if b"\r\n" in block:
                lines = [line.removesuffix(b"\r") for line in lines]
            found = Rows(
                pa.table({"text": pa.array(lines, pa.binary())}),
                (place.name(piece.path),),
                first=row,
                byte=piece.first,
                weight=len(block),
            )
            try:
                table = pa.table({"text": found.table["text"].cast(pa.string())})
            except pa.ArrowInvalid:
                for number, line in enumerate(lines):
                    _utf8(line, found.where(number))
                raise
            yield replace(found, table=table)
            row += len(lines)


def text_files(place: Opened, pieces: Sequence[Piece]) -> Iterator[Rows]:
    """Yield a row a file: columns ``text`` and ``path``, below the source's root.

    Raises:
        DataError: A file cannot be read or is not UTF-8; it is named.
    """
    for some in _some_files(pieces):
        names = tuple(place.name(piece.path) for piece in some)
        texts = [
            _utf8(place.whole(piece.path).removeprefix(BYTE_ORDER_MARK), name)
            for piece, name in zip(some, names, strict=True)
        ]
        paths = [piece.path for piece in some]
        table = pa.table({"text": pa.array(texts, pa.string()), "path": paths})
        yield Rows(table, names, -1, weight=sum(piece.weight for piece in some))


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text: byte {data[error.start]:#04x} at {error.start}. Write it "
            f"as UTF-8, or leave it out."
        ) from error


def _some_files(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces, as many at a time as make about a block."""
    some: list[Piece] = []
    for piece in pieces:
        some.append(piece)
        if len(some) == 1000 or sum(each.weight for each in some) >= BLOCK_BYTES:
            yield some
            some = []
    if some:
        yield some


def image_rows(
    place: Opened, pieces: Sequence[Piece], labels: Sequence[str], size: tuple[int, int] | None
) -> Iterator[Rows]:
    """Yield a row a picture: ``image``, and ``label``, the number of its folder in ``labels``.

    Args:
        place: Where the files are.
        pieces: The files.
        labels: The folders' names.
        size: Width and height to scale to; ``image`` is then a uint8 tensor of shape (height,
            width, 3). ``None``: ``image`` holds the bytes of the file, once they were decoded.

    Raises:
        DataError: A file cannot be read or decoded; it is named.
    """
    numbers = {name: number for number, name in enumerate(labels)}
    block = BLOCK_BYTES // (size[0] * size[1] * 3) if size else 1000
    for some in _some_files(pieces):
        for begin in range(0, len(some), max(block, 1)):
            part = some[begin : begin + max(block, 1)]
            names = tuple(place.name(piece.path) for piece in part)
            contents = [place.whole(piece.path) for piece in part]
            pictures = [_decode(c, n, size) for c, n in zip(contents, names, strict=True)]
            if size:
                flat = pa.array(np.stack(pictures).reshape(-1))
                tensor = pa.fixed_shape_tensor(pa.uint8(), (size[1], size[0], 3))
                storage = pa.FixedSizeListArray.from_arrays(flat, size[0] * size[1] * 3)
                images = pa.ExtensionArray.from_storage(tensor, storage)
            else:
                images = pa.array(contents, pa.binary())
            label = [numbers[piece.path.rpartition("/")[0] or "."] for piece in part]
            table = pa.table({"image": images, "label": pa.array(label, pa.int64())})
            yield Rows(table, names, -1, weight=sum(piece.weight for piece in part))


def _decode(content: bytes, name: str, size: tuple[int, int] | None) -> Any:
    from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415 - an extra

    try:
        with Image.open(io.BytesIO(content)) as picture:
            picture.load()
            if size is None:
                return None
            upright = ImageOps.exif_transpose(picture)
            return np.asarray(upright.convert("RGB").resize(size, Image.Resampling.BILINEAR))
    except UnidentifiedImageError as error:
        raise DataError(
            f"{name} is no image that Pillow knows. Write it again or delete it."
        ) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} is damaged: {error}. Write it again or delete it.") from error


def need_pillow() -> None:
    """Check that pictures can be decoded.

    Raises:
        SpecError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise SpecError("images need Pillow: pip install 'rayway[images]'.") from error
