"""What the loop of a script of the user's own is made of, and its job.json.

It shares its sections with the job, so that the same words are checked in the same way. Model,
loss and optimizer are objects of the script: only the script can make them again.
"""

import json
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from rayway.errors import SpecError
from rayway.spec.job import BatchSpec, CheckpointSpec, Count, DataSpec
from rayway.spec.load import JSON_SCHEMA_VERSION, OWN_LOOP
from rayway.spec.section import Section, rule

_FREE = {"name", "steps", "epochs", "checkpoint"}


class OwnSpec(Section):
    """A training whose step is the user's."""

    place: ClassVar[str] = ""
    of_job: ClassVar[bool] = False

    name: str
    """The run's id."""

    data: DataSpec
    """Which samples are trained on. ``train`` is an absolute path or a URL."""

    batch: BatchSpec
    """How many samples make a step."""

    steps: Count | None = None
    """Length of the training in steps. Exactly one of ``steps`` and ``epochs`` is given."""

    epochs: Annotated[float, Field(gt=0, le=10**9)] | None = None
    """Length of the training in passes over the training data; a fraction is allowed."""

    checkpoint: CheckpointSpec
    """When a run saves, and what it keeps."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """What the order of the samples and the draws of each step come from."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            how_many = "neither" if self.steps is None else "both"
            raise rule(
                "steps", f"{how_many} of steps and epochs say how long to train. Give one of them."
            )
        return self


def own_to_json(spec: OwnSpec, *, script: Path | None) -> str:
    """Return the text of job.json of a run of an own loop.

    Args:
        spec: The loop's settings.
        script: The file to start again to go on; ``None`` for a notebook.
    """
    record = {
        "schema": JSON_SCHEMA_VERSION,
        "job": spec.model_dump(mode="json"),
        OWN_LOOP: {"script": None if script is None else str(script)},
    }
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def check_same_loop(spec: OwnSpec, text: str, *, url: str) -> None:
    """Compare a loop with the job.json of the run that it is to go on with.

    Length and checkpoints may differ, and so may the place of the data: what lies there is
    compared elsewhere.

    Args:
        spec: The loop as the script has it now.
        text: The run's job.json.
        url: The run's folder, for the message.

    Raises:
        SpecError: The run is none of an own loop, or something else than the length differs.
    """
    record = json.loads(text)
    if OWN_LOOP not in record:
        raise SpecError(
            f"{url} is the run of a job, not of an own loop. Go on with it by `rayway resume`, or "
            "give the loop another folder."
        )
    began, now = (_flat(job) for job in (record["job"], spec.model_dump(mode="json")))
    for field, value in now.items():
        if began.get(field) != value:
            raise SpecError(
                f"{url} was begun with {field}={began.get(field)!r}, and the script now has "
                f"{value!r}. Put it back to go on with this run, or give the loop another folder."
            )


def _flat(job: dict[str, object]) -> dict[str, object]:
    """Return what decides a run's numbers, by dotted name."""
    fields: dict[str, object] = {}
    for name, value in job.items():
        if isinstance(value, dict):
            fields |= {f"{name}.{field}": inner for field, inner in value.items()}
        else:
            fields[name] = value
    return {
        field: value
        for field, value in fields.items()
        if field.partition(".")[0] not in _FREE and field != "data.train"
    }
