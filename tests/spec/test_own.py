from pathlib import Path
from typing import Any

import pytest

from rayway.errors import SpecError
from rayway.spec.job import BatchSpec, CheckpointSpec, DataSpec
from rayway.spec.load import job_from_json
from rayway.spec.own import OwnSpec, check_same_loop, own_to_json

SCRIPT = Path("/home/me/train.py")


def own(**changes: Any) -> OwnSpec:
    sections: dict[str, Any] = {
        "name": "mine",
        "data": DataSpec(train="/data"),
        "batch": BatchSpec(global_batch=8),
        "steps": 5,
        "checkpoint": CheckpointSpec(),
    }
    return OwnSpec(**{**sections, **changes})


@pytest.mark.parametrize("script", [SCRIPT, None])
def test_its_job_json_is_refused_as_a_job_and_says_what_to_do(script: Path | None) -> None:
    with pytest.raises(SpecError, match=f"start {script or 'the program or notebook'} again"):
        job_from_json(own_to_json(own(), script=script))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"steps": 50},
        {"steps": None, "epochs": 2},
        {"checkpoint": CheckpointSpec(every_steps=3, keep_last=9)},
        {"data": DataSpec(train="/elsewhere")},
        {"name": "copied"},
    ],
)
def test_length_checkpoints_and_places_may_change(change: dict[str, Any]) -> None:
    check_same_loop(own(**change), own_to_json(own(), script=None), url="runs/mine")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 1}, "seed=0, and the script now has 1"),
        ({"batch": BatchSpec(global_batch=4)}, "batch.global_batch=8, and the script now has 4"),
        ({"data": DataSpec(train="/data", columns=["x"])}, "data.columns=None"),
        ({"data": DataSpec(train="/data", shuffle=False)}, "data.shuffle=True"),
    ],
)
def test_what_decides_the_numbers_may_not(change: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match=f"runs/mine was begun with {field}"):
        check_same_loop(own(**change), own_to_json(own(), script=None), url="runs/mine")


@pytest.mark.parametrize("length", [{"steps": None}, {"steps": 5, "epochs": 1.0}])
def test_exactly_one_length_is_given(length: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="steps and epochs say how long to train"):
        own(**length)
