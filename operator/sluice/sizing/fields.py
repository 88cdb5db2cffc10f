"""Typed reading of a model's config, whose keys and values nobody has checked."""

from collections.abc import Mapping
from typing import Any, Final

MAX_SIZE: Final = 10_000_000
"""Largest believable dimension; more is a broken file."""

Config = Mapping[str, Any]


class FactsError(ValueError):
    """Facts that can't be used; the text names the field, what is wrong and what was found."""


class Fields:
    """Typed reading of a config whose values nobody has checked."""

    def __init__(self, raw: Config, prefix: str = "") -> None:
        self._raw = raw
        self._prefix = prefix

    def names(self) -> list[str]:
        return [k for k in self._raw if isinstance(k, str) and self._raw[k] is not None]

    def has(self, *names: str) -> bool:
        return any(self._raw.get(name) is not None for name in names)

    def whole(self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """The first of the names that is there.

        Raises:
            FactsError: none is there and there is no default, or the value is no whole number of the range.
        """
        name = next((n for n in names if self._raw.get(n) is not None), None)
        if name is None:
            if default is None:
                raise FactsError(f"config.json: {self._prefix}{names[0]} is missing; it is needed to size the model")
            return default
        value = self._raw[name]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise FactsError(
                f"config.json: {self._prefix}{name}: expected a whole number from {least} to {most}, "
                f"found {shown(value)}"
            )
        return value

    def maybe(self, *names: str) -> int | None:
        """The first of the names that has a usable positive whole number; None for anything else."""
        for name in names:
            value = self._raw.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1_000_000_000:
                return value
        return None

    def flag(self, name: str, default: bool) -> bool:
        value = self._raw.get(name)
        return value if isinstance(value, bool) else default

    def mapping(self, name: str) -> Config:
        value = self._raw.get(name)
        return value if isinstance(value, Mapping) else {}

    def numbers(self, name: str) -> list[int]:
        value = self._raw.get(name)
        return [v for v in value if isinstance(v, int) and not isinstance(v, bool)] if isinstance(value, list) else []

    def texts(self, name: str) -> list[str]:
        value = self._raw.get(name)
        return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def printable(text: str) -> str:
    """The text of somebody's config as it may stand in messages and documents.

    What drives a terminal (escape sequences, line breaks, writing directions) and what has no encoding (half of a
    surrogate pair) becomes `?`.
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def shown(value: object) -> str:
    return repr(value)[:60]
