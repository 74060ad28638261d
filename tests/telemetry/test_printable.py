"""Text from outside cannot move the cursor, forge a line or break the encoding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.telemetry.printable import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("accuracy 97 % – naïve 日本", "accuracy 97 % – naïve 日本"),
        ("a\nb", "a\\nb"),
        ("\x1b[2J", "\\x1b[2J"),
        ("right\u202eleft", "right\\u202eleft"),
        ("half \ud800", "half \\ud800"),
        ("a\u2028b", "a\\u2028b"),
        ("1\u00a0000", "1\u00a0000"),
    ],
)
def test_control_characters_are_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters()))
def test_anything_becomes_one_line_that_can_be_encoded(text: str) -> None:
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    shown.encode("utf-8")


def test_a_traceback_keeps_its_lines() -> None:
    assert printable_lines("File x\r\n\tline \x07\n") == "File x\n    line \\x07\n"
