"""Why a service is or is not Ready, as plain sentences, the most telling first. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from sluice.api import names
from sluice.api.conditions import ConditionType
from sluice.cli import advice
from sluice.cli.overview import avoided_lines, backoff_lines, drain_lines, failure_lines, problem_lines, rollout_word
from sluice.cli.report import Object, ServiceReport, mapping, text_of, whole
from sluice.cli.text import count, duration, section, sentence
from sluice.plan.times import parse_time

MAX_EVENTS: Final = 10


def explain(report: ServiceReport, events: Sequence[Object] | None) -> list[str]:
    """Paragraphs as lines; `events` None: the caller may not read them."""
    paragraphs = [
        list(_headline(report)),
        list(_hindrances(report)),
        section("What is wrong", problem_lines(report)),
        section("What leaves", drain_lines(report)),
        section("What is held back", backoff_lines(report)),
        section("How engines ended", failure_lines(report)),
        section("Nodes it stays away from", avoided_lines(report)),
        _events(report, events),
    ]
    lines: list[str] = []
    for paragraph in paragraphs:
        lines += ["", *paragraph] if lines and paragraph else paragraph
    return lines


def _headline(report: ServiceReport) -> Iterator[str]:
    who = f"{report.namespace}/{report.name}"
    if report.service["metadata"].get("deletionTimestamp"):
        yield f"{who} is being deleted; its instances finish their requests first."
        return
    ready = report.condition(ConditionType.READY)
    if not ready:
        yield f"{who}: the operator has not looked at it yet."
        yield f"See whether it runs: kubectl get pods -n {names.SYSTEM_NAMESPACE}"
        return
    if not report.is_seen:
        seen, wanted = report.status.get("observedGeneration"), report.service["metadata"].get("generation")
        yield f"The operator has not looked at the present spec yet (generation {wanted}; it last saw {seen})."
        yield f"If that lasts, see whether it runs: kubectl get pods -n {names.SYSTEM_NAMESPACE}"
        yield "What follows is about the older spec."
    word = {"True": "Ready", "False": "not Ready"}.get(text_of(ready, "status"), "not known to be Ready")
    since = report.seconds_since(ready.get("lastTransitionTime"))
    age = f" for {duration(since)}" if since is not None else ""
    yield f"{who} is {word}{age} ({text_of(ready, 'reason')}): {sentence(text_of(ready, 'message'))}"
    step = advice.next_step(text_of(ready, "reason"), report.namespace)
    if step and not report.entries("problems"):
        yield f"Next: {sentence(step)}"


def _hindrances(report: ServiceReport) -> Iterator[str]:
    """What the other conditions add; each message once."""
    ready = report.condition(ConditionType.READY)
    told = {text_of(ready, "message"), advice.next_step(text_of(ready, "reason"), report.namespace)}
    for kind, text in (
        (ConditionType.STALLED, "It will stay so until somebody changes something"),
        (ConditionType.ACCEPTED, "The spec can't be carried out"),
        (ConditionType.RECONCILING, "Under way"),
        (ConditionType.ROUTED, "Routing"),
        (ConditionType.ROLLOUT_COMPLETE, "Rollout"),
        (ConditionType.WEIGHTS_READY, "Weights"),
    ):
        condition = report.condition(kind)
        is_bad_when = "True" if kind in (ConditionType.STALLED, ConditionType.RECONCILING) else "False"
        message = text_of(condition, "message")
        if condition.get("status") != is_bad_when or message in told:
            continue
        told.add(message)
        yield f"{text} ({text_of(condition, 'reason')}): {sentence(message)}"
        step = advice.next_step(text_of(condition, "reason"), report.namespace)
        if step and step not in told:
            told.add(step)
            yield f"Next: {sentence(step)}"
    if report.is_ready and rollout_word(report) == "complete":
        serving = sum(whole(pool.get("serving")) or 0 for pool in report.entries("pools"))
        yield f"{count(serving, 'instance')} answered a real inference and every router lists them; no rollout is open."


def _events(report: ServiceReport, events: Sequence[Object] | None) -> list[str]:
    if events is None:
        return ["Events are not shown: you may not list events in this namespace."]
    newest = sorted(events, key=_moment, reverse=True)[:MAX_EVENTS]
    lines = []
    for event in newest:
        moment = _moment(event)
        ago = f"{duration(report.now - moment)} ago" if moment else "some time ago"
        times = whole(mapping(event.get("series")).get("count")) or whole(event.get("count")) or 1
        again = f" ({times} times)" if times > 1 else ""
        sign = "! " if event.get("type") == "Warning" else ""
        lines.append(f"{sign}{ago} {text_of(event, 'reason')}{again}: {sentence(text_of(event, 'message'))}")
    return section("What happened, newest first", lines)


def _moment(event: Object) -> float:
    """When it last happened, seconds since the epoch; 0 if the event does not say."""
    series = mapping(event.get("series"))
    stated = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    created = mapping(event.get("metadata")).get("creationTimestamp")
    return next((seen for text in (*stated, created) if (seen := parse_time(text)) is not None), 0.0)
