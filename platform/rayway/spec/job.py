"""The job: every field, its unit and its default, on one page.

A job file ends in ``job = Job(...)``. All parts are frozen and take their values by name. A wrong
value is refused where it is made, with file, line and repair.
"""

import re
from collections.abc import Callable
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from rayway.spec.code import path_of
from rayway.spec.section import Section, rule

_NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
_RESERVED_NAMES = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{n}{i}" for n in ("com", "lpt") for i in range(10)),
}


def _checked_name(name: str) -> str:
    if not re.fullmatch(_NAME, name):
        raise ValueError(
            "a name is 1 to 63 of the characters a-z 0-9 . _ - and begins with a letter or digit, "
            "because it becomes part of folder names and URLs. Choose such a name."
        )
    if name.split(".", maxsplit=1)[0] in _RESERVED_NAMES or name.endswith("."):
        raise ValueError("some systems cannot have a folder of this name. Choose another name.")
    return name


def _list_to_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _checked_columns(columns: tuple[str, ...]) -> tuple[str, ...]:
    if not columns or "" in columns or len(set(columns)) < len(columns):
        raise ValueError(
            "name at least one column, each of them once. For all columns leave it out."
        )
    return columns


def _checked_place(url: str) -> str:
    if not url.strip() or "\0" in url:
        raise ValueError("is empty or no path. Give the folder or URL that holds Parquet files.")
    return url


def _checked_sources(value: object) -> str | dict[str, float]:
    if isinstance(value, str):
        return _checked_place(value)
    if not isinstance(value, dict):
        repair = " Put it in quotes." if isinstance(value, int | float) else ""
        raise ValueError(
            f"give a folder or URL as text, or a mapping of such to their weights.{repair}"
        )
    if not value:
        raise ValueError("is an empty mapping. Name at least one folder or URL with its weight.")
    sources: dict[str, float] = {}
    for place, weight in value.items():
        if not isinstance(place, str):
            raise ValueError(f"{place!r} is no folder or URL. Put it in quotes.")
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not isfinite(weight) or weight <= 0:
            raise ValueError(
                f"the weight of {place} is {weight!r}. Use a number above 0; to leave the data "
                f"out, leave out its line."
            )
        sources[_checked_place(place)] = float(weight)
    return sources


def _checked_shuffle(value: object) -> bool | str:
    if isinstance(value, bool) or value == "sticky":
        return value
    hint = " Write it without quotes." if value in ("true", "false", "True", "False") else ""
    raise ValueError(f"use true or false or sticky.{hint}")


def _checked_pad(pad: dict[str, int]) -> dict[str, int]:
    if "" in pad:
        raise ValueError("a column has no name. Write COLUMN: LENGTH.")
    return pad


def _plain_json(value: object, where: str = "args") -> object:
    """Let through only what comes back unchanged from job.json."""
    kind = type(value)
    if where.count(".") > 32:
        raise rule(where, f"model.{where}: values are nested too deeply; at most 32 levels fit.")
    if kind is float and not isfinite(value):  # type: ignore[arg-type]  # kind says it is a float
        raise rule(where, f"model.{where}={value} is not a finite number. Use a finite one.")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise rule(where, f"model.{where} has the key {key!r}; keys are text.")
            _plain_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _plain_json(item, f"{where}.{i}")
    elif kind not in (str, int, float, bool, type(None)):
        raise rule(
            where,
            f"model.{where} is of type {kind.__name__}, which job.json cannot keep. Use text, "
            "numbers, true or false, None, lists and dicts with text as keys.",
        )
    return value


ImportPath = Annotated[
    str | Callable[..., Any],
    PlainValidator(path_of),
    WithJsonSchema({"type": "string", "pattern": r"^[^:\s]+:[^:\s]+$"}),
]
"""A user's function: ``"module:name"`` or the function itself; always kept as ``"module:name"``."""

Count = Annotated[int, Field(ge=1, le=10**12)]
Samples = Annotated[int, Field(ge=1, le=10**9)]
Seconds = Annotated[float, Field(gt=0, le=10**7)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Place = Annotated[str, AfterValidator(_checked_place)]
Sources = Annotated[
    str | dict[str, float],
    PlainValidator(_checked_sources),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "object",
                    "minProperties": 1,
                    "additionalProperties": {"type": "number", "exclusiveMinimum": 0},
                },
            ]
        }
    ),
]
"""A folder or URL, or a mixture of some: each with its share of every global batch."""
Shuffle = Annotated[
    bool | Literal["sticky"],
    PlainValidator(_checked_shuffle),
    WithJsonSchema({"enum": [True, False, "sticky"]}),
]


class ModelSpec(Section):
    """Which model is trained."""

    place: ClassVar[str] = "model"

    build: ImportPath
    """Function that is called as ``build(**args)`` and returns the ``nn.Module``."""

    args: Annotated[dict[str, JsonValue], BeforeValidator(_plain_json)] = Field(
        default_factory=dict
    )
    """Keyword arguments of ``build``: text, numbers, true or false, None, lists, dicts."""


class DataSpec(Section):
    """Which samples are trained on, and in which order."""

    place: ClassVar[str] = "data"

    train: Sources
    """Folder, glob or URL of the training Parquet files; or a mixture, ``{PLACE: WEIGHT, ...}``,
    of which each global batch holds its share. A relative path counts from where rayway starts."""

    validation: Place | None = None
    """Folder or URL of the validation Parquet files. ``None``: no evaluation."""

    columns: (
        Annotated[
            tuple[str, ...], BeforeValidator(_list_to_tuple), AfterValidator(_checked_columns)
        ]
        | None
    ) = None
    """Columns to read. ``None``: all."""

    prepare: ImportPath | None = None
    """Function that makes the data: called once as ``prepare(folder)`` with the parent folder of
    ``train`` (of its first place) if ``train`` does not exist yet."""

    transform: ImportPath | None = None
    """Function ``transform(columns, rng) -> columns`` for each group of rows, after reading.
    ``rng.uniform(k)`` draws by sample, ``rng.training`` is false while evaluating."""

    invalid: Literal["error", "skip", "fill"] = "error"
    """What happens to a row with a null, NaN or infinite value: the run ends and names it, it is
    left out of its batch, or the value becomes 0."""

    pad: Annotated[dict[str, Samples], AfterValidator(_checked_pad)] = Field(default_factory=dict)
    """Lists of differing length: column -> values a row. Shorter lists are filled with zeros, and
    ``COLUMN_mask`` says which values are real. A longer list is refused."""

    shuffle: Shuffle = True
    """Whether samples come in an order drawn from ``seed`` and epoch, or as they are stored.
    ``"sticky"``: drawn, but each lane keeps its row groups over all epochs, for caches."""

    cover: Literal["drop", "all"] = "drop"
    """What happens to the rows that do not fill an epoch's last global batch: left out of that
    epoch (``drop``), or a smaller last step (``all``)."""

    lanes: Count | None = None
    """Places of the data that are read at the same time. ``None``: chosen from the data."""

    bands: Count | None = None
    """Groups of lanes; a number of workers that divides it shares no lane. ``None``: chosen."""

    window: Count | None = None
    """Row groups of a lane that are shuffled together. ``None``: chosen from the data."""

    @property
    def sources(self) -> dict[str, float]:
        """Each training place with its weight, the only one with weight 1."""
        return {self.train: 1.0} if isinstance(self.train, str) else self.train


class BatchSpec(Section):
    """How many samples make a step, and how many go through the model at once."""

    place: ClassVar[str] = "batch"

    global_batch: Samples
    """Samples per optimizer step, over all ranks. The only batch number that changes results."""

    micro_batch: Samples | None = None
    """Samples per forward pass on one rank. ``None``: the rank's whole share of a step."""

    @model_validator(mode="after")
    def _micro_batch_fits(self) -> Self:
        if self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise rule(
                "micro_batch",
                f"batch.micro_batch={self.micro_batch} is more than batch.global_batch="
                f"{self.global_batch}. Use {self.global_batch} or less.",
            )
        return self


class OptimSpec(Section):
    """How the weights change, and for how long."""

    place: ClassVar[str] = "optim"

    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer, unless ``build`` makes another."""

    lr: Annotated[float, Field(gt=0, le=1000)]
    """Learning rate at its peak."""

    betas: Annotated[tuple[Decay, Decay], BeforeValidator(_list_to_tuple)] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square; for adamw."""

    momentum: Decay = 0.9
    """Decay of the running gradient; for sgd."""

    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Pull of the weights to zero, per step and unit of learning rate."""

    max_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest L2 norm of the gradient over all weights; a larger one is scaled down. ``None``:
    never."""

    warmup_steps: Annotated[int, Field(ge=0, le=10**12)] = 0
    """Steps in which the learning rate grows from zero to its peak."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up."""

    final_lr_fraction: Fraction = 0.0
    """Learning rate at the last step, as a fraction of ``lr``; for linear and cosine."""

    steps: Count | None = None
    """Length of the training in steps. Exactly one of ``steps`` and ``epochs`` is given."""

    epochs: Annotated[float, Field(gt=0, le=10**9)] | None = None
    """Length of the training in passes over the training data; a fraction is allowed."""

    build: ImportPath | None = None
    """Function ``build(model, spec)`` that returns the user's own ``torch.optim.Optimizer``."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is None and self.epochs is None:
            raise rule(
                "steps", "neither optim.steps nor optim.epochs says how long to train. Give one."
            )
        if self.steps is not None and self.epochs is not None:
            raise rule(
                "epochs",
                f"optim.steps={self.steps} and optim.epochs={self.epochs:g} both say how long to "
                "train. Keep one.",
            )
        if self.steps is not None and self.warmup_steps > self.steps:
            raise rule(
                "warmup_steps",
                f"optim.warmup_steps={self.warmup_steps} is longer than the training, optim.steps="
                f"{self.steps}. Use {self.steps} or less.",
            )
        return self


class EvaluateSpec(Section):
    """When the validation data is looked at."""

    place: ClassVar[str] = "evaluate"

    every_steps: Count | None = None
    """Evaluate after each such number of steps. ``None``: only at the end."""

    micro_batch: Samples | None = None
    """Samples per forward pass on one rank. ``None``: as in training."""


class CheckpointSpec(Section):
    """When a run saves, and what it keeps."""

    place: ClassVar[str] = "checkpoint"

    every_steps: Count | None = None
    """Save after each such number of steps, and once more at the end. ``None``: only at the end."""

    keep_last: Count = 3
    """Newest checkpoints to keep. The one being resumed from is never deleted."""

    keep_every_steps: Count | None = None
    """Also keep these for good, in steps. ``None``: only ``keep_last`` protects a checkpoint."""

    @model_validator(mode="after")
    def _keeps_what_is_saved(self) -> Self:
        keep, every = self.keep_every_steps, self.every_steps
        if keep is None:
            return self
        if every is None:
            raise rule(
                "keep_every_steps",
                f"checkpoint.keep_every_steps={keep} never meets a save: checkpoint.every_steps is "
                "not given. Give it, or leave out keep_every_steps.",
            )
        if keep % every:
            raise rule(
                "keep_every_steps",
                f"checkpoint.keep_every_steps={keep} does not meet the saves: it is not a multiple "
                f"of checkpoint.every_steps={every}. Use {(keep // every + 1) * every}.",
            )
        return self


class ScaleSpec(Section):
    """On how much hardware, and how patiently. Changes no results."""

    place: ClassVar[str] = "scale"

    workers: Annotated[int, Field(ge=0, le=100_000)] = 2
    """Worker processes, one rank each. 0: train inside the calling process, for a debugger."""

    cpus_per_worker: Annotated[float, Field(gt=0, le=10_000)] = 1.0
    """CPUs reserved for a worker; a fraction shares one. Rounded down, at least 1: its threads."""

    gpus_per_worker: Annotated[int, Field(ge=0, le=1)] | None = None
    """GPUs reserved for a worker, 0 or 1. ``None``: 1 if there are GPUs, else 0."""

    data_engine: Literal["auto", "local", "ray"] = "auto"
    """Who reads and transforms the data: threads in each worker (``local``), or Ray Data on CPUs
    beside the workers (``ray``). ``auto``: ``ray`` for a ``data.transform`` if CPUs are left."""

    max_attempts: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Lives of the worker group without progress after which the run fails."""

    start_timeout_s: Seconds = 120.0
    """Seconds within which all workers must have started."""

    step_timeout_s: Seconds = 600.0
    """Seconds within which a step must finish before the run counts as hung."""


class Job(Section):
    """One training, completely described: the same numbers on any cluster shape."""

    name: Annotated[
        str, AfterValidator(_checked_name), Field(json_schema_extra={"pattern": f"^{_NAME}$"})
    ]
    """What the run ids begin with: 1 to 63 of ``a-z 0-9 . _ -``."""

    model: ModelSpec
    """Which model is trained."""

    loss: ImportPath
    """Function ``loss(model, batch)`` that returns the loss summed over a micro-batch."""

    data: DataSpec
    """Which samples are trained on."""

    batch: BatchSpec
    """How many samples make a step."""

    optim: OptimSpec
    """How the weights change, and for how long."""

    evaluate: EvaluateSpec = EvaluateSpec()
    """When the validation data is looked at."""

    checkpoint: CheckpointSpec = CheckpointSpec()
    """When a run saves, and what it keeps."""

    scale: ScaleSpec = ScaleSpec()
    """On how much hardware."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of the forward and backward pass; weights stay fp32."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """What all random draws come from: sample order, initial weights, dropout, augmentation."""

    trace: bool = False
    """Whether the sample ids of each step are written to the event log."""

    @model_validator(mode="after")
    def _has_what_it_evaluates(self) -> Self:
        if self.evaluate.every_steps is not None and self.data.validation is None:
            raise rule(
                "evaluate.every_steps",
                f"evaluate.every_steps={self.evaluate.every_steps} has nothing to evaluate on: "
                "data.validation is not given. Give it, or leave out evaluate.every_steps.",
            )
        return self


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Job.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
"""The parts of a job by name; the rest of its fields are plain values."""


def leaves(job: Job) -> dict[str, object]:
    """Return every field's value by its dotted name; each of ``model.args`` counts as a field."""
    values: dict[str, object] = {}
    for name in Job.model_fields:
        value = getattr(job, name)
        if isinstance(value, Section):
            values |= {
                f"{name}.{field}": getattr(value, field) for field in type(value).model_fields
            }
        else:
            values[name] = value
    if job.model.args:
        at = list(values).index("model.args")
        args = [(f"model.args.{key}", value) for key, value in job.model.args.items()]
        items = list(values.items())
        values = dict([*items[:at], *args, *items[at + 1 :]])
    return values


def job_schema(*, partial: bool = False) -> dict[str, Any]:
    """Return the JSON schema of a job, for editors.

    Args:
        partial: Let every field be left out, as in a ``--config`` file, which only changes a job.
    """
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Job.model_json_schema()}
    if partial:
        for part in (schema, *schema["$defs"].values()):
            part.pop("required", None)
    return schema
