"""What is read in other processes, and how: plain values that can be sent there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rayway.data.index import Index
from rayway.data.plan import Plan
from rayway.data.shards import Reader
from rayway.data.stages import Stages
from rayway.spec.code import enter_code_root
from rayway.spec.load import import_object


@dataclass(frozen=True, kw_only=True)
class ReaderRecipe:
    """What a reader is made with; see :class:`rayway.data.shards.Reader` for the fields.

    Unlike a reader it can be sent to another process: the transform is a path.
    """

    code_root: Path | None = None
    """The folder of the user's modules. ``None``: the transform is in an installed package."""
    transform: str | None = None
    """``"module:name"`` of the user's function."""
    columns: Sequence[str] | None = None
    seed: int = 0
    training: bool = True
    invalid: Literal["error", "skip", "fill"] = "error"
    pad: Mapping[str, int] = field(default_factory=dict)

    def build(self, indexes: Sequence[Index], *, stages: Stages | None = None) -> Reader:
        """Return a reader of the data sets that ``indexes`` describe.

        The process's code root becomes the recipe's.

        Raises:
            SpecError: The transform cannot be imported.
            DataError: No filesystem knows a data set's URL.
        """
        if self.code_root is not None:
            enter_code_root(self.code_root)
        return Reader(
            indexes,
            columns=self.columns,
            transform=None if self.transform is None else import_object(self.transform),
            seed=self.seed,
            training=self.training,
            invalid=self.invalid,
            pad=self.pad,
            stages=stages,
        )


@dataclass(frozen=True, kw_only=True)
class Order:
    """Some steps of a plan, for all ranks."""

    plan: Plan
    recipe: ReaderRecipe
    start: int
    """The first step."""
    stop: int | None
    """The step to end before. ``None`` never ends."""
    world_size: int
    """All ranks that see different data."""

    def facts(self) -> dict[str, object]:
        """Return what tells it from another order; the same on all ranks."""
        return {
            "start": self.start,
            "stop": self.stop,
            "world_size": self.world_size,
            **self.plan.state(),
        }
