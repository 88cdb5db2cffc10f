"""Reads the few samples we need out of an engine's Prometheus page (text format 0.0.4).

An engine's page is 50-200 kB and is read each second, so only lines that start with a wanted name are parsed.
A value that is not a finite number, or a line that can't be parsed, is unknown, never zero: it makes its whole signal
unknown, because a sum over all engine cores but one is too small, and a drain would believe it.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from sluice.api.agent import MetricSource, Signal

PROCESS_START = "process_start_time_seconds"

_SAMPLE = re.compile(
    r"""(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
        (?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?
        [ \t]+(?P<value>[^ \t]+)(?:[ \t]+-?[0-9]+)?[ \t]*""",
    re.VERBOSE,
)
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPE = re.compile(r"\\(.)")

Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float | None]]]
"""Sample name to its (labels, value) pairs; every value is finite, None: unreadable."""


def read_samples(page: str, wanted: Iterable[str]) -> Samples:
    """The wanted samples of a page; names that are not on it are absent. A line without readable labels has none."""
    names = set(wanted)
    found: dict[str, list[tuple[Mapping[str, str], float | None]]] = {}
    for line in page.split("\n"):  # not splitlines: a label may hold other line ends
        name = re.split(r"[{ \t]", line, maxsplit=1)[0]
        if name not in names:
            continue
        match = _SAMPLE.fullmatch(line)
        sample = ({}, None) if match is None else (_labels(match["labels"] or ""), _number(match["value"]))
        found.setdefault(name, []).append(sample)
    return found


def read_signals(samples: Samples, sources: Mapping[Signal, Sequence[MetricSource]]) -> dict[Signal, float]:
    """The signals that can be read; for each the first of its sources that is present wins, readable or not."""
    signals = {}
    for signal, candidates in sources.items():
        for source in candidates:
            cores = _cores(samples.get(source.name, ()), source)
            if cores:
                known = [value for value in cores if value is not None]
                if len(known) == len(cores):
                    signals[signal] = sum(known) / (len(known) if source.reduce == "mean" else 1)
                break
    return signals


def _cores(samples: Sequence[tuple[Mapping[str, str], float | None]], source: MetricSource) -> list[float | None]:
    """One value per engine core, None where it is unreadable; [] if the source is not on the page."""
    cores: dict[object, float | None] = {}
    for number, (labels, value) in enumerate(samples):
        if not source.labels.items() <= labels.items():
            continue
        core = labels.get(source.per, "") if source.per else number
        before = cores.get(core, value)
        cores[core] = None if value is None or before is None else max(value, before)
    return list(cores.values())


def wanted_names(sources: Mapping[Signal, Sequence[MetricSource]]) -> set[str]:
    return {PROCESS_START, *(source.name for candidates in sources.values() for source in candidates)}


def read_process_start(samples: Samples) -> float | None:
    """Start time of the engine's process as it publishes it, seconds since the epoch; None if it does not."""
    values = [value for _, value in samples.get(PROCESS_START, ()) if value is not None]
    return values[0] if values else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _labels(text: str) -> dict[str, str]:
    return {key: _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], raw) for key, raw in _LABEL.findall(text)}
