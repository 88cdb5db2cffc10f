"""Faults: which exist, how they are written, and which are armed now. Pure: time and randomness come in as arguments.

A fault is `{"name", "args", "when", "count", "probability"}`; `when` is `"now"` (default), `"onSigterm"`,
`{"afterSeconds": s}` or `{"afterRequests": n}` (counted from when the fault was set). Three scopes:

- *request*: hits requests that arrive while it is armed; each with `probability`, at most `count` of them;
- *state*: the whole engine is so while it is armed; `probability` is drawn once, when it arms;
- *event*: happens once, when it arms, with `probability`.

Invariants: a set of faults is taken whole or refused whole; an unknown name, argument or metric is refused with
the list of known ones; setting the same fault again from the same source does not re-arm it.
"""

import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class FaultError(ValueError):
    """The text is no valid set of faults; the message names the entry, the field and what is allowed."""


class Scope(StrEnum):
    REQUEST = "request"
    STATE = "state"
    EVENT = "event"


class Source(StrEnum):
    ENV = "env"
    FILE = "file"
    PUT = "put"


@dataclass(frozen=True, slots=True)
class Param:
    kind: type
    """int, float or str."""
    required: bool = False
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    is_metric: bool = False
    """The name of a metric that this engine publishes."""
    allows_all: bool = False
    """With `is_metric`: or `*` for all of them."""
    is_duration: bool = False
    """The state ends by itself so many seconds after it began; null: it does not."""


@dataclass(frozen=True, slots=True)
class Spec:
    scope: Scope
    effect: str
    params: Mapping[str, Param] = field(default_factory=dict)
    only_at_start: bool = False
    """Has no effect once the model is loaded."""


_SECONDS = Param(float, required=True, minimum=0, maximum=86400)
_FACTOR = Param(float, required=True, minimum=1, maximum=1e6)
_FOR_SECONDS = Param(float, minimum=0, maximum=86400, is_duration=True)
_METRIC = Param(str, required=True, is_metric=True, allows_all=True)

SPECS: Final[Mapping[str, Spec]] = {
    "hang": Spec(Scope.STATE, "no request is answered, /health says 200", {"seconds": _FOR_SECONDS}),
    "frozen": Spec(Scope.STATE, "as hang, and all metrics stand still", {"seconds": _FOR_SECONDS}),
    "crashFirst": Spec(
        Scope.REQUEST,
        "the request gets 500, the engine is dead and exits 1 after some seconds",
        {"seconds": Param(float, default=1.0, minimum=0, maximum=86400)},
    ),
    "exit": Spec(Scope.EVENT, "the process exits", {"code": Param(int, required=True, minimum=0, maximum=255)}),
    "oom": Spec(Scope.EVENT, "the process exits 137, as after an OOM kill"),
    "slowLoad": Spec(Scope.STATE, "loading takes so much longer", {"seconds": _SECONDS}, only_at_start=True),
    "neverReady": Spec(Scope.STATE, "loading does not end", only_at_start=True),
    "portChange": Spec(
        Scope.STATE,
        "the engine listens on another port than it was told",
        {"port": Param(int, required=True, minimum=1, maximum=65535)},
        only_at_start=True,
    ),
    "ignoreSigterm": Spec(Scope.STATE, "SIGTERM does nothing"),
    "hangOnSigterm": Spec(Scope.STATE, "SIGTERM closes the port and silences all streams; no exit"),
    "slowDrain": Spec(Scope.STATE, "so many seconds pass between the last request and the exit", {"seconds": _SECONDS}),
    "stall": Spec(
        Scope.REQUEST,
        "after some tokens none comes for some seconds",
        {"seconds": _SECONDS, "afterTokens": Param(int, default=1, minimum=0)},
    ),
    "slowFirstToken": Spec(Scope.REQUEST, "time to the first token is multiplied", {"factor": _FACTOR}),
    "slowTokens": Spec(Scope.REQUEST, "time between tokens is multiplied", {"factor": _FACTOR}),
    "halfStream": Spec(
        Scope.REQUEST, "the connection breaks after some tokens", {"tokens": Param(int, default=1, minimum=0)}
    ),
    "errorBody": Spec(
        Scope.REQUEST,
        "200 with an error in the body (streams: one SSE error)",
        {"message": Param(str, default="simulated engine error")},
    ),
    "status": Spec(
        Scope.REQUEST,
        "the path answers with this code; default: completions and chat completions",
        {"code": Param(int, required=True, minimum=400, maximum=599), "path": Param(str)},
    ),
    "metricsDrop": Spec(Scope.STATE, "the metric is not published", {"metric": _METRIC}),
    "metricsRename": Spec(
        Scope.STATE,
        "the metric has another name",
        {"metric": Param(str, required=True, is_metric=True), "to": Param(str, required=True)},
    ),
    "metricsNaN": Spec(Scope.STATE, "the metric's value is NaN", {"metric": _METRIC}),
    "metricsReset": Spec(Scope.EVENT, "the counter or histogram starts again at 0", {"metric": _METRIC}),
    "metricsSlow": Spec(Scope.STATE, "/metrics answers after some seconds", {"seconds": _SECONDS}),
    "clockJump": Spec(
        Scope.EVENT,
        "the engine's wall clock moves; negative is back",
        {"seconds": Param(float, required=True, minimum=-1e9, maximum=1e9)},
    ),
    "memoryGrow": Spec(
        Scope.STATE,
        "resident memory grows (until the kernel kills the process, or to a maximum)",
        {
            "mbPerSecond": Param(float, required=True, minimum=0.1, maximum=10_000),
            "maxMb": Param(float, minimum=1, maximum=1_000_000),
        },
    ),
}

_FIELDS: Final = ("name", "args", "when", "count", "probability")
_WHENS: Final = ("now", "onSigterm", "afterSeconds", "afterRequests")


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    args: Mapping[str, Any]
    """Complete: defaults filled in."""
    when: str = "now"
    after: float = 0
    """Seconds or requests, with `afterSeconds` and `afterRequests`."""
    count: int | None = None
    probability: float = 1.0

    @property
    def spec(self) -> Spec:
        return SPECS[self.name]


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


def parse_faults(text: str, metric_names: frozenset[str]) -> list[Fault]:
    """Faults from JSON: a list of entries, or an object with the list in `faults`; empty text: none.

    Raises:
        FaultError: not JSON, or an entry is wrong.
    """
    if not text.strip():
        return []
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise FaultError(f"faults: not JSON: {error}") from error
    if isinstance(data, dict) and set(data) == {"faults"}:
        data = data["faults"]
    if not isinstance(data, list):
        raise FaultError('faults: expected a list of faults, or {"faults": [...]}')
    return [_parse_fault(entry, f"faults[{index}]", metric_names) for index, entry in enumerate(data)]


def _parse_fault(entry: object, where: str, metric_names: frozenset[str]) -> Fault:
    if not isinstance(entry, dict):
        raise FaultError(f'{where}: expected an object like {{"name": "hang"}}')
    _refuse_unknown(entry, _FIELDS, f"{where}: field")
    name = entry.get("name")
    if not isinstance(name, str) or name not in SPECS:
        raise FaultError(f"{where}.name: unknown fault {name!r}; known: {', '.join(SPECS)}")
    spec = SPECS[name]
    args = _parse_args(entry.get("args", {}), spec, f"{where} ({name}).args", metric_names)
    when, after = _parse_when(entry.get("when", "now"), f"{where} ({name}).when")
    if spec.only_at_start and when != "now":
        raise FaultError(f'{where} ({name}).when: a fault of the start can only be "now"')
    count = entry.get("count")
    if count is not None:
        if spec.scope is not Scope.REQUEST:
            raise FaultError(f"{where} ({name}).count: not for a fault of the whole engine; remove the field")
        _check_number(count, Param(int, minimum=1), f"{where} ({name}).count")
    probability = entry.get("probability", 1.0)
    _check_number(probability, Param(float, minimum=0, maximum=1), f"{where} ({name}).probability")
    return Fault(name, args, when, after, count, float(probability))


def _parse_when(when: object, where: str) -> tuple[str, float]:
    if when in ("now", "onSigterm"):
        return str(when), 0
    if isinstance(when, dict) and len(when) == 1:
        [(kind, value)] = when.items()
        if kind == "afterSeconds":
            _check_number(value, Param(float, minimum=0, maximum=86400), f"{where}.{kind}")
            return kind, float(value)
        if kind == "afterRequests":
            _check_number(value, Param(int, minimum=1), f"{where}.{kind}")
            return kind, value
    raise FaultError(
        f'{where}: {when!r} is none of "now", "onSigterm", {{"afterSeconds": seconds}}, {{"afterRequests": count}}'
    )


def _parse_args(args: object, spec: Spec, where: str, metric_names: frozenset[str]) -> dict[str, Any]:
    if not isinstance(args, dict):
        raise FaultError(f"{where}: expected an object; known arguments: {', '.join(spec.params) or 'none'}")
    _refuse_unknown(args, spec.params, f"{where}: argument")
    parsed: dict[str, Any] = {}
    for name, param in spec.params.items():
        value = args.get(name)
        if value is None:
            if param.required:
                raise FaultError(f"{where}.{name}: is required")
            parsed[name] = param.default
            continue
        if param.kind is str:
            if not isinstance(value, str) or not value:
                raise FaultError(f"{where}.{name}: expected a text, got {value!r}")
            if param.is_metric:
                _check_metric(value, metric_names | {"*"} if param.allows_all else metric_names, f"{where}.{name}")
            parsed[name] = value
        else:
            _check_number(value, param, f"{where}.{name}")
            parsed[name] = param.kind(value)
    return parsed


def _refuse_unknown(given: Mapping[str, Any], known: Iterable[str], what: str) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            raise FaultError(f"{what} {name!r} is unknown; known: {', '.join(known) or 'none'}")


def _check_metric(value: str, known: frozenset[str], where: str) -> None:
    if value not in known:
        raise FaultError(f"{where}: unknown metric {value!r}; known: {', '.join(sorted(known))}")


def _check_number(value: object, param: Param, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int if param.kind is int else (int, float)):
        raise FaultError(f"{where}: expected {'an integer' if param.kind is int else 'a number'}, got {value!r}")
    low = -math.inf if param.minimum is None else param.minimum
    high = math.inf if param.maximum is None else param.maximum
    if not (math.isfinite(value) and low <= value <= high):
        raise FaultError(f"{where}: {value!r} is not within {low:g} .. {high:g}")
