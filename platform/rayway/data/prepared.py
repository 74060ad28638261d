"""The folder of a prepared data set: what was asked, which shards are done, whether it is finished.

part-00000.parquet ...       the shards
_rayway/prepare.json         what was asked: source files, options, the user's code
_rayway/done/00000.json      a shard is whole
_rayway/index.parquet        written last: the data set is finished
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayway.data.index import Index, build_index, write_index
from rayway.data.prepare import DONE, ShardDone, part_name
from rayway.errors import DataError, SpecError
from rayway.storage.objects import Objects, shown_url

ASKED_KEY = "_rayway/prepare.json"
INDEX_KEY = "_rayway/index.parquet"
_THREADS = 16

Asked = dict[str, Any]
"""What was asked, as JSON: ``source``, ``files`` as [path, size, stamp], ``options``, ``code``."""


class PreparedFolder:
    """A folder to prepare a data set in.

    Args:
        url: A local path or a URL.

    Raises:
        SpecError: No file system is known for the URL, or other processes do not see it.
    """

    def __init__(self, url: str) -> None:
        self._objects = Objects(url)
        if not self._objects.is_shared:
            raise SpecError(f"{url} is the memory of this process; tasks cannot write there.")

    @property
    def url(self) -> str:
        """The folder's address; an absolute path where it is local."""
        return self._objects.url

    def begin(self, asked: Asked, *, shards: int, overwrite: bool) -> list[ShardDone]:
        """Find the folder fit to work in, and return the shards that are done already.

        With ``overwrite``, what was prepared in it before is removed, and nothing else.

        Raises:
            DataError: The data set is finished, or was begun with something else asked, or the
                folder holds what was not prepared.
        """
        there = {each.key: each.bytes for each in self._objects.list()}
        if ASKED_KEY not in there:
            ours = [key for key in there if key.startswith("_rayway/")]
            if len(ours) < len(there):
                example = min(there.keys() - set(ours))
                raise DataError(
                    f"{self.url} holds {len(there) - len(ours)} file(s) that were not prepared, "
                    f"e.g. {example}. Choose another folder."
                )
            return []
        before = self._asked()
        if overwrite:
            self._clear(there)
            return []
        if INDEX_KEY in there:
            raise DataError(f"{self.url} is finished: {self._describe(before)}. {_AGAIN}")
        done = self._done(there)
        if not done:
            return []  # nothing to lose
        if differences := differing(before, asked):
            raise DataError(
                f"{self.url} was begun differently and has {len(done)} shard(s) done: "
                f"{'; '.join(differences)}. Ask as before to go on with it. {_AGAIN}"
            )
        self.remove_drafts()
        return [shard for shard in done if shard.number < shards]

    def schema(self) -> pa.Schema | None:
        """Return what the source was read as when the work was begun, if that had to be found."""
        text = self._asked().get("schema")
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) if text else None

    def note(self, asked: Asked, schema: pa.Schema | None) -> None:
        """Store what was asked and what the source is to be read as, before the first shard."""
        self.remove_drafts()
        text = base64.b64encode(schema.serialize()).decode() if schema else None
        self._objects.put(ASKED_KEY, json.dumps({**asked, "schema": text}).encode())

    def count_done(self) -> int:
        """Return how many shards are whole."""
        return len(self._done({each.key: each.bytes for each in self._objects.list()}))

    def finish(self, done: Sequence[ShardDone]) -> Index:
        """Index the shards; from then on the data set is finished.

        Raises:
            DataError: A shard is not there as it was written, or all are empty.
        """
        wanted = {shard.part: shard.size for shard in done if shard.rows}
        found = {e.key: e.bytes for e in self._objects.list() if e.key.startswith("part-")}
        for part in [*wanted, *found]:
            if wanted.get(part) != found.get(part):
                raise DataError(
                    f"{self.url}/{part} has {found.get(part, 'no')} bytes and should have "
                    f"{wanted.get(part, 'none')}: something else writes there. Start again."
                )
        index = build_index(self.url, stored=False)
        write_index(index)
        return index

    def _asked(self) -> Asked:
        try:
            asked: Asked = json.loads(self._objects.get(ASKED_KEY))
        except ValueError:
            asked = {}
        return asked

    def _done(self, there: Mapping[str, int]) -> list[ShardDone]:
        """Return the shards whose marker and file agree."""
        keys = [key for key in there if key.startswith(f"{DONE}/")]

        def read(key: str) -> ShardDone | None:
            with suppress(ValueError, TypeError, KeyError):
                shard = ShardDone.from_json(self._objects.get(key))
                if not shard.rows or there.get(shard.part) == shard.size:
                    return shard
            return None

        with ThreadPoolExecutor(_THREADS, "rayway-markers") as pool:
            return [shard for shard in pool.map(read, keys) if shard is not None]

    def _clear(self, there: Iterable[str]) -> None:
        """Remove what was prepared; first what says that it is whole."""
        ours = [key for key in there if key.startswith("_rayway/") or _is_part(key)]
        first = [key for key in (INDEX_KEY, *sorted(ours)) if key != ASKED_KEY]
        self._objects.delete([*first, ASKED_KEY])
        self.remove_drafts()

    def remove_drafts(self) -> None:
        """Remove what tasks that were killed left half written."""
        folder = Path(self.url)
        if self._objects.is_local and folder.is_dir():
            for draft in [*folder.glob(".part-*.tmp"), *folder.glob("_rayway/**/.*.tmp")]:
                draft.unlink(missing_ok=True)

    def _describe(self, asked: Asked) -> str:
        try:
            index = Index.from_bytes(self._objects.get(INDEX_KEY))
        except DataError:
            return "its index is damaged"
        return (
            f"{index.total:,} rows in {len(index.paths)} shard(s), prepared from "
            f"{shown_url(str(asked.get('source', 'an unknown source')))}"
        )


_AGAIN = "--overwrite removes it and starts anew."


def _is_part(key: str) -> bool:
    number = key.removeprefix("part-").removesuffix(".parquet")
    return number.isdigit() and key == part_name(int(number))


def differing(before: Asked, now: Asked) -> list[str]:
    """Return in words what is asked now and was not before, the source and the code included."""
    found = []
    if before.get("source") != now["source"]:
        found.append(f"the source was {before.get('source')} and is {now['source']}")
    options = before.get("options", {})
    for name, value in now["options"].items():
        if options.get(name) != value:
            found.append(f"--{name} was {_value(options.get(name))} and is {_value(value)}")
    if before.get("code") != now["code"]:
        found.append("the code of the transform has changed")
    files = [{path: rest for path, *rest in each.get("files", ())} for each in (before, now)]
    for verb, paths in (
        ("gone", files[0].keys() - files[1].keys()),
        ("new", files[1].keys() - files[0].keys()),
        ("changed", {p for p in files[0].keys() & files[1].keys() if files[0][p] != files[1][p]}),
    ):
        if paths:
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            found.append(f"source file {min(paths)}{more} {verb}")
    return found


def _value(value: Any) -> str:
    return "not given" if value in (None, []) else str(value)


def agree(shards: Sequence[ShardDone]) -> frozenset[str]:
    """Return the list columns that must stay lists: not of one length over all shards.

    Raises:
        SpecError: A column is of another type in another shard; both files are named.
    """
    filled = [shard for shard in shards if shard.rows]
    lengths: dict[str, set[int | None]] = {}
    for shard in filled:
        for name in (*shard.ragged, *shard.fixed):
            lengths.setdefault(name, set()).add(shard.fixed.get(name))
    ragged = frozenset(name for name, found in lengths.items() if len(found) > 1)
    distinct = {shard.schema: shard for shard in reversed(filled)}
    if not distinct:
        return ragged
    first = distinct[filled[0].schema]
    wanted = _kinds(first, ragged)
    for shard in distinct.values():
        found = _kinds(shard, ragged)
        for name in [*wanted, *found]:
            if wanted.get(name) != found.get(name):
                raise SpecError(
                    f"column {name!r} is {wanted.get(name, 'missing')} in the shard that begins "
                    f"with {first.first} but {found.get(name, 'missing')} in the one that begins "
                    f"with {shard.first}. Give it one type in the transform."
                )
    return ragged


def _kinds(shard: ShardDone, ragged: frozenset[str]) -> dict[str, str]:
    schema = shard.arrow_schema()
    return {
        name: f"lists of {kind.value_type}" if name in ragged else str(kind)
        for name, kind in zip(schema.names, schema.types, strict=True)
    }
