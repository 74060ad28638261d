import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.errors import SpecError
from rayway.spec.yaml12 import parse_yaml, plain, read_yaml

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii", exclude_categories=["C"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values)
def test_json_is_read_as_json_reads_it(value: object) -> None:
    assert plain(parse_yaml(json.dumps(value), source="x")) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("6.", 6.0),
        ("-.5", -0.5),
        ("010", 10),
        ("0o17", 15),
        ("0xff", 255),
        ("-7", -7),
        ("1_000", "1_000"),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("True", True),
        ("false", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("''", ""),
        ("2001-01-01", "2001-01-01"),
        ("12:30", "12:30"),
        ("s3://a/b", "s3://a/b"),
        ("models.x:build", "models.x:build"),
        ("-.inf", float("-inf")),
        ("e5", "e5"),
        (".", "."),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = plain(parse_yaml(text, source="x"))
    assert found == value
    assert type(found) is type(value)


@given(st.text(max_size=60))
def test_any_text_is_either_read_or_refused_plainly(text: str) -> None:
    try:
        plain(parse_yaml(text, source="x"))
    except SpecError as error:
        assert str(error).startswith("x:")  # noqa: PT017 - both outcomes are right


def test_each_value_knows_its_line(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("# a comment\na: 1\nb:\n  c: 2\n")
    values = read_yaml(file)
    assert (values["a"].line, values["b"].line) == (2, 3)
    inner = values["b"].value
    assert isinstance(inner, dict)
    assert inner["c"].line == 4


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("# nothing yet\n")
    assert read_yaml(file) == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a: 1\n" * 60_000, "more than 262144 bytes"),
        (b"a: [1, 2", "not YAML"),
        (b"a: \x07", "not YAML"),
        (b"[" * 5000, "nested more than 32 deep"),
        (b"? [a]\n: 1\n", "not a field's name"),
        (b"1: 2\n", "key 1 is not a field's name"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "f.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError, match=words):
        read_yaml(file)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(b"\xef\xbb\xbfseed: 1\n")
    assert list(read_yaml(file)) == ["seed"]
