"""The catalogue of faults, and how they are written. Pure.

A fault is `{"name", "args", "when", "count", "probability"}`; `when` is `"now"` (default), `"onSigterm"`,
`{"afterSeconds": s}` or `{"afterRequests": n}` (counted from when the fault was set).

Invariants: a set of faults is taken whole or refused whole; an unknown name, argument or metric is refused with
the list of known ones.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class FaultError(ValueError):
    """The text is no valid set of faults; the message names the entry, the field and what is allowed."""


class Scope(StrEnum):
    REQUEST = "request"
    """Hits requests that arrive while it is armed; each with `probability`, at most `count` of them."""
    STATE = "state"
    """The whole engine is so while it is armed; `probability` is drawn once, when it arms."""
    EVENT = "event"
    """Happens once, when it arms, with `probability`."""


class Needs(StrEnum):
    """What an engine must have for a fault to have an effect."""

    NOTHING = "nothing"
    TRANSFER = "transfer"
    """It hands KV over: prefill or decode."""
    LEASE = "lease"
    """It hands KV over with a lease: only the vLLM flavour."""
    GROUP = "group"
    """It is one of several nodes."""


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
    needs: Needs = Needs.NOTHING


_SECONDS = Param(float, required=True, minimum=0, maximum=86400)
_FACTOR = Param(float, required=True, minimum=1, maximum=1e6)
_FOR_SECONDS = Param(float, minimum=0, maximum=86400, is_duration=True)
_METRIC = Param(str, required=True, is_metric=True, allows_all=True)
_EXIT_CODE = Param(int, default=137, minimum=0, maximum=255)

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
    "kvCorrupt": Spec(
        Scope.REQUEST, "the KV that is handed over is other than what prefill computed", needs=Needs.TRANSFER
    ),
    "kvFail": Spec(Scope.REQUEST, "the transfer of the KV fails", needs=Needs.TRANSFER),
    "kvSlow": Spec(
        Scope.REQUEST, "the transfer of the KV takes so much longer", {"seconds": _SECONDS}, needs=Needs.TRANSFER
    ),
    "kvNeverPulled": Spec(
        Scope.REQUEST, "the KV is never asked for; prefill keeps it until the time is over", needs=Needs.TRANSFER
    ),
    "kvStale": Spec(
        Scope.REQUEST,
        "on prefill: the lease ends at once and the blocks are used again; on decode: the pull waits, without "
        "heartbeats, until its own lease time (or so many seconds) is over",
        {"seconds": Param(float, minimum=0, maximum=86400)},
        needs=Needs.LEASE,
    ),
    "followerDeath": Spec(
        Scope.EVENT,
        "the node of this rank (the last one, if none is named) exits",
        {"rank": Param(int, minimum=1), "code": _EXIT_CODE},
        needs=Needs.GROUP,
    ),
    "leaderDeath": Spec(Scope.EVENT, "the node of rank 0 exits", {"code": _EXIT_CODE}, needs=Needs.GROUP),
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
