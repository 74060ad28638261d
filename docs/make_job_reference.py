"""Write docs/reference/job.md from the spec: ``python docs/make_job_reference.py``.

A test holds the page to this script's output, so no field is undocumented and none is out of date.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from rayway.spec.job import SECTIONS, Job, job_schema
from rayway.spec.section import Section

PAGE = Path(__file__).parent / "reference" / "job.md"

_HEAD = """# The job

Made by `docs/make_job_reference.py` from `platform/rayway/spec/job.py`; do not edit.

A job file is Python that ends in `job = Job(...)`. Every part takes its values by name, and refuses
unknown names, wrong types and values out of range with file, line and repair. A field is written
`optim.lr` in `--set`, in a `--config` file and in messages. Values come from the default, then the
job file, then `--config`, then `--set`; `rayway run JOB --dry-run` shows each with its origin.

A *function* is `"module:name"`, importable from the job file's folder, or the function itself.
"""

_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "names to values",
    "null": "None",
}
_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def render() -> str:
    """Return the page."""
    schema = job_schema()
    plain = {name for name in Job.model_fields if name not in SECTIONS}
    parts = [_HEAD, "## Job\n", *_table("", Job, schema, only=plain)]
    for name, section in SECTIONS.items():
        parts += [
            f"\n## {name}: {section.__name__}\n",
            f"{section.__doc__}\n",
            *_table(f"{name}.", section, schema["$defs"][section.__name__], only=None),
        ]
    return "\n".join(parts) + "\n"


def _table(
    prefix: str, section: type[Section], schema: dict[str, Any], *, only: set[str] | None
) -> Iterator[str]:
    yield "| field | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in section.model_fields.items():
        if only is None or name in only:
            shown = _type(schema["properties"][name])
            meaning = " ".join((field.description or "").replace("``", "`").split())
            meaning = meaning.replace("|", r"\|")
            yield f"| `{prefix}{name}` | {shown} | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{field.get_default(call_default_factory=True)!r}`".replace("'", '"')


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f'`"{choice}"`' for choice in schema["enum"])
    if schema.get("type") == "array":
        items = schema.get("prefixItems")
        return f"{len(items)} x {_type(items[0])}" if items else f"list of {_type(schema['items'])}"
    if ":" in schema.get("pattern", ""):
        return "function"
    limits = [f"{sign} {_number(schema[key])}" for key, sign in _LIMITS.items() if key in schema]
    word = _WORDS[schema["type"]]
    return f"{word} ({', '.join(limits)})" if limits else word


def _number(limit: float) -> str:
    for base in (2, 10):
        power = len(f"{int(limit):b}") - 1 if base == 2 else len(str(int(limit))) - 1
        if limit >= 10**5 and limit == base**power:
            return f"{base}^{power}"
    return f"{limit:g}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
