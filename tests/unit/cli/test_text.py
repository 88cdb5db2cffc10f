"""Ages, tables and lines."""

import pytest

from sluice.cli.text import clean, count, duration, table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-3.0, "0s"),
        (0.4, "0s"),
        (119.9, "119s"),
        (120.0, "2m"),
        (192.0, "3m12s"),
        (2520.0, "42m"),
        (18600.0, "5h10m"),
        (86400.0 * 3 + 3600 * 4, "3d4h"),
        (float(86400 * 400), "400d"),
    ],
)
def test_duration_has_two_units_at_most(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_control_characters_of_others_never_reach_the_terminal() -> None:
    assert clean("a\x1b[2J\x07b\r\nc\x9b31m") == "a [2J b c 31m"


def test_half_characters_that_no_output_can_encode_are_left_out() -> None:
    assert clean("a\ud800b").encode() == b"a b"


def test_table_is_aligned_without_trailing_spaces() -> None:
    assert table(["A", "BB"], [["long", ""], ["x", "y"]]) == ["A     BB", "long  -", "x     y"]
    assert table(["A"], []) == []


def test_count_has_the_right_number() -> None:
    assert (count(1, "request"), count(0, "request")) == ("1 request", "0 requests")
