"""What all sections of a job share: frozen, strict, and a plain word for each wrong value."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from rayway.errors import SpecError
from rayway.spec.callsite import Site, caller, record
from rayway.spec.suggest import nearest, unknown_key

_RULE = "rule"


class Section(BaseModel):
    """A part of a job: keyword-only, unchangeable, no unknown fields, no silent conversion."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    place: ClassVar[str] = ""
    """The section's name in the job; empty for the job itself."""

    of_job: ClassVar[bool] = True
    """Whether its fields are fields of a job, to be suggested for a misspelt one."""

    def __init__(self, /, *unnamed: object, **values: Any) -> None:
        site = caller()
        if unnamed:
            name = type(self).__name__
            field = next(iter(type(self).model_fields))
            raise SpecError(
                f"{site.where()}: {name} takes its values by name only, "
                f"e.g. {name}({field}={unnamed[0]!r})."
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = problems_of(type(self).place, error.errors(include_url=False))
            raise SectionError(problems, site, type(self).place) from None
        record(self, site)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with one field."""

    path: tuple[str | int, ...]
    """The field from the job down, e.g. ``("optim", "betas", 1)``."""
    text: str
    """What was asked, the limit and the repair; without file and line."""


class SectionError(SpecError):
    """A section refused its values; the message names file, line, field and repair."""

    def __init__(self, problems: list[Problem], site: Site, place: str) -> None:
        super().__init__(problems, site, place)
        self.problems = problems
        self.site = site
        self.place = place

    def __str__(self) -> str:
        skip = 1 if self.place else 0
        return "\n".join(f"{self.site.where(p.path[skip:])}: {p.text}" for p in self.problems)


def rule(field: str, message: str) -> PydanticCustomError:
    """Return the error of a rule between fields, for a validator to raise.

    Args:
        field: The field to blame, from the section down, e.g. ``keep_every_steps``.
        message: What was asked, the limit and the repair; names the fields in full.
    """
    return PydanticCustomError(_RULE, "{message}", {"field": field, "message": message})


def all_fields() -> list[str]:
    """Return every field of a job, dotted, e.g. ``optim.lr``, and the sections themselves."""
    return [
        f"{cls.place}.{field}" if cls.place else field
        for cls in Section.__subclasses__()
        if cls.of_job
        for field in cls.model_fields
    ]


def problems_of(place: str, errors: Iterable[ErrorDetails]) -> list[Problem]:
    """Turn pydantic's findings on one section into words, unknown keys first."""
    problems: list[Problem] = []
    implied: set[str] = set()
    for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
        path = _path(place, error)
        dotted = ".".join(map(str, path))
        if error["type"] == "extra_forbidden":
            text, right = unknown_key(str(path[-1]), place=place, fields=all_fields())
            implied.update(right)
        elif error["type"] == "missing" and dotted in implied:
            continue  # the misspelt key above is this very field
        else:
            text = _describe(dotted, error)
        problems.append(Problem(path, text))
    return problems


def _path(place: str, error: ErrorDetails) -> tuple[str | int, ...]:
    start = (place,) if place else ()
    if error["type"] == _RULE:
        return *start, *error["ctx"]["field"].split(".")
    return *start, *error["loc"]


_NEEDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping of names to values",
    "tuple_type": "a list",
    "model_type": "a mapping of its fields",
}

_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}

_KINDS: Mapping[type, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "empty",
}


def _describe(dotted: str, error: ErrorDetails) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    shown = f"{dotted}={_short(value)}"
    if kind == _RULE:
        return str(context["message"])
    if kind == "value_error":
        return f"{shown}: {context['error']}"
    if kind == "missing":
        return f"{dotted} is missing and has no default. Give it a value."
    if kind in _NEEDS:
        is_a = _KINDS.get(type(value), f"of type {type(value).__name__}")
        return f"{shown} is {is_a}; it needs {_NEEDS[kind]}.{_repair(kind, value)}"
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        return f"{shown} is out of range: it must be {words} {context[key]}."
    if kind == "finite_number":
        return f"{shown} is not a finite number. Use a finite one."
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        close = nearest(str(value), choices, count=1)
        hint = f" The nearest is {close[0]}." if close else ""
        return f"{shown} is unknown: use {' or '.join(choices)}.{hint}"
    return f"{shown}: {error['msg']}."


def _repair(kind: str, value: object) -> str:
    if isinstance(value, str) and value in {"None", "none"}:
        return " For no value write null in YAML or --set, None in Python."
    if kind == "string_type":
        return " Put it in quotes." if isinstance(value, int | float) else ""
    if kind in {"int_type", "int_from_float"} and isinstance(value, float) and value.is_integer():
        return f" Write {value:.0f}."
    if kind == "bool_type":
        return " Write it without quotes." if value in ("true", "false", "True", "False") else ""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d_.]*(e[-+]?\d+)?", value, re.IGNORECASE):
        return f" Write {value.replace('_', '')} without quotes."
    return ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
