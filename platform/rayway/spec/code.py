"""The user's code: its folder on ``sys.path``, its functions as ``module:name``, its tracebacks.

A process has one folder of user code at a time, the job file's (the *code root*). Entering another
one forgets the modules of the last, so that a file that was changed is not seen in its old form.
"""

import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary, TracebackException
from types import ModuleType

from rayway.errors import SpecError
from rayway.spec.callsite import display


class _CodeRoot(str):
    """The entry of ``sys.path`` that we put there, to be told from the same text by others."""

    __slots__ = ()


def enter_code_root(root: Path) -> None:
    """Make ``root`` the one folder of user code: first on ``sys.path``, with fresh modules.

    Does nothing if it is that already, so that a driver that is also its own worker keeps its
    modules. Modules of the standard library and installed packages are never forgotten.
    """
    entry = str(root.resolve())
    if sys.path and isinstance(sys.path[0], _CodeRoot) and sys.path[0] == entry:
        return
    leave_code_root()
    sys.path.insert(0, _CodeRoot(entry))
    _forget_modules(Path(entry))
    importlib.invalidate_caches()


def leave_code_root() -> None:
    """Undo ``enter_code_root``: off ``sys.path``, and its modules forgotten."""
    left = [entry for entry in sys.path if isinstance(entry, _CodeRoot)]
    sys.path[:] = [entry for entry in sys.path if not isinstance(entry, _CodeRoot)]
    for entry in left:
        _forget_modules(Path(entry))


def refuse_shadowing(job_file: Path) -> None:
    """Refuse a job file whose name is that of another module: workers would import the wrong one.

    Raises:
        SpecError: The name belongs to the standard library or to an installed package.
    """
    name = job_file.stem
    if name in sys.stdlib_module_names or name in {"__main__", "__init__"}:
        raise SpecError(
            f"{display(job_file)}: a job file cannot be called {name}.py, Python has a module "
            f"{name} of its own. Rename it, e.g. to {name.strip('_')}_job.py."
        )
    other = _installed(name)
    if other and not Path(other).resolve() == job_file.resolve():
        raise SpecError(
            f"{display(job_file)}: a job file cannot be called {name}.py, that is the name of an "
            f"installed package ({other}). Rename it, e.g. to {name}_job.py."
        )


def path_of(code: object) -> str:
    """Return a user's function as ``module:name``, from which any process can import it.

    Args:
        code: A function or class at the top level of an importable file, or such a path.

    Raises:
        ValueError: It is neither, or no other process could import it. The text fits behind
            ``field=value:``.
    """
    if isinstance(code, str):
        if not _is_path(code):
            raise ValueError(
                "is not of the form module:name. Write e.g. 'models.digits:build' for the function "
                "build in models/digits.py next to the job file."
            )
        return code
    name, module = getattr(code, "__qualname__", None), getattr(code, "__module__", None)
    if not callable(code) or not isinstance(name, str) or not isinstance(module, str):
        raise ValueError(
            f"is of type {type(code).__name__}; it needs a function or 'module:name'."
            + (" Define a function that calls it." if callable(code) else "")
        )
    if "<" in name:
        kind = "a lambda" if name.endswith("<lambda>") else "defined inside another function"
        raise ValueError(
            f"is {kind}, where workers cannot import it. Define it at the top level of a file."
        )
    if _look_up(sys.modules.get(module), name) is not code:
        raise ValueError(
            f"is not what the name {name} in module {module} stands for, so workers would import "
            "something else. Define it at the top level of a file, under one name."
        )
    path = f"{_importable(module)}:{name}"
    if not _is_path(path):
        raise ValueError(
            f"is in {module}.py, whose name no import statement can spell. Rename the file, with "
            "letters, digits and _ only."
        )
    return path


def user_traceback(error: BaseException) -> str:
    """Format an exception with the frames of the user's own files only, causes included."""
    shown = TracebackException.from_exception(error)
    for part in _chain(shown):
        part.stack = StackSummary.from_list([f for f in part.stack if _is_user_file(f.filename)])
    return "".join(shown.format()).rstrip()


def _chain(first: TracebackException | None) -> Iterator[TracebackException]:
    if first is not None:
        yield first
        yield from _chain(first.__cause__)
        yield from _chain(first.__context__)


def _forget_modules(root: Path) -> None:
    """Drop what was imported under a name that ``root`` provides, unless it is installed."""
    if not root.is_dir():
        return
    names = {path.stem for path in root.iterdir() if path.suffix == ".py" or path.is_dir()}
    gone = {name for name in names & sys.modules.keys() if _is_user_module(sys.modules[name])}
    for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
        del sys.modules[name]


def _is_user_module(module: ModuleType) -> bool:
    if module.__name__ == "__main__":
        return False
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(_is_user_file(place) for place in places if place)


def _is_user_file(file: str) -> bool:
    return not file.startswith("<") and not any(
        Path(file).is_relative_to(folder) for folder in _INSTALLED
    )


_PACKAGE = Path(__file__).resolve().parent.parent
_INSTALLED = [
    _PACKAGE,
    *(Path(sysconfig.get_path(k)) for k in ("stdlib", "platstdlib", "purelib", "platlib")),
]


def _installed(name: str) -> str | None:
    """Return the file of an installed module, or of a package anywhere, that ``name`` imports."""
    if name in sys.modules and sys.modules[name].__spec__ is None:
        return None
    spec = importlib.util.find_spec(name) if "." not in name else None
    if spec is None or spec.origin is None:
        return None  # nothing, or a mere folder, which any file of that name goes before
    is_package = spec.submodule_search_locations is not None
    return spec.origin if is_package or not _is_user_file(spec.origin) else None


def _importable(module: str) -> str:
    """Return the name by which another process imports a module; ``__main__`` has none itself."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None:
        raise ValueError(
            "is defined in an interactive session, where workers cannot import it. Put it in a "
            "file and import it from there."
        )
    spec = main.__spec__
    return spec.name if spec else Path(file).stem


def _look_up(start: object, dotted: str) -> object:
    found = start
    for name in dotted.split("."):
        found = getattr(found, name, None)
    return found


def _is_path(text: str) -> bool:
    module, colon, name = text.partition(":")
    words = [*module.split("."), *name.split(".")]
    return bool(colon) and all(word.isidentifier() for word in words)
