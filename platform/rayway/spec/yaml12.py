"""YAML as a job needs it: YAML 1.2 numbers, each value with its line, nothing clever.

PyYAML reads YAML 1.1, where ``1e-3`` is text and ``yes`` is true. Here both are what they look
like. Anchors, aliases, tags, merge keys and doubled keys are refused: a settings file that needs
them hides something. Nothing is ever built from a tag.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from rayway.errors import SpecError
from rayway.spec.callsite import display

_MAX_BYTES = 256 * 1024
_MAX_DEPTH = 32

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INF = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True, slots=True)
class Located:
    """A value and the line it stands on; mappings hold ``Located`` values again."""

    value: object
    line: int
    """From 1."""


def read_yaml(file: Path) -> dict[str, Located]:
    """Read a settings file: a mapping of names to values; empty if the file is.

    Raises:
        SpecError: The file cannot be read, or is not such YAML. Names file, line and repair.
    """
    shown = display(file)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise SpecError(f"{shown}: more than {_MAX_BYTES} bytes; no settings file is so large.")
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SpecError(f"{shown}: cannot be read: {error.strerror}. Check the path.") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{shown}: is not UTF-8 text (byte {error.start}). Save it so.") from None
    root = parse_yaml(text, source=shown)
    if root.value is None:
        return {}
    if not isinstance(root.value, dict):
        raise SpecError(
            f"{shown}:{root.line}: holds no names with values. Write e.g. optim: {{lr: 0.1}}."
        )
    return root.value


def parse_yaml(text: str, *, source: str) -> Located:
    """Read one YAML document; ``source`` is what errors call it, ``source:line``."""
    try:
        for problem, line in _refused(text):
            raise SpecError(f"{source}:{line}: {problem}")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = _line(mark)
        raise SpecError(f"{source}:{line}: is not YAML: {error.problem}. Mend it.") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{source}: is not YAML: {error}. Mend it.") from None
    return Located(None, 1) if node is None else _located(node, source)


def plain(located: Located) -> object:
    """Return the value alone, without lines."""
    value = located.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def _refused(text: str) -> Iterator[tuple[str, int]]:
    """Look at the stream of events, before anything is built or an alias is followed."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = _line(event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            yield "anchors (&) and aliases (*) are not read here. Write the value out.", line
        tag = getattr(event, "tag", None)
        if tag:
            yield f"the tag {tag} is not read here. Leave it out.", line
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            yield f"values are nested more than {_MAX_DEPTH} deep. Flatten them.", line


def _located(node: yaml.Node, source: str) -> Located:
    line = _line(node.start_mark)
    if isinstance(node, yaml.MappingNode):
        return Located(_mapping(node, source), line)
    if isinstance(node, yaml.SequenceNode):
        return Located([_located(item, source) for item in node.value], line)
    assert isinstance(node, yaml.ScalarNode)  # there is no fourth kind
    return Located(_scalar(node, source), line)


def _mapping(node: yaml.MappingNode, source: str) -> dict[str, Located]:
    values: dict[str, Located] = {}
    for key_node, value_node in node.value:
        line = _line(key_node.start_mark)
        key = _located(key_node, source).value
        if not isinstance(key, str) or key == "<<":
            raise SpecError(f"{source}:{line}: the key {key!r} is not a field's name.")
        if key in values:
            raise SpecError(
                f"{source}:{line}: duplicate key {key}; it stands on line {values[key].line} "
                "already. Keep one."
            )
        values[key] = Located(_located(value_node, source).value, line)
    return values


def _scalar(node: yaml.ScalarNode, source: str) -> str | int | float | bool | None:
    text = str(node.value)
    if node.style is not None:  # quoted or a block: text, whatever it looks like
        return text
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    try:
        if _INT.fullmatch(text):
            return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    except ValueError:  # Python refuses thousands of digits
        where = f"{source}:{_line(node.start_mark)}"
        raise SpecError(f"{where}: a number of {len(text)} digits. Use a smaller one.") from None
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INF.fullmatch(text):
        return float(text.lower().replace(".", ""))
    return text


def _line(mark: object) -> int:
    """Return the line of a PyYAML mark, which counts from 0; none stands for the first line."""
    return int(getattr(mark, "line", 0)) + 1
