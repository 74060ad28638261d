import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rayway.cli.main import rayway

ROOT = Path(__file__).parents[1]


def run_python(code: str) -> str:
    """Run code in a fresh interpreter in the repository's root, which is then on its path."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commands_in(page: str) -> list[list[str]]:
    """Return the words of each command in the page's shell blocks; output has no prompt."""
    blocks = re.findall(r"^```(?:console|sh|bash)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def commands_of(program: str) -> list[list[str]]:
    commands = commands_in((ROOT / "README.md").read_text())
    return [words[1:] for words in commands if words and Path(words[0]).name == program]


def without_strangers(words: list[str]) -> list[str]:
    """Cut a command at what belongs to the shell."""
    ends = [i for i, word in enumerate(words) if word in {"|", ">", "2>", "&", "&&", ";"}]
    return words[: min(ends, default=len(words))]


def make_targets() -> set[str]:
    rules = re.findall(r"^([a-z][a-z-]*(?: [a-z-]+)*):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    return {name for rule in rules for name in rule.split()}


def files_of_the_repository() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return (path for path in paths if path.is_file())


def test_platform_is_no_package_so_that_the_standard_library_keeps_the_name() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_torch_and_ray_can_be_imported_from_the_root() -> None:
    code = """
import platform, sysconfig
import ray, torch
assert platform.__file__.startswith(sysconfig.get_path("stdlib")), platform.__file__
print(platform.system())
"""
    assert run_python(code) in {"Linux", "Darwin", "Windows"}


@pytest.mark.parametrize("room", ["spec", "storage", "telemetry", "report"])
def test_a_room_that_must_load_fast_loads_neither_torch_nor_ray(room: str) -> None:
    code = f"""
import importlib, pkgutil, sys
import rayway
package = importlib.import_module("rayway.{room}")
modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
for name in modules:
    importlib.import_module("rayway.{room}." + name)
print(len(modules), *(heavy for heavy in ("torch", "ray") if heavy in sys.modules))
"""
    count, *heavy = run_python(code).split()
    assert int(count) >= 3
    assert heavy == []


def test_the_command_line_loads_neither_torch_nor_ray() -> None:
    code = """
import sys
import rayway.cli.main
print(*(heavy for heavy in ("torch", "ray") if heavy in sys.modules))
"""
    assert run_python(code) == ""


def test_the_readme_shows_commands_that_exist_with_options_that_exist() -> None:
    shown = [without_strangers(words) for words in commands_of("rayway")]
    assert {words[0] for words in shown} >= set(rayway.commands)  # none is left out
    for verb, *words in shown:
        command = rayway.commands[verb]
        # parses and checks the words, and calls nothing
        command.make_context(verb, list(words), parent=click.Context(rayway))


def test_the_readme_shows_job_files_that_exist() -> None:
    files = [word for words in commands_of("rayway") for word in words if word.endswith(".py")]
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_readme_shows_make_targets_that_exist_and_the_main_two_first() -> None:
    shown = [words[0] for words in commands_of("make")]
    assert shown[:2] == ["run", "test"]
    assert set(shown) <= make_targets()


def test_a_command_that_does_not_exist_is_seen() -> None:
    page = "```console\n$ rayway fly\nout\n$ make tea  # hot\n```\n"
    assert commands_in(page) == [["rayway", "fly"], ["make", "tea"]]
    assert "fly" not in rayway.commands
    assert "tea" not in make_targets()
    with pytest.raises(click.UsageError, match="--wings"):
        rayway.commands["runs"].make_context("runs", ["--wings"])


# an unpacked archive has files of its user too, and no list of ours
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says which files are ours")
def test_no_file_names_a_path_of_one_machine() -> None:
    places = "work|root|home|Users"
    path = re.compile(rf"(?<![\w.~/-])/(?:{places})/[\w.-]+")
    allowed = {"/home/me", "/home/somebody", "/home/a"}  # made up, in tests and docstrings
    found = [
        f"{file.relative_to(ROOT)}: {hit}"
        for file in files_of_the_repository()
        for hit in path.findall(file.read_text(encoding="utf-8", errors="ignore"))
        if hit not in allowed
    ]
    assert found == []
