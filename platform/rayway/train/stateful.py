"""The state of what is neither model nor optimizer, as tensors and plain JSON.

A learning-rate scheduler, a gradient scaler or a moving average of weights has a ``state_dict``: a
tree of dicts, lists, numbers, text and tensors. Tensors go into a file of their own, the rest
becomes JSON that gives back tuples, infinities and keys that are numbers. No pickle is made.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any, Protocol

from pydantic import JsonValue
from torch import Tensor
from torch.optim import Optimizer

from rayway.errors import CheckpointError

OPTIMIZER_GROUPS = "optimizer-groups"
"""The name under which a checkpoint holds the state of ``OptimizerGroups``."""


class Stateful(Protocol):
    """What has a state to save, as torch's own classes have."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take over a state."""


class OptimizerGroups:
    """The settings of an optimizer's groups; a scheduler changes their learning rate in place."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer  # it makes a new list of groups whenever it loads a state

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of each group."""
        groups = self._optimizer.param_groups
        return {"groups": [{k: v for k, v in group.items() if k != "params"} for group in groups]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over settings, as torch does when it loads an optimizer.

        Raises:
            CheckpointError: There were more or fewer groups.
        """
        groups, stored = self._optimizer.param_groups, state_dict["groups"]
        if len(groups) != len(stored):
            raise CheckpointError(
                f"The checkpoint's optimizer has {len(stored)} parameter groups and this one "
                f"{len(groups)}. Make it as before, or start a new run."
            )
        for group, settings in zip(groups, stored, strict=True):
            group.update(settings)


def pack(state: object, *, name: str) -> tuple[JsonValue, dict[str, Tensor]]:
    """Return a state as JSON, and its tensors by their place in it.

    Args:
        state: What a ``state_dict`` returned.
        name: What the state is of, for the message.

    Raises:
        CheckpointError: Something in it is neither a tensor nor plain data.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: object, place: str) -> JsonValue:
        match value:
            case Tensor():
                tensors[place] = value
                return {"tensor": place}
            case float() if not isfinite(value):
                return {"float": repr(value)}
            case None | bool() | int() | float() | str():
                return value
            case list() | tuple():
                kind = "list" if isinstance(value, list) else "tuple"
                return {kind: [plain(part, f"{place}/{i}") for i, part in enumerate(value)]}
            case Mapping():
                pairs = value.items()
                return {"dict": [[plain(k, place), plain(v, f"{place}/{k}")] for k, v in pairs]}
            case _:
                raise CheckpointError(
                    f"the state of {name} cannot be saved: {place} is of type "
                    f"{type(value).__name__}. Tensors, numbers, text, lists and dicts can."
                )

    return plain(state, name), tensors


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that ``pack`` was given."""
    if not isinstance(packed, dict):
        return packed
    [(kind, content)] = packed.items()
    match kind:
        case "tensor":
            return tensors[content].clone()  # the file may be mapped, and go away
        case "float":
            return float(content)
        case "list":
            return [unpack(part, tensors) for part in content]
        case "tuple":
            return tuple(unpack(part, tensors) for part in content)
        case _:
            return {unpack(k, tensors): unpack(v, tensors) for k, v in content}
