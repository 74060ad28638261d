"""Running a job file, and what can be wrong with it before it makes a job."""

import ast
import contextlib
import importlib.util
import sys
from pathlib import Path
from types import CodeType, ModuleType

from rayway.errors import RaywayError, SpecError
from rayway.spec.callsite import Sites, display, recording
from rayway.spec.code import (
    enter_code_root,
    leave_code_root,
    refuse_shadowing,
    user_traceback,
)
from rayway.spec.job import SECTIONS, Job
from rayway.spec.suggest import nearest


def run_job_file(file: Path) -> tuple[Job, Sites, str]:
    """Run a job file as the module of its name, with its folder as the code root.

    What it prints goes to stderr: stdout belongs to the command that loads it.

    Returns:
        The job, where its sections were made, and ``file:line`` of where ``job`` is assigned.

    Raises:
        SpecError: Names file, line and repair. If the file's own code failed, it ends with the
            traceback of the user's frames.
    """
    tree, code = _compiled(file)
    leave_code_root()
    refuse_shadowing(file)
    enter_code_root(file.parent)
    with recording() as sites:
        module = _run(file, code)
    return _job_of(module, file, tree), sites, f"{display(file)}:{_line_of_job(tree)}"


def _compiled(file: Path) -> tuple[ast.Module, CodeType]:
    shown = display(file)
    if file.suffix != ".py":
        raise SpecError(f"{shown}: a job file is a Python file and ends in .py. Rename it.")
    try:
        source = file.read_bytes()
    except OSError as error:
        raise SpecError(f"{shown}: cannot be read: {error.strerror}. Check the path.") from None
    try:
        tree = ast.parse(source, filename=str(file))
        code = compile(tree, str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise SpecError(f"{shown}:{error.lineno or 1}: {error.msg}. Mend the line.") from None
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, absurd nesting
        raise SpecError(f"{shown}: is not Python: {error}. Mend the file.") from None
    _refuse_doubled_keys(tree, shown)
    return tree, code


def _run(file: Path, code: CodeType) -> ModuleType:
    """Execute the file without a cached form of it, under the name workers import it by."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        with contextlib.redirect_stdout(sys.stderr):
            exec(code, module.__dict__)  # noqa: S102  # a job file is a program, that is its point
    except RaywayError:
        raise
    except SystemExit as error:
        raise SpecError(
            f"{display(file)}: ends the program (SystemExit: {error}) instead of making a job. "
            f"Guard that line with if __name__ == '__main__'.\n{user_traceback(error)}"
        ) from None
    except Exception as error:  # noqa: BLE001 - it is the user's own, and is shown
        kind = type(error).__name__
        raise SpecError(
            f"{display(file)}: the job file's own code raised {kind}.\n{user_traceback(error)}"
        ) from None
    return module


def _job_of(module: ModuleType, file: Path, tree: ast.Module) -> Job:
    shown = display(file)
    found = vars(module).get("job")
    if isinstance(found, Job):
        return found
    if "job" in vars(module):
        raise SpecError(
            f"{shown}:{_line_of_job(tree)}: job is of type {type(found).__name__}; it needs a Job. "
            "End the file in job = Job(...)."
        )
    jobs = [name for name, value in vars(module).items() if isinstance(value, Job)]
    if jobs:
        line = _line_of_name(tree, jobs[-1])
        raise SpecError(f"{shown}:{line}: no variable job. Rename {jobs[-1]} to job.")
    near = nearest("job", vars(module), count=1)
    hint = f" The nearest name is {near[0]}." if near else ""
    raise SpecError(f"{shown}: no variable job. End the file in job = Job(...).{hint}")


def _line_of_job(tree: ast.Module) -> int:
    return _line_of_name(tree, "job")


def _line_of_name(tree: ast.Module, name: str) -> int:
    """Return the last line at which a name is assigned or imported; 1 if none is."""
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.alias) and (node.asname or node.name) == name)
    ]
    return max(lines, default=1)


def _refuse_doubled_keys(tree: ast.Module, shown: str) -> None:
    """Refuse ``args={"layers": 1, "layers": 2}``, of which Python silently keeps the last."""
    names = {"Job", *(section.__name__ for section in SECTIONS.values())}
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and _name_of(call.func) in names):
            continue
        for node in ast.walk(call):
            if isinstance(node, ast.Dict):
                _refuse_doubled_keys_of(node, shown)


def _refuse_doubled_keys_of(node: ast.Dict, shown: str) -> None:
    seen: dict[object, int] = {}
    for key in node.keys:
        if not isinstance(key, ast.Constant):
            continue
        if key.value in seen:
            raise SpecError(
                f"{shown}:{key.lineno}: duplicate key {key.value!r}; it stands on line "
                f"{seen[key.value]} already. Keep one."
            )
        seen[key.value] = key.lineno


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
