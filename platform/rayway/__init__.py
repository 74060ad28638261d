"""Distributed PyTorch training on Ray: same job, same numbers.

The names a job file needs load in a moment. What needs torch or Ray (``Loss``, ``run``, the parts
for an own loop) is imported when it is first asked for, so that a wrong job file is refused in well
under two seconds: see docs/decisions/0003-lazy-top-level.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rayway.errors import RaywayError
from rayway.spec.job import (
    BatchSpec,
    CheckpointSpec,
    DataSpec,
    EvaluateSpec,
    Job,
    ModelSpec,
    OptimSpec,
    ScaleSpec,
)

if TYPE_CHECKING:
    from rayway.data.pack import pack
    from rayway.launch.fit import RunResult, resume, run
    from rayway.launch.prepare_data import PreparedData, prepare_data
    from rayway.train.loss import Loss
    from rayway.train.own import OwnLoop

_LATER = {
    "Loss": "rayway.train.loss",
    "OwnLoop": "rayway.train.own",
    "PreparedData": "rayway.launch.prepare_data",
    "RunResult": "rayway.launch.fit",
    "pack": "rayway.data.pack",
    "prepare_data": "rayway.launch.prepare_data",
    "resume": "rayway.launch.fit",
    "run": "rayway.launch.fit",
}

__all__ = [
    "BatchSpec",
    "CheckpointSpec",
    "DataSpec",
    "EvaluateSpec",
    "Job",
    "Loss",
    "ModelSpec",
    "OptimSpec",
    "OwnLoop",
    "PreparedData",
    "RaywayError",
    "RunResult",
    "ScaleSpec",
    "pack",
    "prepare_data",
    "resume",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import a public name of the upper floors when it is first used (PEP 562)."""
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'rayway' has no attribute {name!r}")
