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

    def changed_by_updates(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> frozenset[str]:
        """Return the names, as ``stem/name``, of what nothing but the optimizer's update changes.

        These are the weights that it trains, and its own tensors. Under DDP they are equal on all
        ranks. Other weights and the buffers may change in any forward pass, and differ.

        Args:
            tensors: What ``tensors`` returned.
        """
        trained = {
            weight
            for group in self.optimizer.param_groups
            for weight in group["params"]
            if weight.requires_grad
        }
        weights = {f"model/{name}" for name, w in self._weights().items() if w in trained}
        return frozenset(weights | {f"optimizer/{name}" for name in tensors["optimizer"]})

    def like(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the tensor that a stored one of this ``stem/name`` and shape is to fill.

        Moments that have the shape of their weight are laid out over ranks as the weight is.
        """
        stem, _, rest = name.partition("/")
        if stem not in {"model", "optimizer"}:
            return None
        weight = self._weights().get(rest if stem == "model" else rest.rpartition("/")[0])
        return weight if weight is not None and tuple(weight.shape) == shape else None

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
        self._restore_moments(tensors.get("optimizer", {}))
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

    def _weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters(remove_duplicate=False))

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
