"""How things are written: ages, tables, clean lines. Pure.

What is printed comes from other people's objects (events, termination messages), so every line is cleaned of control
characters: a container's last words must not drive the reader's terminal.
"""

import re
from collections.abc import Sequence
from typing import Final

UNKNOWN: Final = "-"
"""Shown for what is not known; never a zero."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]+")


def clean(text: str) -> str:
    """The text on one line, without control characters and halves of characters (which no terminal's encoding has)."""
    return " ".join(_CONTROL.sub(" ", text).split())


def duration(seconds: float | None) -> str:
    """`47s`, `3m12s`, `42m`, `5h10m`, `3d4h`; at most two units, as kubectl writes ages."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 10:
        return _two(minutes, "m", whole % 60, "s")
    if hours < 3:
        return f"{minutes}m"
    if days < 2:
        return _two(hours, "h", minutes % 60, "m")
    return _two(days, "d", hours % 24, "h")


def _two(big: int, big_unit: str, small: int, small_unit: str) -> str:
    return f"{big}{big_unit}{small}{small_unit}" if small else f"{big}{big_unit}"


def number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def count(amount: int, noun: str) -> str:
    """`1 request`, `3 requests`."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines with a head; the last column is never padded. No rows: no lines."""
    if not rows:
        return []
    cells = [list(head), *([clean(cell) or UNKNOWN for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def sentence(text: str) -> str:
    """Starts with a capital letter unless it starts with a name or field, ends with a full stop."""
    said = clean(text)
    return said if not said or said[-1] in ".!?:" else said + "."


def section(title: str, lines: Sequence[str]) -> list[str]:
    """The lines indented under a title, cleaned, with their own indentation kept. No lines: no title."""
    return [f"{title}:", *(f"  {' ' * (len(line) - len(line.lstrip(' ')))}{clean(line)}" for line in lines)] * bool(
        lines
    )
