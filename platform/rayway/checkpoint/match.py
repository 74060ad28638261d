"""Whether loaded tensors are the ones a model needs, told before anything is changed."""

from collections.abc import Mapping

from torch import Tensor

from rayway.errors import CheckpointError

_SHOWN = 5


def check_match(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], *, what: str) -> None:
    """Refuse a set of tensors that is not exactly the expected one, in both directions.

    Args:
        expected: The tensors to be filled, by name; only shapes and types are looked at.
        found: The tensors from the checkpoint.
        what: What they belong to, for the message, e.g. ``"model"``.

    Raises:
        CheckpointError: Names are missing or unexpected, or shapes or types differ; the message
            has the first five of each and their number.
    """
    both = sorted(expected.keys() & found.keys())
    problems = {
        "missing in the checkpoint": sorted(expected.keys() - found.keys()),
        "unknown to the job": sorted(found.keys() - expected.keys()),
        "of another shape (checkpoint, job)": [
            f"{name} {tuple(found[name].shape)}, {tuple(expected[name].shape)}"
            for name in both
            if found[name].shape != expected[name].shape
        ],
        "of another type (checkpoint, job)": [
            f"{name} {found[name].dtype}, {expected[name].dtype}"
            for name in both
            if found[name].dtype != expected[name].dtype
        ],
    }
    told = [f"{len(names)} {kind}: {_first(names)}" for kind, names in problems.items() if names]
    if told:
        raise CheckpointError(
            f"the checkpoint's {what} does not fit the job's. {'. '.join(told)}. "
            "Resume with the job that saved it."
        )


def _first(names: list[str]) -> str:
    more = "" if len(names) <= _SHOWN else ", …"
    return "; ".join(names[:_SHOWN]) + more
