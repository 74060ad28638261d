from pathlib import Path

import pytest

from rayway.spec.callsite import Site, caller, display, record, recording


def test_the_site_is_the_whole_call() -> None:
    site = caller()
    assert Path(site.file) == Path(__file__)
    first, last, left, right = site.span
    assert (last - first, right - left) == (0, len("caller()"))


SOURCE = """\
made = make(
    a=1,
    b=[
        2,
        3,
    ],
    c={
        "d": 4,
    },
    e=make(
        f=5,
    ),
    g=other,
)
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ([], 1),
        (["a"], 2),
        (["b"], 3),
        (["b", 1], 5),
        (["b", 7], 3),
        (["c", "d"], 8),
        (["c", "x"], 7),
        (["e", "f"], 11),
        (["g", "h"], 13),
        (["nothing"], 1),
    ],
)
def test_the_line_of_a_field_is_where_its_value_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: list[str | int], line: int
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "made.py"
    file.write_text(SOURCE)
    site = Site(file=str(file), span=(1, 14, 7, 1))
    assert site.where(path) == f"made.py:{line}"


def test_fields_in_a_dict_that_a_call_takes_are_found(tmp_path: Path) -> None:
    file = tmp_path / "made.py"
    file.write_text("made = make({\n'a': 1,\n})\n")
    assert Site(file=str(file), span=(1, 3, 7, 2)).where(["a"]) == f"{file}:2"


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "made.py"
    site = Site(file=str(file), span=(1, 2, 0, 4))
    file.write_text("make(\na=1)")
    assert site.where(["a"]) == f"{file}:2"
    file.write_text("make(a=1,\nb=1)")
    assert site.where(["a"]) == f"{file}:1"


@pytest.mark.parametrize("text", [None, "not python ("])
def test_without_a_readable_file_the_line_is_that_of_the_call(
    tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "made.py"
    if text:
        file.write_text(text)
    assert Site(file=str(file), span=(7, 9, 0, 1)).where(["a"]) == f"{file}:7"


def test_sites_are_kept_only_while_somebody_records() -> None:
    before, during, after = object(), object(), object()
    site = caller()
    record(before, site)
    with recording() as sites:
        record(during, site)
    record(after, site)
    assert sites == {id(during): (during, site)}


def test_a_path_outside_the_current_folder_is_shown_whole(folder: Path) -> None:
    assert display(folder / "a" / "b.py") == "a/b.py"
    assert display("/somewhere/else.py") == "/somewhere/else.py"
