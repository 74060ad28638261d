from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.errors import SpecError
from rayway.spec.job import Job, OptimSpec, leaves
from rayway.spec.layers import DEFAULT, Setting, layer_of_overrides, layer_of_values, merge

BASE = {
    "name": "tiny",
    "model": {"build": "m:b", "args": {"layers": 2, "deep": {"x": 1}}},
    "loss": "m:l",
    "data": {"train": "/rows"},
    "batch": {"global_batch": 8},
    "optim": {"lr": 0.1, "steps": 12},
}
DEFAULTS = leaves(merge([layer_of_values(BASE, where="base")])[0])

fields = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "trace": st.booleans(),
        "optim.lr": st.floats(1e-9, 10),
        "optim.weight_decay": st.floats(0, 1),
        "optim.betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
        "scale.workers": st.integers(0, 64),
        "data.shuffle": st.booleans(),
        "model.args.layers": st.integers(),
    },
)
Fields = Mapping[str, object]


def layer(values: Fields, where: str) -> list[Setting]:
    return [Setting(tuple(field.split(".")), value, where) for field, value in values.items()]


@given(file=fields, config=fields, overrides=fields)
def test_the_later_layer_wins_and_is_the_origin(
    file: Fields, config: Fields, overrides: Fields
) -> None:
    layers = {"x.py:1": file, "f.yaml:1": config, "--set": overrides}
    job, origins = merge(
        [layer_of_values(BASE, where="base"), *(layer(v, where) for where, v in layers.items())]
    )
    for field, value in leaves(job).items():
        owner = next((w for w in reversed(layers) if field in layers[w]), None)
        assert value == (layers[owner][field] if owner else DEFAULTS[field])
        given_in_base = field in {
            "name", "model.build", "model.args.layers", "model.args.deep", "loss", "data.train",
            "batch.global_batch", "optim.lr", "optim.steps",
        }  # fmt: skip
        assert origins[field] == (owner or ("base" if given_in_base else DEFAULT))


@given(fields)
def test_every_leaf_has_an_origin_and_nothing_else_has(values: Fields) -> None:
    job, origins = merge([layer_of_values(BASE, where="base"), layer(values, "x")])
    assert list(origins) == list(leaves(job))


def job_with(*overrides: str) -> tuple[Job, dict[str, str]]:
    return merge([layer_of_values(BASE, where="base"), layer_of_overrides(overrides)])


def test_another_length_of_training_replaces_the_one_below() -> None:
    job, origins = job_with("optim.epochs=2")
    assert (job.optim.steps, job.optim.epochs) == (None, 2.0)
    assert origins["optim.steps"] == "--set"
    assert job_with("optim.steps=3")[0].optim.steps == 3


def test_two_lengths_in_one_layer_are_refused() -> None:
    with pytest.raises(SpecError, match="both say how long"):
        job_with("optim.epochs=2", "optim.steps=3")


def test_a_single_model_argument_can_be_changed_or_added() -> None:
    job, origins = job_with("model.args.layers=3", "model.args.width=64")
    assert job.model.args == {"layers": 3, "deep": {"x": 1}, "width": 64}
    assert origins["model.args.layers"] == "--set"
    assert origins["model.args.deep"] == "base"


def test_an_argument_inside_an_argument_can_be_changed_without_touching_the_layer_below() -> None:
    job, origins = job_with("model.args.deep.y=2")
    assert job.model.args["deep"] == {"x": 1, "y": 2}
    assert origins["model.args.deep"] == "--set"
    assert BASE["model"] == {"build": "m:b", "args": {"layers": 2, "deep": {"x": 1}}}


def test_empty_arguments_remove_those_below() -> None:
    job, origins = job_with("model.args={}")
    assert job.model.args == {}
    assert origins["model.args"] == "--set"


def test_a_section_given_as_a_mapping_changes_only_its_keys() -> None:
    job, _ = job_with("optim={lr: 0.5, betas: [0.8, 0.9]}")
    assert job.optim == OptimSpec(lr=0.5, betas=(0.8, 0.9), steps=12)


def test_null_is_no_value() -> None:
    assert job_with("optim.max_norm=null")[0].optim.max_norm is None
    assert job_with("optim.max_norm=~")[0].optim.max_norm is None


def test_a_value_may_hold_an_equals_sign_and_colons() -> None:
    job, _ = job_with("data.train=s3://b/k=v/x", "loss=a.b:c")
    assert (job.data.train, job.loss) == ("s3://b/k=v/x", "a.b:c")
