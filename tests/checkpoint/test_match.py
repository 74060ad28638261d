import pytest
import torch
from torch import nn

from rayway.checkpoint.match import check_match
from rayway.errors import CheckpointError

TINY = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).state_dict()
DEEPER = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.Linear(4, 4)).state_dict()
WIDER = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 4)).state_dict()


def test_the_same_tensors_match() -> None:
    check_match(TINY, {name: tensor.clone() for name, tensor in TINY.items()}, what="model")


def test_a_surplus_and_a_lack_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"2 unknown to the job: 3\.bias; 3\.weight"):
        check_match(TINY, DEEPER, what="model")
    with pytest.raises(CheckpointError, match=r"2 missing in the checkpoint: 3\.bias; 3\.weight"):
        check_match(DEEPER, TINY, what="model")


def test_another_shape_is_refused_with_both_shapes() -> None:
    with pytest.raises(CheckpointError, match=r"0\.weight \(48, 8\), \(32, 8\)"):
        check_match(TINY, WIDER, what="model")


def test_another_type_is_refused_with_both_types() -> None:
    half = {name: tensor.half() for name, tensor in TINY.items()}
    with pytest.raises(CheckpointError, match=r"4 of another type .*torch.float16, torch.float32"):
        check_match(TINY, half, what="model")


def test_the_first_five_names_and_the_number_of_all_are_told() -> None:
    many = {f"layer.{i}": torch.zeros(1) for i in range(9)}
    with pytest.raises(CheckpointError, match=r"9 missing .*layer\.0.*layer\.4, …") as caught:
        check_match(many, {}, what="optimizer")
    assert "layer.5" not in str(caught.value)
