import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rayway.errors import SpecError
from rayway.spec.describe import describe, describe_json
from rayway.spec.job import leaves
from rayway.spec.load import job_hash, load_job


def test_every_field_is_shown_with_value_and_origin(write: Callable[..., Path]) -> None:
    config = write("f.yaml", "optim:\n  weight_decay: 1e-2\n")
    resolved = load_job(write(), config=[config], overrides=["scale.workers=4"])
    text = describe(resolved, dp_size=4)
    lines = {line.partition(" = ")[0]: " ".join(line.split()) for line in text.splitlines()}
    assert lines.keys() >= leaves(resolved.job).keys()
    assert lines["optim.lr"] == "optim.lr = 0.1 (jobs/tiny.py:19)"
    assert lines["loss"] == "loss = tiny:loss (jobs/tiny.py:15)"
    assert lines["model.args.layers"] == "model.args.layers = 2 (jobs/tiny.py:13)"
    assert lines["optim.weight_decay"] == "optim.weight_decay = 0.01 (f.yaml:2)"
    assert lines["scale.workers"] == "scale.workers = 4 (--set)"
    assert lines["seed"] == "seed = 0 (default)"
    assert lines["data.validation"] == "data.validation = null (default)"
    assert text.endswith("A step takes 8 samples: 4 ranks x 1 micro-batch x 2 samples.")


def test_the_json_form_holds_the_same(write: Callable[..., Path]) -> None:
    resolved = load_job(write(), overrides=["batch.micro_batch=1"])
    record = json.loads(describe_json(resolved, dp_size=2))
    assert record["fields"]["optim.lr"] == {"value": 0.1, "origin": "jobs/tiny.py:19"}
    assert record["fields"].keys() == leaves(resolved.job).keys()
    assert record["batch"] == {"global_batch": 8, "micro_batch": 1, "accumulation": 4, "dp_size": 2}
    assert record["job_hash"] == job_hash(resolved.job)


def test_a_batch_that_does_not_split_is_refused(write: Callable[..., Path]) -> None:
    resolved = load_job(write())
    for show in (describe, describe_json):
        with pytest.raises(SpecError, match="3 ranks"):
            show(resolved, dp_size=3)
