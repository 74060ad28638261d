import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

from rayway.errors import CheckpointError
from rayway.storage.records import decode_record, encode_record
from rayway.train.stateful import OptimizerGroups, pack, unpack


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": None, "b": True, "c": 3, "d": 0.1, "e": "text", "f": [1, [2]], "g": (1, (2,))},
        {"dict": [], "tensor": "x", "float": "inf"},
        {3: "number", ("a", 1): "tuple", None: "none", True: 1.5},
        {"best": math.inf, "worst": -math.inf},
    ],
)
def test_a_state_comes_back_as_it_was(state: dict[Any, Any]) -> None:
    packed, tensors = pack(state, name="it")
    through_json = decode_record(encode_record({"it": packed}, name="it"), name="it")["it"]
    assert repr(unpack(through_json, tensors)) == repr(state)


def test_nan_comes_back() -> None:
    assert math.isnan(unpack(*pack(math.nan, name="it")))


def test_tensors_come_back_from_any_depth_and_not_as_views() -> None:
    state = {"w": torch.arange(3.0), "deep": [{"v": torch.tensor(2)}, {"v": torch.tensor(5)}]}
    packed, tensors = pack(state, name="it")
    back = unpack(packed, tensors)
    torch.testing.assert_close(back, state, rtol=0, atol=0)
    back["w"][0] = 7
    assert state["w"][0] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
        lambda o: lr_scheduler.OneCycleLR(o, 0.5, 9),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.LambdaLR(o, lambda e: 0.9**e)], [3]
        ),
    ],
)
def test_a_scheduler_goes_on_as_if_it_had_not_stopped(make: Any) -> None:
    def begin() -> tuple[SGD, Any]:
        optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
        return optimizer, make(optimizer)

    def go_on(optimizer: SGD, schedule: Any, steps: int) -> list[Any]:
        plateau = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
        seen = []
        for _ in range(steps):
            optimizer.step()
            schedule.step(*[1.0] if plateau else [])
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return seen

    whole = go_on(*begin(), 8)
    first = begin()
    assert go_on(*first, 3) == whole[:3]
    saved = [pack(each.state_dict(), name="it") for each in (OptimizerGroups(first[0]), first[1])]
    optimizer, schedule = begin()
    OptimizerGroups(optimizer).load_state_dict(unpack(*saved[0]))
    schedule.load_state_dict(unpack(*saved[1]))
    optimizer.step()  # or torch warns that the schedule is ahead of it
    assert go_on(optimizer, schedule, 5) == whole[3:]


def test_a_counter_comes_back_as_a_dict() -> None:
    assert unpack(*pack({"milestones": Counter([3])}, name="it")) == {"milestones": {3: 1}}


def test_what_is_no_plain_data_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="state of it cannot be saved: it/a/0 is of type set"):
        pack({"a": [{1}]}, name="it")


def test_another_number_of_groups_is_refused() -> None:
    one = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    two = SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)], lr=0.1)
    with pytest.raises(CheckpointError, match="has 1 parameter groups and this one 2"):
        OptimizerGroups(two).load_state_dict(OptimizerGroups(one).state_dict())
