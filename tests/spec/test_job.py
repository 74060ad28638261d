import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from rayway.errors import SpecError
from rayway.spec.job import (
    SECTIONS,
    BatchSpec,
    CheckpointSpec,
    DataSpec,
    EvaluateSpec,
    Job,
    ModelSpec,
    OptimSpec,
    ScaleSpec,
    job_schema,
    leaves,
)
from rayway.spec.section import Section


def some_loss(model: object, batch: object) -> None: ...


class SomeModel: ...


def test_a_function_is_kept_as_the_path_it_is_imported_by(job: Job) -> None:
    spec = ModelSpec(build=SomeModel)
    assert spec.build == f"{__name__}:SomeModel"
    assert ModelSpec(build="a.b:c.d").build == "a.b:c.d"


def test_a_job_cannot_be_changed(job: Job) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        job.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        job.optim.lr = 1.0


def test_a_job_survives_a_trip_to_a_worker(job: Job) -> None:
    assert pickle.loads(pickle.dumps(job)) == job  # our own bytes; Ray moves objects this way


def test_a_refusal_survives_a_trip_from_a_worker() -> None:
    with pytest.raises(SpecError) as caught:
        OptimSpec(lr=-1.0, steps=1)
    # our own bytes; Ray moves exceptions this way
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_whole_numbers_are_numbers_and_lists_are_tuples() -> None:
    optim = OptimSpec(lr=1, steps=1, betas=[0, 0.5])  # type: ignore[arg-type]  # YAML has lists
    assert (optim.lr, optim.betas) == (1.0, (0.0, 0.5))
    assert type(optim.lr) is float


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (BatchSpec, {"global_batch": 4, "micro_batch": 8}, "micro_batch=8 is more than .* Use 4 "),
        (OptimSpec, {"lr": 1, "steps": 5, "warmup_steps": 6}, "warmup_steps=6 is longer"),
        (OptimSpec, {"lr": 1, "steps": 5, "momentum": 1.0}, "momentum=1.0 .* less than 1"),
        (OptimSpec, {"lr": 1, "steps": 5, "betas": (0.9,)}, "optim.betas"),
        (OptimSpec, {"lr": 1, "steps": 5, "max_norm": 0}, "max_norm=0 .* more than 0"),
        (OptimSpec, {"lr": 1, "steps": 5, "final_lr_fraction": 1.1}, "at most 1"),
        (OptimSpec, {"lr": 1, "epochs": 0}, "epochs=0 .* more than 0"),
        (CheckpointSpec, {"keep_last": 0}, "keep_last=0 .* at least 1"),
        (CheckpointSpec, {"keep_every_steps": 10}, "never meets a save"),
        (CheckpointSpec, {"every_steps": 4, "keep_every_steps": 10}, "multiple of .* Use 12"),
        (EvaluateSpec, {"every_steps": 0}, "every_steps=0"),
        (ScaleSpec, {"workers": -1}, "workers=-1 .* at least 0"),
        (ScaleSpec, {"step_timeout_s": 0}, "step_timeout_s=0 .* more than 0"),
        (DataSpec, {"train": " "}, "train=' '.*empty"),
        (DataSpec, {"train": "a", "columns": ()}, "at least one column"),
        (DataSpec, {"train": "a", "columns": ["x", "x"]}, "each of them once"),
        (DataSpec, {"train": "a", "columns": "x"}, "needs a list"),
        (DataSpec, {"train": "a", "cover": "al"}, "use drop or all. The nearest is all"),
        (ModelSpec, {"build": "a:b", "args": {1: 2}}, "key 1; keys are text"),
        (ModelSpec, {"build": "a:b", "args": {"x": {"y": object()}}}, "model.args.x.y .* object"),
        (ModelSpec, {"build": "a:b", "args": [1]}, "needs a mapping"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_limit(
    section: type[Section], values: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        section(**values)


def test_evaluation_without_validation_data_is_refused(job: Job) -> None:
    values = {name: getattr(job, name) for name in Job.model_fields}
    with pytest.raises(SpecError, match=r"data\.validation is not given"):
        Job(**{**values, "evaluate": EvaluateSpec(every_steps=5)})


def test_arguments_that_contain_themselves_are_refused() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(SpecError, match="nested too deeply"):
        ModelSpec(build="a:b", args=loop)


def test_leaves_hold_every_field_once_with_each_model_argument(job: Job) -> None:
    count = sum(len(section.model_fields) for section in SECTIONS.values())
    plain = len(Job.model_fields) - len(SECTIONS)
    assert len(leaves(job)) == count + plain
    with_args = job.model_copy(update={"model": ModelSpec(build="a:b", args={"w": 1, "d": 2})})
    assert list(leaves(with_args))[1:5] == ["model.build", "model.args.w", "model.args.d", "loss"]


def test_the_spec_stays_small() -> None:
    sections: list[type[Section]] = [Job, *SECTIONS.values()]
    assert max(len(section.model_fields) for section in sections) <= 12
    assert sum(len(section.model_fields) for section in sections) <= 60


def test_every_field_is_described_in_the_schema() -> None:
    schema = job_schema()
    parts = [schema, *schema["$defs"].values()]
    fields = [(name, field) for part in parts for name, field in part.get("properties", {}).items()]
    assert [name for name, field in fields if not field.keys() & {"description", "$ref"}] == []
    assert all(part["additionalProperties"] is False for part in parts if "properties" in part)
    assert schema["required"] == ["name", "model", "loss", "data", "batch", "optim"]


def test_the_schema_of_a_settings_file_requires_nothing() -> None:
    schema = job_schema(partial=True)
    assert not any("required" in part for part in (schema, *schema["$defs"].values()))


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({}, "empty mapping"),
        ({"a": 0}, "the weight of a is 0"),
        ({"a": True}, "the weight of a is True"),
        ({"a": float("inf")}, "the weight of a is inf"),
        ({"a": "1"}, "the weight of a is '1'"),
        ({3: 1.0}, "3 is no folder"),
        ({" ": 1.0}, "is empty or no path"),
        (["a", "b"], "a mapping of such to their weights"),
    ],
)
def test_a_mixture_that_says_nothing_clear_is_refused(train: Any, words: str) -> None:
    with pytest.raises(SpecError, match=r"data\.train=") as caught:
        DataSpec(train=train)
    assert words in str(caught.value)


def test_the_sources_of_a_job_are_its_places_with_their_weights() -> None:
    assert DataSpec(train="a").sources == {"a": 1.0}
    assert list(DataSpec(train={"b": 3, "a": 1}).sources.items()) == [("b", 3.0), ("a", 1.0)]


@pytest.mark.parametrize("shuffle", [1, "yes", None, "true"])
def test_a_shuffle_that_is_not_known_is_refused(shuffle: Any) -> None:
    with pytest.raises(SpecError, match="true or false or sticky"):
        DataSpec(train="a", shuffle=shuffle)


@pytest.mark.parametrize("pad", [{"": 3}, {"x": 0}, {"x": 1.5}])
def test_a_padding_that_says_nothing_clear_is_refused(pad: Any) -> None:
    with pytest.raises(SpecError, match=r"data\.pad"):
        DataSpec(train="a", pad=pad)
