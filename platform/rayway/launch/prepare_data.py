"""``prepare_data``: from raw files to a training set, as one Ray Data job on this machine.

The driver lists the source, cuts it into shards, and leaves the work to a task a shard; a task that
dies is tried again by Ray. What is done is known from the folder alone, so the same call goes on
where the last one was cut off. Why it is built so: docs/decisions/0011-prepare.md.
"""

import hashlib
import inspect
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict, Unpack

import pyarrow as pa

from rayway.data.files import filesystem_for
from rayway.data.infer import Columns, find_types, join, parse_types, settle
from rayway.data.pack import Packer
from rayway.data.prepare import Meter, ShardDone, ShardTask, load_transform, make_shard
from rayway.data.prepared import Asked, PreparedFolder, agree
from rayway.data.source_rows import Opened, need_pillow
from rayway.data.sources import (
    EXTENSIONS,
    Piece,
    Source,
    cut_into_pieces,
    find_source,
    label_names,
)
from rayway.errors import DataError, SpecError, StoppedError
from rayway.launch.crew import Crew
from rayway.launch.preflight import available_cpus
from rayway.launch.prepare_screen import PrepareScreen
from rayway.spec.code import path_of
from rayway.spec.job import ImportPath

_SHARD_BYTES = 64_000_000
# about how many bytes of a shard come from a byte of the source
_SHRINKS = {"parquet": 1.0, "csv": 0.4, "jsonl": 0.35, "text": 0.4, "images": 1.0}


class Options(TypedDict, total=False):
    """How to prepare; all of them may be left out."""

    transform: ImportPath
    """A function from table to table, or ``module:name``; it may add and drop rows and columns."""
    format: str
    """``auto``, ``parquet``, ``csv``, ``jsonl``, ``images`` or ``text``."""
    text_by: str
    """``line`` or ``file``: what of a text is a row."""
    image_size: str
    """``64`` or ``WIDTHxHEIGHT`` in pixels: decode pictures and scale them to it."""
    types: Sequence[str]
    """``column:type`` for columns of CSV and JSON lines whose type is not to be inferred."""
    pack: str
    """``COLUMN:T``: pack its lists of tokens into rows of T."""
    rows_per_group: int
    """Rows of a row group; about 1 MB of them if not given."""
    shards: int
    """How many shards to cut the source into; about 64 MB each if not given."""


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """A finished data set."""

    url: str
    rows: int
    rows_read: int
    shards: int
    bytes: int
    columns: dict[str, str]
    """Name -> type, as :func:`describe_type` says it."""
    files: int
    ignored: int
    """Files beside the source that were taken for no data."""
    empty: int
    """Text files of 0 bytes, which were left out."""
    empty_documents: int
    """Documents without a token, which packing left out."""
    fill: float | None
    """The share of packed rows that is tokens."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is to be made of what."""

    source: Source
    tasks: list[ShardTask]
    asked: Asked
    types: dict[str, pa.DataType]

    @property
    def needs_types(self) -> bool:
        return self.source.format in ("csv", "jsonl")


def prepare_data(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    workers: int | None = None,
    overwrite: bool = False,
    **options: Unpack[Options],
) -> PreparedData:
    """Make a training set in ``dst`` from the files that ``src`` means.

    The same source, options and code give the same bytes, on any number of workers, after any
    interruption. Called again after one, it goes on with the shards that are missing.

    Args:
        src: A file, a folder or a glob, as a path or a URL.
        dst: The folder to make, as a path or a URL.
        workers: Tasks at a time; as many as there are CPUs if None. 0 works in this process, and
            so does None where there is a single shard to make.
        overwrite: Remove what was prepared in ``dst`` before.
        **options: See :class:`Options`.

    Returns:
        What was made.

    Raises:
        SpecError: An option or the transform is wrong.
        DataError: The source cannot be read as asked, nothing of it is left, or ``dst`` holds
            something else.
        RaywayError: The transform raised.
        ClusterError: Ray does not start.
        StorageError: ``dst`` cannot be written.
        StoppedError: Ctrl-C or SIGTERM; what is done stays.
    """
    src, dst = os.fspath(src), os.fspath(dst)
    if workers is not None and workers < 0:
        raise SpecError(f"--workers {workers}: use 0 (in this process) or more.")
    folder = PreparedFolder(dst)
    _refuse_nesting(src, dst)
    plan = _plan(src, folder.url, options)
    done = folder.begin(plan.asked, shards=len(plan.tasks), overwrite=overwrite)
    if workers is None:  # for one shard a cluster would only cost its start
        workers = available_cpus() if len(plan.tasks) > 1 else 0
    work = _Work(plan, folder, {shard.number: shard for shard in done})
    with PrepareScreen(src, dst) as screen, _interruptible():
        try:
            with Crew(min(workers, len(plan.tasks))) as crew:
                return work.through(crew, screen)
        except KeyboardInterrupt:
            raise StoppedError(
                f"stopped with {folder.count_done()} of {len(plan.tasks)} shards done; they stay "
                f"in {folder.url}. The same command goes on from there."
            ) from None
        finally:
            folder.remove_drafts()


class _Work:
    """The way from a plan to a finished folder."""

    def __init__(self, plan: _Plan, folder: PreparedFolder, done: dict[int, ShardDone]) -> None:
        self._plan, self._folder, self.done = plan, folder, done

    def through(self, crew: Crew, screen: PrepareScreen) -> PreparedData:
        """Find the types, make the missing shards, and the index."""
        plan, source = self._plan, self._plan.source
        screen.found(source, shards=len(plan.tasks), done=len(self.done))
        tasks = plan.tasks
        if plan.needs_types:
            schema = self._folder.schema() if self.done else None
            if schema is None:
                schema = self._find_schema(crew, screen)
            tasks = [replace(task, schema=schema) for task in tasks]
        if not self.done:
            self._folder.note(plan.asked, tasks[0].schema)
        self._make(tasks, crew, screen)
        _refuse_changes(source, find_source(str(plan.asked["source"]), format=source.format))
        return self._finish()

    def _find_schema(self, crew: Crew, screen: PrepareScreen) -> pa.Schema:
        screen.phase("finding types", [task.weight for task in self._plan.tasks])
        found: dict[int, Columns] = {}
        for number, columns in crew.map(types_of, self._plan.tasks, tick=screen.tick):
            found[number] = columns
            screen.step(number, rows=0)
        parts = [found[number] for number in sorted(found)]
        return settle(join(parts, texts=self._plan.source.format == "csv"), self._plan.types)

    def _make(self, tasks: list[ShardTask], crew: Crew, screen: PrepareScreen) -> None:
        """Make shards until all are there and agree on which columns are of one length."""
        ragged: frozenset[str] = frozenset()
        while True:
            again = {n for n, shard in self.done.items() if ragged & shard.fixed.keys()}
            todo = [t for t in tasks if t.number in again or t.number not in self.done]
            if not todo:
                return
            what = "preparing" if not again else "rewriting lists of several lengths"
            weights = [task.weight for task in tasks]
            screen.phase(what, weights, done=[t.number for t in tasks if t not in todo])
            todo = [replace(task, ragged=ragged) for task in todo]
            for place, shard in crew.map(make_shard, todo, tick=screen.tick):
                self.done[todo[place].number] = shard
                screen.step(place, rows=shard.rows)
            ragged = agree([self.done[number] for number in sorted(self.done)])

    def _finish(self) -> PreparedData:
        source, shards = self._plan.source, [self.done[number] for number in sorted(self.done)]
        rows_read = sum(shard.rows_read for shard in shards)
        if not any(shard.rows for shard in shards):
            lost = "the transform dropped them all" if rows_read else "the files have none"
            raise DataError(
                f"no row is left of the {rows_read:,} that were read: {lost}. There is nothing "
                f"to train on."
            )
        index = self._folder.finish(shards)
        pack = self._plan.tasks[0].pack
        tokens = sum(shard.tokens for shard in shards)
        return PreparedData(
            url=self._folder.url,
            rows=index.total,
            rows_read=rows_read,
            shards=len(index.paths),
            bytes=sum(index.sizes),
            columns={column.name: describe_type(column.type) for column in index.schema},
            files=len(source.files),
            ignored=len(source.ignored),
            empty=len(source.empty),
            empty_documents=sum(shard.empty_documents for shard in shards),
            fill=tokens / (index.total * pack[1]) if pack else None,
        )


def describe_type(kind: pa.DataType) -> str:
    """Return a type as people read it: ``int32[512]`` for a row of 512, ``uint8[8, 8, 3]``."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return f"{kind.value_type}{list(kind.shape)}"
    if pa.types.is_fixed_size_list(kind):
        return f"{describe_type(kind.value_type)}[{kind.list_size}]"
    if pa.types.is_list(kind):
        return f"list<{describe_type(kind.value_type)}>"
    return str(kind)


def types_of(task: ShardTask, meter: Meter) -> Columns:
    """Return the types of the columns in a shard's part of the source; what a task does."""
    return find_types(Opened.at(task.root), task.format, task.pieces, meter)


def _plan(src: str, dst: str, options: Options) -> _Plan:
    size, pack = parse_size(options.get("image_size")), parse_pack(options.get("pack"))
    types = parse_types(options.get("types", ()))
    _check_numbers(options)
    transform, code_root, code = _code(options.get("transform"))
    source = find_source(src, format=_one_of("format", options, ("auto", *EXTENSIONS)))
    _check_for_format(source.format, options)
    by_line = _one_of("text_by", options, ("line", "file")) == "line"
    pieces, schema = cut_into_pieces(source, by_line=by_line)
    if pack and schema is not None and transform is None:
        Packer(*pack).check(schema)
    shards = _count_shards(source, pieces, size, options.get("shards"))
    labels = tuple(label_names(source)) if source.format == "images" else ()
    asked = {name: options.get(name) for name in Options.__annotations__}
    asked |= {"transform": transform, "format": source.format, "types": list(types), "text_by": ""}
    asked["types"] = [f"{name}:{kind}" for name, kind in types.items()]
    asked["text_by"] = ("line" if by_line else "file") if source.format == "text" else None
    asked["shards"] = len(shards)
    return _Plan(
        source=source,
        tasks=[
            ShardTask(
                number=number,
                destination=dst,
                root=source.root,
                format=source.format,
                pieces=tuple(part),
                labels=labels,
                by_line=by_line,
                image_size=size,
                transform=transform,
                code_root=code_root,
                pack=pack,
                rows_per_group=options.get("rows_per_group"),
            )
            for number, part in enumerate(shards)
        ],
        asked={
            "version": 1,
            "source": src if "://" in src else os.path.abspath(src),
            "options": {name.replace("_", "-"): value for name, value in asked.items()},
            "code": code,
            "files": [[file.path, file.size, file.stamp] for file in source.files],
        },
        types=types,
    )


def parse_pack(text: str | None) -> tuple[str, int] | None:
    """Return the column and the length of ``COLUMN:T``.

    Raises:
        SpecError: It is of another form.
    """
    if text is None:
        return None
    column, _, length = text.rpartition(":")
    if not column or not length.isascii() or not length.isdigit():
        raise SpecError(f"--pack {text}: write COLUMN:T, e.g. tokens:1024 for rows of 1024 tokens.")
    Packer(column, int(length))  # checks both
    return column, int(length)


def parse_size(text: str | int | None) -> tuple[int, int] | None:
    """Return width and height of ``64`` or ``64x48``.

    Raises:
        SpecError: It is of another form.
    """
    if text is None:
        return None
    parts = str(text).lower().split("x")
    if len(parts) > 2 or not all(p.isascii() and p.isdigit() and int(p) for p in parts):
        raise SpecError(f"--image-size {text}: write 64, or WIDTHxHEIGHT, e.g. 64x48.")
    return int(parts[0]), int(parts[-1])


def _one_of(name: str, options: Options, known: Sequence[str]) -> str:
    value = str(options.get(name) or known[0])
    if value not in known:
        flag = name.replace("_", "-")
        raise SpecError(f"--{flag} {value}: there are {', '.join(known)}.")
    return value


def _check_numbers(options: Options) -> None:
    for name, value in (
        ("rows-per-group", options.get("rows_per_group")),
        ("shards", options.get("shards")),
    ):
        if value is not None and value < 1:
            raise SpecError(f"--{name} {value}: use 1 or more.")


def _check_for_format(format: str, options: Options) -> None:  # noqa: A002 - as the option
    for name, formats in (
        ("image_size", ("images",)),
        ("types", ("csv", "jsonl")),
        ("text_by", ("text",)),
    ):
        if options.get(name) and format not in formats:
            flag = name.replace("_", "-")
            raise SpecError(f"--{flag} is for {' and '.join(formats)}; the files are {format}.")
    if format == "images":
        need_pillow()


def _code(transform: ImportPath | None) -> tuple[str | None, str, dict[str, str] | None]:
    """Return the transform as a path, the folder it is imported from, and what names its code."""
    root = Path.cwd()
    if transform is None:
        return None, str(root), None
    try:
        path = path_of(transform)
    except ValueError as error:
        raise SpecError(f"--transform {transform} {error}") from None
    if callable(transform):
        module = inspect.getmodule(transform)
        file = inspect.getsourcefile(transform)
        if file and module:
            depth = 0 if module.__name__ == "__main__" else module.__name__.count(".")
            root = Path(file).resolve().parents[depth]
        function: Any = transform
    else:
        function = load_transform(path, str(root))
    file = inspect.getsourcefile(inspect.unwrap(function)) if callable(function) else None
    code = Path(file).read_bytes() if file else b""
    return path, str(root), {"path": path, "sha256": hashlib.sha256(code).hexdigest()}


def _count_shards(
    source: Source, pieces: list[Piece], size: tuple[int, int] | None, asked: int | None
) -> list[list[Piece]]:
    """Return the pieces of each shard: neighbours, about as many bytes in each."""
    if not pieces:
        raise DataError(f"{source.root} has no row in its {len(source.files)} file(s).")
    if asked is not None and asked > len(pieces):
        raise SpecError(
            f"--shards {asked}: the source can be cut into {len(pieces)} at most "
            f"({len(source.files)} file(s)). Use {len(pieces)} or fewer."
        )
    weights = [max(piece.weight, 1) for piece in pieces]
    total = sum(weights)
    result = (
        total * _SHRINKS[source.format] if size is None else len(pieces) * size[0] * size[1] * 3
    )
    count = asked or min(max(round(result / _SHARD_BYTES), 1), len(pieces))
    shards: list[list[Piece]] = [[] for _ in range(count)]
    number, before = 0, 0
    for place, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
        left = len(pieces) - place  # every shard gets a piece
        due = (before + weight / 2) * count / total >= number + 1 or left <= count - number - 1
        if due and shards[number] and number < count - 1:
            number += 1
        shards[number].append(piece)
        before += weight
    return shards


def _refuse_nesting(src: str, dst: str) -> None:
    """Refuse a source and a destination of which one is in the other.

    Raises:
        SpecError: They are.
    """
    base = src
    for sign in "*?[":
        if not os.path.lexists(src):
            base = base.split(sign)[0]
    ends = []
    for url in (base or ".", dst):
        filesystem, path = filesystem_for(url)
        local = filesystem.type_name == "local"
        ends.append(
            f"{url.partition('://')[0] if not local else ''}|"
            + (os.path.realpath(path) if local else path)
        )
    one, other = (f"{end.rstrip('/')}/" for end in ends)
    if one.startswith(other) or other.startswith(one):
        raise SpecError(
            f"{src} and {dst} lie in one another: what is prepared would count as source. Choose a "
            f"folder beside it."
        )


def _refuse_changes(before: Source, now: Source) -> None:
    if before.files != now.files:
        files = [{file.path: file for file in each.files} for each in (before, now)]
        changed = {
            p for p in files[0].keys() | files[1].keys() if files[0].get(p) != files[1].get(p)
        }
        raise DataError(
            f"{before.root}/{min(changed)} was changed, added or removed while the data was "
            f"prepared. Let the source rest, and start anew with --overwrite."
        )


@contextmanager
def _interruptible() -> Iterator[None]:
    """Have SIGTERM end the work as Ctrl-C does; off the main thread, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
