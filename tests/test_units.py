import pytest

from rayway.units import format_bytes, format_duration


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_234_567, "1.2 MB"),
        (12_345_678, "12 MB"),
        (999_600, "1.0 MB"),
        (5 * 10**9, "5.0 GB"),
        (3 * 10**15, "3000 TB"),
    ],
)
def test_bytes_read_with_a_decimal_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (0.84, "0.8 s"),
        (42.2, "42 s"),
        (59.7, "1 min 00 s"),
        (185.0, "3 min 05 s"),
        (7440.0, "2 h 04 min"),
    ],
)
def test_durations_read_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
