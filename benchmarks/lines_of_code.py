"""Claim: the job file of rayway is a fraction of the code that does the same without it.

Run it with ``python benchmarks/lines_of_code.py``; it takes a moment.
"""

import ast
from pathlib import Path

from measure import report

REPOSITORY = Path(__file__).parent.parent
FILES = {
    "rayway": "jobs/digits.py",
    "ray_train": "benchmarks/counterparts/ray_train_digits.py",
    "bare": "benchmarks/counterparts/bare_digits.py",
}
SHARED = ("jobs/models/resnet.py", "jobs/sources/digits.py")
METHOD = """\
Lines with code of their own, in what a user writes to train the digits job with evaluation, \
metrics of each step, checkpoints and resume. Not counted: blank lines, comments, docstrings, \
imports. All three import the same model, loss and data preparation, which are counted as shared. \
rayway also verifies checkpoints, resumes on another number of workers with the same samples, \
answers signals and shows progress; the counterparts do not."""


def code_lines(source: str) -> int:
    """Return the number of lines that hold code other than imports and docstrings.

    A statement counts with every line that it covers, except for comments and blank lines.
    """
    counted: set[int] = set()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            into = left_out if _is_import(node) or _is_docstring(node) else counted
            into.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = source.splitlines()
    return sum(
        bool(lines[number - 1].strip()) and not lines[number - 1].strip().startswith("#")
        for number in counted - left_out
    )


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def main() -> None:
    """Count and print the result."""
    lines = {name: code_lines((REPOSITORY / file).read_text()) for name, file in FILES.items()}
    report(
        "lines_of_code",
        method=METHOD,
        packages=[],
        lines=lines,
        rayway_over_ray_train=round(lines["rayway"] / lines["ray_train"], 3),
        rayway_over_bare=round(lines["rayway"] / lines["bare"], 3),
        shared_lines={file: code_lines((REPOSITORY / file).read_text()) for file in SHARED},
    )


if __name__ == "__main__":
    main()
