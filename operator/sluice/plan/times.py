"""Times as Kubernetes writes them (RFC 3339, UTC) and as plans use them (seconds since the epoch).

No clock is read here: `now` is always a parameter.
"""

from datetime import UTC, datetime
from typing import Any


def parse_time(value: Any) -> float | None:
    """Seconds since the epoch; None for anything that is not an RFC 3339 time (missing is not 1970)."""
    if not isinstance(value, str) or not value:
        return None
    try:
        parsed = datetime.fromisoformat(value)
    except ValueError:
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def format_time(seconds: float) -> str:
    """As `metav1.Time` is written: whole seconds, `Z`."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_moment(seconds: float) -> str:
    """As `metav1.MicroTime` is written: for our own annotations, where half a second matters."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
