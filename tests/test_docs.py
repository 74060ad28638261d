import importlib.util
import re
from pathlib import Path

import pytest

from rayway import errors
from rayway.checkpoint.manifest import file_name
from rayway.errors import RaywayError
from rayway.spec.job import SECTIONS
from rayway.spec.section import all_fields
from rayway.storage import runs
from rayway.storage.runs import (
    attempt_key,
    checkpoint_folder,
    checkpoint_of,
    error_key,
    events_key,
    output_key,
)
from rayway.telemetry.alive import BEAT_S, SILENCE_S

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "cluster" / "README.md"]
PAGES += sorted(DOCS.rglob("*.md"))
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def tree_paths(page: str) -> set[str]:
    """Return the paths in a drawn tree, without its root."""
    (tree,) = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    paths: set[str] = set()
    folders: list[str] = []
    for line in tree.splitlines()[1:]:
        drawn, name = re.fullmatch(r"([│├└─ ]+)(\S+)", line).groups()  # type: ignore[union-attr]
        depth = len(drawn) // 4 - 1
        folders = [*folders[:depth], name.rstrip("/")]
        if not name.endswith("/"):
            paths.add("/".join(folders))
    return paths


def test_the_page_of_the_job_is_what_the_spec_says() -> None:
    path = DOCS / "make_job_reference.py"
    spec = importlib.util.spec_from_file_location("make_job_reference", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.render()
    assert script.PAGE.read_text(encoding="utf-8") == page, f"run: python {shown(path)}"
    assert page.count("\n| `") == len(all_fields()) - len(SECTIONS)
    assert not re.search(r"\|\s*\|$", page, re.MULTILINE)  # each field has its sentence


def test_every_exit_code_and_error_class_is_on_the_page() -> None:
    page = (DOCS / "reference" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*?\| ([^|]*) \| [^|]* \|$", page, re.MULTILINE)
    found = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    kinds = [each for each in classes if issubclass(each, RaywayError) and each is not RaywayError]
    assert found == {each.__name__: each.exit_code for each in kinds}


def test_the_page_of_the_run_folder_draws_the_keys_that_the_code_spells() -> None:
    page = (DOCS / "reference" / "run-folder.md").read_text()
    (folder,) = set(re.findall(r"step-\d+\.attempt-\d+", page))
    assert checkpoint_folder(*(checkpoint_of(folder) or (0, 0))) == folder
    inside = [
        *(file_name(0, stem, 0) for stem in ("model", "optimizer")),
        runs.MANIFEST_KEY,
        runs.MARKER_KEY,
    ]
    assert tree_paths(page) == {
        runs.RUN_KEY,
        runs.JOB_KEY,
        runs.DATA_KEY,
        *(runs.index_key(name) for name in ("train-0", "validation")),
        runs.STOP_KEY,
        runs.NEWEST_KEY,
        *(attempt_key(1, name) for name in ("attempt.json", "alive.json", "end.json")),
        *(key(1, 0) for key in (events_key, error_key)),
        *(output_key(1, 0, stream) for stream in ("out", "err")),
        *(f"{runs.CHECKPOINTS}/{folder}/{name}" for name in inside),
    }
    table = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    described = {name for cell in table for name in re.findall(r"`([^`]+)`", cell)}
    for path in tree_paths(page):
        assert path.removeprefix("attempts/001/") in described or Path(path).name in described
    assert f"Schema {runs.SCHEMA}." in page
    assert f"every {BEAT_S:g} s" in page
    assert f"after {SILENCE_S:g} s of silence" in page


@pytest.mark.parametrize("page", DECISIONS, ids=shown)
def test_a_decision_has_its_context_its_decision_and_its_cost(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Cost"]
    assert text.startswith(f"# {page.name[:4]}: ")
    assert len(text.splitlines()) <= 80
    index = (DOCS / "decisions" / "README.md").read_text()
    assert f"[{page.name[:4]}]({page.name})" in index


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = [int(page.name[:4]) for page in DECISIONS]
    assert numbers == list(range(1, len(DECISIONS) + 1))


def test_a_decision_named_in_the_code_exists() -> None:
    names = {page.stem for page in DECISIONS}
    for file in (ROOT / "platform").rglob("*.py"):
        for cited in re.findall(r"docs/decisions/([\w-]*)", file.read_text()):
            assert any(name.startswith(cited) for name in names), f"{shown(file)}: {cited}"


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_link_to_a_file_or_a_heading_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there.read_text()), target


def test_the_licence_is_the_one_that_the_package_names() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text.splitlines()[1]
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
