"""Faults that are set, and which of them are armed now. Pure: time and randomness come in as arguments.

Invariant: setting the same fault again from the same source does not re-arm it.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sluice_sim.fault_catalog import Fault, Scope


class Source(StrEnum):
    ENV = "env"
    FILE = "file"
    PUT = "put"


@dataclass(slots=True)
class Armable:
    """A fault that was set, and how far it is."""

    fault: Fault
    source: Source
    set_at: float
    requests_at_set: int
    armed_at: float | None = None
    """Null: not armed yet."""
    applies: bool = True
    """The draw of `probability` of a state or event, made when it arms."""
    hits: int = 0
    """Requests hit; 1 for a state or event that happened."""

    def is_active(self, now: float) -> bool:
        """The state holds now (it may end by itself after `seconds`, where that is a duration)."""
        if self.armed_at is None or not self.applies:
            return False
        ends_at = self.ends_at
        return ends_at is None or now < ends_at

    @property
    def ends_at(self) -> float | None:
        """When an armed state ends by itself; null: never."""
        for name, param in self.fault.spec.params.items():
            if param.is_duration and self.armed_at is not None and self.fault.args[name] is not None:
                return self.armed_at + float(self.fault.args[name])
        return None

    def to_json(self, now: float) -> dict[str, Any]:
        fault = self.fault
        when = {fault.when: fault.after} if fault.when.startswith("after") else fault.when
        return {
            "name": fault.name,
            "args": {key: value for key, value in fault.args.items() if value is not None},
            "when": when,
            "count": fault.count,
            "probability": fault.probability,
            "source": self.source,
            "armed": self.armed_at is not None,
            "active": self.is_active(now) if fault.spec.scope is Scope.STATE else None,
            "hits": self.hits,
        }


class FaultBook:
    """All faults that are set. `now` is seconds of the steady clock in every method."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._set: list[Armable] = []
        self._requests = 0
        self._sigterm = False

    def replace(self, source: Source, faults: Iterable[Fault], now: float) -> None:
        """Make `faults` the whole set of this source; one that was set already keeps its state."""
        kept = [entry for entry in self._set if entry.source is not source]
        old = [entry for entry in self._set if entry.source is source]
        for fault in faults:
            same = next((entry for entry in old if entry.fault == fault), None)
            if same is not None:
                old.remove(same)
            kept.append(same or Armable(fault, source, now, self._requests))
        self._set = kept
        self._arm(now)

    def remove(self, name: str | None = None) -> int:
        """Remove faults of this name, or all; how many. What has happened already stays."""
        before = len(self._set)
        self._set = [entry for entry in self._set if name is not None and entry.fault.name != name]
        return before - len(self._set)

    def request_arrived(self, now: float) -> None:
        """Count one inference request."""
        self._requests += 1
        self._arm(now)

    def sigterm_arrived(self, now: float) -> None:
        self._sigterm = True
        self._arm(now)

    def take(self, name: str, now: float, path: str | None = None) -> Mapping[str, Any] | None:
        """Arguments of a request fault that hits this request (counted as a hit), or None."""
        self._arm(now)
        for entry in self._set:
            if entry.fault.name != name or entry.armed_at is None:
                continue
            if path is not None and not _is_for(entry.fault, path):
                continue
            if entry.fault.count is not None and entry.hits >= entry.fault.count:
                continue
            if entry.fault.when == "afterRequests" and self._requests - entry.requests_at_set <= entry.fault.after:
                continue  # the request that armed it passes unharmed
            if self._rng.random() < entry.fault.probability:
                entry.hits += 1
                return entry.fault.args
        return None

    def state(self, name: str, now: float) -> Mapping[str, Any] | None:
        """Arguments of a state that holds now, or None."""
        return next(iter(self.states(name, now)), None)

    def states(self, name: str, now: float) -> list[Mapping[str, Any]]:
        """Arguments of all states of this name that hold now."""
        self._arm(now)
        return [entry.fault.args for entry in self._set if entry.fault.name == name and entry.is_active(now)]

    def due_events(self, now: float) -> list[Fault]:
        """Events that happen now; each is returned once."""
        self._arm(now)
        due = []
        for entry in self._set:
            is_due = entry.fault.spec.scope is Scope.EVENT and entry.armed_at is not None and entry.hits == 0
            if is_due and entry.applies:
                entry.hits = 1
                due.append(entry.fault)
        return due

    def next_change(self, now: float) -> float | None:
        """When time alone changes something, later than `now`; null: never."""
        times = []
        for entry in self._set:
            if entry.armed_at is None and entry.fault.when == "afterSeconds":
                times.append(entry.set_at + entry.fault.after)
            elif entry.ends_at is not None:
                times.append(entry.ends_at)
        return min((time for time in times if time > now), default=None)

    def to_json(self, now: float) -> list[dict[str, Any]]:
        self._arm(now)
        return [entry.to_json(now) for entry in self._set]

    def _arm(self, now: float) -> None:
        for entry in self._set:
            if entry.armed_at is None and self._is_due(entry, now):
                entry.armed_at = now
                if entry.fault.spec.scope is not Scope.REQUEST:
                    entry.applies = self._rng.random() < entry.fault.probability
                    if entry.fault.spec.scope is Scope.STATE and entry.applies:
                        entry.hits = 1

    def _is_due(self, entry: Armable, now: float) -> bool:
        match entry.fault.when:
            case "now":
                return True
            case "onSigterm":
                return self._sigterm
            case "afterSeconds":
                return now >= entry.set_at + entry.fault.after
            case _:
                return self._requests - entry.requests_at_set >= entry.fault.after


INFERENCE_PATHS: Final = ("/v1/completions", "/v1/chat/completions")


def _is_for(fault: Fault, path: str) -> bool:
    wanted = fault.args.get("path")
    return path in INFERENCE_PATHS if wanted is None else path == wanted
