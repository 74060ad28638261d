"""Which line of which file made a section of the job, and which line gave one of its fields."""

import ast
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_OWN_PACKAGES = {"rayway", "pydantic"}


@dataclass(frozen=True, slots=True)
class Site:
    """One call in a Python file: ``lr=0.1`` stands on one of its lines."""

    file: str
    """As the interpreter knows it, e.g. ``/home/me/jobs/digits.py`` or ``<stdin>``."""
    span: tuple[int, int, int, int]
    """First line, last line (from 1), first and last column (bytes, from 0) of the call."""

    @property
    def line(self) -> int:
        """The call's first line, from 1."""
        return self.span[0]

    def where(self, path: Sequence[str | int] = ()) -> str:
        """Return ``file:line`` of the field that ``path`` leads to from this call's keywords.

        A part that was handed over through a variable ends the search: the line that names the
        variable is returned. Without a match it is the line of the call itself.
        """
        node: ast.AST | None = self._call()
        line = self.line
        for key in path:
            node = _argument(node, key)
            if node is None:
                break
            line = getattr(node, "lineno", line)
        return f"{display(self.file)}:{line}"

    def _call(self) -> ast.Call | None:
        linecache.checkcache(self.file)
        return _calls("".join(linecache.getlines(self.file))).get(self.span)


def caller() -> Site:
    """Return the innermost call that was written neither in rayway nor in pydantic."""
    frame = sys._getframe(1)
    while frame.f_back and _package(frame.f_globals) in _OWN_PACKAGES:
        frame = frame.f_back
    positions = list(frame.f_code.co_positions())
    line, end_line, column, end_column = positions[frame.f_lasti // 2]
    first = line or frame.f_lineno
    return Site(
        file=frame.f_code.co_filename,
        span=(first, end_line or first, column or 0, end_column or 0),
    )


Sites = dict[int, tuple[object, Site]]
"""The sites of objects by their ``id``; the objects are kept so that no id is used twice."""

_sites: ContextVar[Sites | None] = ContextVar("sites", default=None)


@contextmanager
def recording() -> Iterator[Sites]:
    """Collect the site of each section that is made inside the ``with`` block."""
    sites: Sites = {}
    token = _sites.set(sites)
    try:
        yield sites
    finally:
        _sites.reset(token)


def record(made: object, site: Site) -> None:
    """Note where an object was made, if anybody is recording."""
    sites = _sites.get()
    if sites is not None:
        sites[id(made)] = made, site


def display(file: str | Path) -> str:
    """Return a path as people read it: relative to the current folder where it lies below it."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(file)


def _package(namespace: dict[str, object]) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]


@lru_cache(maxsize=8)
def _calls(source: str) -> dict[tuple[int, int, int, int], ast.Call]:
    """Return the calls in a file by their span; a job asks for one file once per field."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    return {_span(node): node for node in ast.walk(tree) if isinstance(node, ast.Call)}


def _span(node: ast.expr) -> tuple[int, int, int, int]:
    return (
        node.lineno,
        node.end_lineno or node.lineno,
        node.col_offset,
        node.end_col_offset or 0,
    )


def _argument(node: ast.AST | None, key: str | int) -> ast.AST | None:
    """Return the part of a call, dict, list or keyword that ``key`` names, if it stands there."""
    if isinstance(node, ast.keyword):
        node = node.value
    if isinstance(node, ast.Call):
        named = next((word for word in node.keywords if word.arg == key), None)
        # Job.model_validate({...}) and dict(...) hand the fields over one level deeper.
        inner = (_argument(arg, key) for arg in node.args if isinstance(arg, ast.Dict))
        return named or next((part for part in inner if part), None)
    if isinstance(node, ast.Dict):
        items = zip(node.keys, node.values, strict=True)
        values = (v for k, v in items if isinstance(k, ast.Constant) and k.value == key)
        return next(values, None)
    if isinstance(node, ast.List | ast.Tuple) and isinstance(key, int) and key < len(node.elts):
        return node.elts[key]
    return None
