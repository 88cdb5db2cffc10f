"""The one exception of the bed."""

from __future__ import annotations


class BedError(Exception):
    """The bed can't do what was asked; the message says what is wrong and what to do."""
