"""A resolved job in words: every field with its value and origin, and the batch arithmetic."""

import dataclasses
import json

from rayway.spec.batch import plan_batch
from rayway.spec.job import leaves
from rayway.spec.load import Resolved, job_hash


def describe(resolved: Resolved, *, dp_size: int) -> str:
    """Return a line per field, ``optim.lr = 0.001   (jobs/x.py:12)``, and the batch in words.

    Args:
        resolved: What a run would train.
        dp_size: Data-parallel ranks, 1 or more.

    Raises:
        SpecError: The global batch does not split over that many ranks.
    """
    plan = plan_batch(resolved.job.batch, dp_size=dp_size)
    fields = {field: _shown(value) for field, value in leaves(resolved.job).items()}
    width = max(len(f"{field} = {value}") for field, value in fields.items())
    width = min(width, 60)  # one long URL must not push all origins off the screen
    lines = [
        f"{f'{field} = {value}':<{width}}   ({resolved.origins[field]})"
        for field, value in fields.items()
    ]
    return "\n".join([*lines, "", plan.sentence()])


def describe_json(resolved: Resolved, *, dp_size: int) -> str:
    """Return the same as JSON: ``fields`` (value and origin), ``batch``, ``job_hash``.

    Raises:
        SpecError: The global batch does not split over ``dp_size`` ranks.
    """
    plan = plan_batch(resolved.job.batch, dp_size=dp_size)
    fields = {
        field: {"value": value, "origin": resolved.origins[field]}
        for field, value in leaves(resolved.job).items()
    }
    record = {
        "fields": fields,
        "batch": dataclasses.asdict(plan),
        "job_hash": job_hash(resolved.job),
        "code_root": str(resolved.code_root),
    }
    return json.dumps(record, indent=2, allow_nan=False)


def _shown(value: object) -> str:
    """Write a value the way ``--set`` reads it."""
    if isinstance(value, str) and value and value.isprintable():
        return value
    return json.dumps(value)
