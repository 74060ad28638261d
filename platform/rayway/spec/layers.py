"""Layers of settings, the later over the earlier, made into one job with each value's origin."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayway.errors import SpecError
from rayway.spec.callsite import Site, Sites
from rayway.spec.job import SECTIONS, Job, leaves
from rayway.spec.section import Section, SectionError
from rayway.spec.yaml12 import Located, parse_yaml, plain

DEFAULT = "default"
OVERRIDE = "--set"

_ARGS = ("model", "args")
_LENGTHS = ("optim", "steps"), ("optim", "epochs")


@dataclass(frozen=True, slots=True)
class Setting:
    """One field gets one value."""

    path: tuple[str, ...]
    """From the job down, e.g. ``("optim", "lr")``."""
    value: object
    where: str
    """What its origin is called, e.g. ``jobs/x.py:12`` or ``--set``."""


Layer = Sequence[Setting]


def merge(layers: Iterable[Layer]) -> tuple[Job, dict[str, str]]:
    """Make a job from layers of settings, where a later layer wins.

    A layer that gives one of ``optim.steps`` and ``optim.epochs`` replaces the other one too.

    Returns:
        The job, and the origin of each of its ``leaves``.

    Raises:
        SpecError: Names file and line of the setting that is wrong, the key and the repair.
    """
    tree: dict[str, object] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        lengths = [s for s in layer if s.path in _LENGTHS and s.value is not None]
        if len(lengths) == 1:
            other = _LENGTHS[lengths[0].path == _LENGTHS[0]]
            if ".".join(other) in origins:
                _put(tree, origins, Setting(other, None, lengths[0].where))
        for setting in layer:
            _put(tree, origins, setting)
    job = _build(tree, origins)
    return job, {field: origins.get(field, DEFAULT) for field in leaves(job)}


def layer_of_job(job: Job, sites: Sites, *, otherwise: str) -> Layer:
    """Return what a job file set; what it left to the defaults is not in the layer.

    Args:
        job: What the file made.
        sites: Where its sections were made, as far as known.
        otherwise: What the origin is called of a section that nobody saw being made.
    """

    def where(path: tuple[str, ...]) -> str:
        owner: Section = getattr(job, path[0]) if len(path) > 1 else job
        if id(owner) in sites:
            site: Site = sites[id(owner)][1]
            return site.where(path[1:] if owner is not job else path)
        return sites[id(job)][1].where(path) if id(job) in sites else otherwise

    settings: list[Setting] = []
    for name in Job.model_fields:
        value = getattr(job, name)
        if isinstance(value, Section):
            given = {field: getattr(value, field) for field in value.model_fields_set}
            settings += _flat(given, where, (name,))
        elif name in job.model_fields_set:
            settings.append(Setting((name,), value, where((name,))))
    return settings


def layer_of_yaml(values: Mapping[str, Located], *, file: str) -> Layer:
    """Return the settings of a file that ``read_yaml`` has read."""
    lines: dict[tuple[str, ...], int] = {}

    def note_lines(path: tuple[str, ...], located: Located) -> None:
        lines[path] = located.line
        if isinstance(located.value, dict):
            for key, item in located.value.items():
                note_lines((*path, key), item)

    note_lines((), Located(values, 1))
    return _flat(
        {key: plain(item) for key, item in values.items()}, lambda path: f"{file}:{lines[path]}"
    )


def layer_of_values(values: Mapping[str, object], *, where: str) -> Layer:
    """Return the settings in nested values that all have one origin."""
    return _flat(dict(values), lambda _: where)


def layer_of_overrides(overrides: Sequence[str]) -> Layer:
    """Return the settings of ``--set FIELD=VALUE``; the value is a YAML scalar, list or mapping.

    Raises:
        SpecError: One is not of that form, or a field is set twice.
    """
    settings: list[Setting] = []
    for override in overrides:
        field, equals, text = override.partition("=")
        source = f"{OVERRIDE} {field}"
        path = tuple(field.strip().split("."))
        if not equals or not all(path):
            raise SpecError(f"{OVERRIDE} {override}: write FIELD=VALUE, e.g. optim.lr=0.001.")
        located = parse_yaml(text, source=source)
        if located.value is None and text.strip() not in ("~", "null"):
            raise SpecError(
                f"{source}: no value. Write {field}=null for none, {field}='' for text."
            )
        settings += _flat(plain(located), lambda _: OVERRIDE, path)
    seen: set[tuple[str, ...]] = set()
    for setting in settings:
        if setting.path in seen:
            raise SpecError(f"{OVERRIDE} {'.'.join(setting.path)}: set twice. Keep one.")
        seen.add(setting.path)
    return settings


def _flat(
    value: object, where: Callable[[tuple[str, ...]], str], path: tuple[str, ...] = ()
) -> list[Setting]:
    """Cut a value into settings of one field each; what is no section stays whole."""
    is_section = not path or path == _ARGS or (len(path) == 1 and path[0] in SECTIONS)
    if not isinstance(value, dict) or not is_section or (path == _ARGS and not value):
        return [Setting(path, value, where(path))]
    return [s for key, item in value.items() for s in _flat(item, where, (*path, key))]


def _put(tree: dict[str, object], origins: dict[str, str], setting: Setting) -> None:
    inner = tree
    for depth, key in enumerate(setting.path[:-1]):
        branch = inner.get(key, {})
        if not isinstance(branch, dict):
            owner = ".".join(setting.path[: depth + 1])
            raise SpecError(
                f"{setting.where}: {'.'.join(setting.path)}: {owner}={branch!r} is a value and has "
                f"no fields of its own. Set {owner} itself."
            )
        inner[key] = dict(branch)  # the layer below keeps its own
        inner = inner[key]  # type: ignore[assignment]  # it is the dict of the line above
    inner[setting.path[-1]] = setting.value
    field_depth = 3 if setting.path[:2] == _ARGS else 2
    origins[".".join(setting.path[:field_depth])] = setting.where


def _build(tree: Mapping[str, object], origins: Mapping[str, str]) -> Job:
    """Make the sections, then the job, each refusal with the origin of what it refuses."""

    def where(path: Sequence[str | int]) -> str:
        for end in range(len(path), 0, -1):
            found = origins.get(".".join(map(str, path[:end])))
            if found:
                return found
        below = f"{path[0]}."  # an unknown section: its first key stands for it
        return next((where for field, where in origins.items() if field.startswith(below)), "job")

    values: dict[str, Any] = dict(tree)
    try:
        for name, section in SECTIONS.items():
            fields = values.get(name)
            if isinstance(fields, dict):
                values[name] = section(**fields)
        return Job(**values)
    except SectionError as error:
        lines = (f"{where(problem.path)}: {problem.text}" for problem in error.problems)
        raise SpecError("\n".join(lines)) from None
