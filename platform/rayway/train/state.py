"""What training changes: model, optimizer, step. And its way into and out of a checkpoint.

A checkpoint holds tensors by name and facts as JSON; nothing in it is a pickle. Names of optimizer
tensors are those of the parameters, so they do not depend on the order of parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.optim import Optimizer

from rayway.checkpoint.match import check_match
from rayway.errors import CheckpointError
from rayway.train.stateful import Stateful, pack, unpack

_SHOWN = 5
_NUMBER = ":number"  # ends the name of a tensor that was a plain number in the optimizer


@dataclass
class TrainState:
    """The state of one rank. ``step`` counts finished optimizer updates."""

    model: nn.Module
    """As the user built it, without a wrapper."""

    replica: nn.Module
    """What the forward pass goes through: the model, or DistributedDataParallel around it."""

    optimizer: Optimizer
    step: int = 0

    others: Mapping[str, Stateful] = field(default_factory=dict)
    """What else an own loop has saved, by name."""

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors to store, by file stem and name. They are not copies."""
        others = {
            f"other-{name}": pack(other.state_dict(), name=name)[1]
            for name, other in self.others.items()
        }
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self._moments(),
            **{stem: found for stem, found in others.items() if found},
        }

    def facts(self) -> dict[str, JsonValue]:
        """Return what is to be stored of the others and is no tensor, by name."""
        return {name: pack(other.state_dict(), name=name)[0] for name, other in self.others.items()}

    def restore(
        self,
        tensors: Mapping[str, Mapping[str, Tensor]],
        step: int,
        facts: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """Take over a checkpoint's tensors; the model must have exactly their names and shapes.

        Args:
            tensors: What ``tensors`` returned, by file stem and name.
            step: Finished optimizer updates.
            facts: What ``facts`` returned.

        Raises:
            CheckpointError: Names are missing, unexpected or of another shape or dtype.
        """
        model = self.model.state_dict()
        check_match(model, tensors["model"], what="model")
        self.model.load_state_dict(dict(tensors["model"]), strict=True)
        self._restore_moments(tensors["optimizer"])
        facts = facts or {}
        if set(facts) != set(self.others):
            raise CheckpointError(
                f"The checkpoint also holds the state of {sorted(facts)}, and this loop has "
                f"{sorted(self.others)}. Give it the same, or start a new run."
            )
        for name, other in self.others.items():
            other.load_state_dict(unpack(facts[name], tensors.get(f"other-{name}", {})))
        self.step = step

    def _names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self.model.named_parameters()}

    def _moments(self) -> dict[str, Tensor]:
        names = self._names()
        return dict(
            _stored(f"{names[parameter]}/{field}", value)
            for parameter, fields in self.optimizer.state.items()
            for field, value in fields.items()
            if value is not None
        )

    def _restore_moments(self, stored: Mapping[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        by_parameter: dict[str, dict[str, Any]] = {}
        for key, value in stored.items():
            name, _, field = key.rpartition("/")
            number = field.endswith(_NUMBER)
            by_parameter.setdefault(name, {})[field.removesuffix(_NUMBER)] = (
                value.item() if number else value
            )
        unknown = sorted(set(by_parameter) - set(parameters))
        if unknown:
            raise CheckpointError(
                f"The checkpoint holds optimizer state of {len(unknown)} parameters that the model "
                f"does not have: {', '.join(unknown[:_SHOWN])}. Resume with the job it was made by."
            )
        order = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        position = {parameter: i for i, parameter in enumerate(order)}
        layout: dict[str, Any] = self.optimizer.state_dict()
        layout["state"] = {
            position[parameters[name]]: fields for name, fields in by_parameter.items()
        }
        self.optimizer.load_state_dict(layout)


def _stored(key: str, value: object) -> tuple[str, Tensor]:
    """Return a piece of optimizer state under the name and in the form that it is stored in."""
    if isinstance(value, Tensor):
        return key, value
    if isinstance(value, float):
        return key + _NUMBER, torch.tensor(value, dtype=torch.float64)
    if isinstance(value, int):
        return key + _NUMBER, torch.tensor(value)
    raise CheckpointError(
        f"The optimizer keeps {key} as {type(value).__name__}, which a checkpoint cannot hold. "
        f"Let it keep tensors and numbers only."
    )


def to_host(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return the same tensors in host memory; those already there are not copied."""
    with torch.no_grad():
        return {
            stem: {name: value.detach().cpu() for name, value in named.items()}
            for stem, named in tensors.items()
        }
