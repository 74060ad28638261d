import functools
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from rayway.spec.code import enter_code_root, leave_code_root, path_of, user_traceback

Write = Callable[..., Path]


def function() -> None: ...


class Model:
    class Inner: ...

    def __call__(self) -> None: ...


alias = function


def test_a_function_class_or_class_in_a_class_is_its_import_path() -> None:
    assert path_of(function) == f"{__name__}:function"
    assert path_of(alias) == f"{__name__}:function"
    assert path_of(Model.Inner) == f"{__name__}:Model.Inner"
    assert path_of(Path) == "pathlib:Path"


def test_what_workers_cannot_import_is_refused() -> None:
    def inner() -> None: ...

    def replaced() -> None: ...

    replaced.__qualname__ = "function"
    refused: list[tuple[object, str]] = [
        (lambda: 0, "a lambda"),
        (inner, "inside another function"),
        (replaced, "something else"),
        (functools.partial(function), "Define a function that calls it"),
        (Model(), "of type Model"),
        (3, "of type int"),
        (None, "of type NoneType"),
    ]
    for code, words in refused:
        with pytest.raises(ValueError, match=words):
            path_of(code)


@pytest.mark.parametrize("path", ["", ":", "a", "a:", ":b", "a.:b", "a b:c", "a:b:c", "a/b:c"])
def test_text_that_is_no_import_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="module:name"):
        path_of(path)


def test_a_function_of_a_script_is_found_under_the_name_of_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = types.ModuleType("__main__")
    exec("def build(): ...", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(ValueError, match="interactive session"):
        path_of(main.build)
    main.__file__ = "/somewhere/digits.py"
    assert path_of(main.build) == "digits:build"


def test_entering_another_code_root_forgets_the_modules_of_the_last(
    write: Write, folder: Path
) -> None:
    write("one/models_x.py", "WHICH = 1")
    write("two/models_x.py", "WHICH = 2")
    for name, which in (("one", 1), ("two", 2), ("one", 1)):
        enter_code_root(folder / name)
        assert which == importlib.import_module("models_x").WHICH
    leave_code_root()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("models_x")


def test_entering_the_same_code_root_again_keeps_its_modules(write: Write, folder: Path) -> None:
    write("one/models_x/__init__.py", "")
    enter_code_root(folder / "one")
    module = importlib.import_module("models_x")
    enter_code_root(folder / "one")
    assert importlib.import_module("models_x") is module


def test_the_package_of_the_code_root_is_forgotten_with_its_parts(
    write: Write, folder: Path
) -> None:
    write("one/models_x/part.py", "WHICH = 1")
    enter_code_root(folder / "one")
    importlib.import_module("models_x.part")
    leave_code_root()
    assert not [name for name in sys.modules if name.startswith("models_x")]


def test_installed_modules_are_never_forgotten(write: Write, folder: Path) -> None:
    for name in ("pydantic", "json", "rayway", "sys", "time"):
        write(f"one/{name}/part.py", "")
    held = {name: sys.modules[name] for name in ("pydantic", "json", "rayway.spec", "sys", "time")}
    enter_code_root(folder / "one")
    leave_code_root()
    assert {name: sys.modules[name] for name in held} == held


def test_a_traceback_keeps_the_users_frames_and_causes_only(write: Write, folder: Path) -> None:
    write(
        "one/deep_x.py",
        "import json\n"
        "def read():\n"
        "    try:\n"
        "        json.loads('{')\n"
        "    except ValueError as error:\n"
        "        raise RuntimeError('no layers') from error\n",
    )
    enter_code_root(folder / "one")
    with pytest.raises(RuntimeError) as caught:
        importlib.import_module("deep_x").read()
    text = user_traceback(caught.value)
    assert "deep_x.py" in text
    assert "JSONDecodeError" in text
    assert "json/decoder.py" not in text
    assert text.endswith("RuntimeError: no layers")
