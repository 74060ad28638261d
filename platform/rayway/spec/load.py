"""From a job file, settings files and ``--set`` to one resolved job; to job.json and back."""

import hashlib
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayway.errors import RaywayError, SpecError
from rayway.spec.batch import plan_batch
from rayway.spec.callsite import caller, display
from rayway.spec.code import leave_code_root, user_traceback
from rayway.spec.job import ImportPath, Job
from rayway.spec.jobfile import run_job_file
from rayway.spec.layers import (
    Layer,
    layer_of_job,
    layer_of_overrides,
    layer_of_values,
    layer_of_yaml,
    merge,
)
from rayway.spec.section import Section
from rayway.spec.suggest import nearest
from rayway.spec.yaml12 import read_yaml

JSON_SCHEMA_VERSION = 1
OWN_LOOP = "own_loop"
"""The key in job.json of a run whose loop is a script of the user's."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_LOCAL_FIELDS = ("data", "train"), ("data", "validation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A job, and where everything in it came from."""

    job: Job
    """What is trained."""
    origins: dict[str, str]
    """Dotted field to ``default``, ``jobs/x.py:12``, ``f.yaml:3`` or ``--set``."""
    job_file: Path | None
    """The file the job was loaded from; ``None`` if it was made in a program."""
    code_root: Path
    """Folder of the user's modules; first on ``sys.path`` wherever the job's functions run."""


def load_job(path: Path, *, config: Sequence[Path] = (), overrides: Sequence[str] = ()) -> Resolved:
    """Run a job file and lay settings over its job.

    The file's folder becomes the process's code root (see ``rayway.spec.code``) and stays it. What
    the file prints goes to stderr.

    Args:
        path: A Python file that ends in ``job = Job(...)``.
        config: YAML files that change fields, the later over the earlier.
        overrides: ``optim.lr=0.001`` and the like; they win over everything.

    Raises:
        SpecError: Names file, line and field of what is wrong, and the repair. If the file's own
            code failed, the message ends with the traceback of the user's frames.
    """
    layers = [layer_of_yaml(read_yaml(file), file=display(file)) for file in config]
    layers.append(layer_of_overrides(overrides))
    file = path.parent.resolve() / path.name
    try:
        made, sites, where = run_job_file(file)
        job, origins = _settle([layer_of_job(made, sites, otherwise=where), *layers])
    except BaseException:
        leave_code_root()
        raise
    return Resolved(job=job, origins=origins, job_file=file, code_root=file.parent)


def resolve_job(job: Job, *, overrides: Sequence[str] = ()) -> Resolved:
    """Resolve a job that was made in a program or notebook instead of a job file.

    Its code root is the folder of the program, else the current folder.
    """
    own = layer_of_job(job, {}, otherwise=caller().where())
    resolved, origins = _settle([own, layer_of_overrides(overrides)])
    main = getattr(sys.modules["__main__"], "__file__", None)
    root = Path(main).parent.resolve() if main else Path.cwd()
    return Resolved(job=resolved, origins=origins, job_file=None, code_root=root)


def import_object(path: ImportPath) -> Any:
    """Import what a ``module:name`` path of a job stands for.

    Raises:
        SpecError: There is no such module or name (the nearest are named), or the module's own
            code failed (with the traceback of the user's frames).
    """
    if callable(path):
        return path
    name, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(name)
    except SystemExit as error:
        raise SpecError(
            f"{path}: its module ends the program (SystemExit: {error}). Put what is to run only "
            f'as a script below `if __name__ == "__main__":`.'
        ) from None
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise SpecError(f"{path}: no module {error.name}.{_near_modules(error.name)}") from None
        raise SpecError(f"{path}: its module fails.\n{user_traceback(error)}") from None
    except RaywayError:
        raise
    except Exception as error:  # noqa: BLE001 - it is the user's own, and is shown
        raise SpecError(f"{path}: its module fails.\n{user_traceback(error)}") from None
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            near = nearest(attribute, dir(found))
            hint = f"The nearest: {', '.join(near)}." if near else "Define it there."
            raise SpecError(f"{path}: module {name} has no {attribute}. {hint}")
        found = getattr(found, attribute)
    return found


def check_user_code(resolved: Resolved) -> None:
    """Import each function of the job now, before anything expensive starts.

    Raises:
        SpecError: One cannot be imported or is no function; names its field and origin.
    """
    job = resolved.job
    paths: dict[str, ImportPath | None] = {
        "model.build": job.model.build,
        "loss": job.loss,
        "data.prepare": job.data.prepare,
        "data.transform": job.data.transform,
        "optim.build": job.optim.build,
    }
    for field, path in paths.items():
        if path is None:
            continue
        origin = resolved.origins[field]
        try:
            found = import_object(path)
        except SpecError as error:
            raise SpecError(f"{origin}: {field}={error}") from None
        if not callable(found):
            kind = type(found).__name__
            raise SpecError(f"{origin}: {field}={path} is of type {kind}; it needs a function.")
        if field == "model.build":
            _check_arguments(resolved, found)


def _check_arguments(resolved: Resolved, build: Any) -> None:
    """Refuse arguments that the builder does not take, or lacks."""
    model = resolved.job.model
    try:
        inspect.signature(build).bind(**model.args)
    except TypeError as error:
        takes = ", ".join(inspect.signature(build).parameters) or "nothing"
        raise SpecError(
            f"{resolved.origins['model.build']}: {model.build} cannot be called with model.args: "
            f"{error}. It takes: {takes}."
        ) from None
    except ValueError:  # a builder in C has no signature to look at
        return


def job_to_json(resolved: Resolved) -> str:
    """Return the text of job.json, which ``job_from_json`` makes the same job from."""
    record = {
        "schema": JSON_SCHEMA_VERSION,
        "job": resolved.job.model_dump(mode="json"),
        "origins": resolved.origins,
        "job_file": None if resolved.job_file is None else str(resolved.job_file),
        "code_root": str(resolved.code_root),
    }
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def job_from_json(text: str) -> Resolved:
    """Return what ``job_to_json`` has written.

    Raises:
        SpecError: It is not a job.json, is damaged, was written by a newer rayway, or belongs to
            the own loop of a script.
    """
    try:
        record = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"job.json: is not JSON: {error}.") from None
    version = record.get("schema") if isinstance(record, dict) else None
    if version != JSON_SCHEMA_VERSION:
        raise SpecError(
            f"job.json: has schema {version!r}; this rayway reads {JSON_SCHEMA_VERSION}. "
            "Use the rayway that wrote it."
        )
    if OWN_LOOP in record:
        script = (record[OWN_LOOP] or {}).get("script") or "the program or notebook"
        raise SpecError(
            "this run was made by a script with a loop of its own, and only the script can go on "
            f"with it: start {script} again, it continues at the newest checkpoint."
        )
    values, origins, root = (record.get(key) for key in ("job", "origins", "code_root"))
    if not isinstance(values, dict) or not isinstance(origins, dict) or not isinstance(root, str):
        raise SpecError("job.json: job, origins or code_root is missing. Restore the file.")
    job, _ = merge([layer_of_values(values, where="job.json")])
    file = record.get("job_file")
    return Resolved(
        job=job,
        origins={str(field): str(origin) for field, origin in origins.items()},
        job_file=None if file is None else Path(file),
        code_root=Path(root),
    )


def job_hash(job: Section) -> str:
    """Return the SHA-256, in hex, of the job's values; the same for equal jobs in any process."""
    canonical = json.dumps(
        job.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def _settle(layers: list[Layer]) -> tuple[Job, dict[str, str]]:
    """Merge the layers, and refuse here what only the finished job can show."""
    job, origins = merge(_with_absolute_paths(layer) for layer in layers)
    try:
        plan_batch(job.batch, dp_size=max(job.scale.workers, 1))
    except SpecError as error:
        raise SpecError(
            f"{origins['batch.global_batch']}: {error} "
            f"(scale.workers={job.scale.workers} is from: {origins['scale.workers']})"
        ) from None
    return job, origins


def _with_absolute_paths(layer: Layer) -> Layer:
    """Let relative data paths count from the current folder; workers run in another one."""
    return [
        replace(setting, value=absolute_sources(setting.value))
        if setting.path in _LOCAL_FIELDS
        else setting
        for setting in layer
    ]


def absolute_sources(train: Any) -> Any:
    """Return a place, or the places of a mixture, as absolute; what is neither stays as it is.

    Raises:
        SpecError: A mixture names one place twice.
    """
    if isinstance(train, Mapping):
        places = {absolute_sources(place): weight for place, weight in train.items()}
        if len(places) < len(train):
            raise SpecError(f"data.train names one place twice: {', '.join(map(str, train))}.")
        return places
    return absolute_place(train) if isinstance(train, str) else train


def absolute_place(place: str) -> str:
    """Return a local path as an absolute one; a URL, or no path at all, stays as it is."""
    if not place.strip() or _URL.match(place):
        return place
    return os.path.abspath(os.path.expanduser(place))


def _near_modules(name: str) -> str:
    """Name the modules beside the one that is missing which look like it."""
    package, _, last = name.rpartition(".")
    if package and not hasattr(sys.modules[package], "__path__"):
        return f" {package} is a file, not a folder of modules."
    places = list(sys.modules[package].__path__) if package else sys.path[:1]
    near = nearest(last, (module.name for module in pkgutil.iter_modules(places)))
    full = [f"{package}.{found}" if package else found for found in near]
    return f" The nearest: {', '.join(full)}." if near else f" It is looked for in {places[0]}."


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"duplicate key {key}")
        values[key] = value
    return values
