"""Texts of `kubectl sluice status`: one line per service, or one service with its instances. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sluice.api.conditions import ConditionType
from sluice.cli.report import InstanceReport, Object, ServiceReport, mapping, maps, text_of, whole
from sluice.cli.text import UNKNOWN, clean, count, duration, number, section, sentence, table
from sluice.cli.timeline import Span, Stage

STAGE_HEADS: Final = {
    Stage.SCHEDULED: "SCHEDULED",
    Stage.IMAGE: "IMAGE",
    Stage.LOAD: "LOAD",
    Stage.FIRST_INFERENCE: "FIRST INFERENCE",
    Stage.ROUTED: "ROUTED",
}
LAST_WORDS: Final = 200
"""Characters of a failure's message in the table; `-o yaml` has all of them."""


def list_services(reports: Sequence[ServiceReport], *, with_namespace: bool) -> list[str]:
    """A table; the caller says what an empty list means."""
    head = ["NAME", "READY", "SERVING", "ROLLOUT", "PROBLEMS", "DRAINING", "REASON", "AGE"]
    rows = []
    for report in reports:
        pools = report.entries("pools")
        row = [
            report.name,
            text_of(report.condition(ConditionType.READY), "status") or "Unknown",
            clean(text_of(mapping(report.status.get("summary")), "serving")),
            rollout_word(report),
            str(len(report.entries("problems"))),
            number(sum(whole(p.get("draining")) or 0 for p in pools) if pools else None),
            reason(report),
            duration(report.seconds_since(report.service["metadata"].get("creationTimestamp"))),
        ]
        rows.append([report.namespace, *row] if with_namespace else row)
    return table(["NAMESPACE", *head] if with_namespace else head, rows)


def reason(report: ServiceReport) -> str:
    """Why it is or is not Ready, in one word."""
    if not report.is_seen:
        return "NotSeenYet"
    return text_of(report.condition(ConditionType.READY), "reason")


def rollout_word(report: ServiceReport) -> str:
    """`complete`, or what holds it."""
    condition = report.condition(ConditionType.ROLLOUT_COMPLETE)
    if not report.is_seen or not condition:
        return UNKNOWN
    return "complete" if condition.get("status") == "True" else text_of(condition, "reason") or UNKNOWN


def describe(report: ServiceReport, agents_note: str) -> list[str]:
    """One service in full; `agents_note`: why some agents could not be asked, "" if all answered."""
    parts = [
        _head(report),
        _pools(report),
        _instances(report, agents_note),
        _startup(report),
        section("Drains", drain_lines(report)),
        section("Problems", problem_lines(report)),
        section("Held back", backoff_lines(report)),
        section("Last failures", failure_lines(report)),
        section("Avoided nodes", avoided_lines(report)),
    ]
    lines: list[str] = []
    for part in parts:
        lines += ["", *part] if lines and part else part
    return lines


def _head(report: ServiceReport) -> list[str]:
    ready = report.condition(ConditionType.READY)
    status = report.status
    since = duration(report.seconds_since(ready.get("lastTransitionTime")))
    word = f"{text_of(ready, 'status') or 'Unknown'} ({reason(report) or UNKNOWN}), for {since}"
    rows = [
        ("Service", f"{report.namespace}/{report.name}"),
        ("Ready", word if ready else "Unknown: the operator has not looked at it yet"),
        ("", text_of(ready, "message")),
        ("Rollout", _rollout(report)),
        ("Model", text_of(mapping(status.get("summary")), "model")),
        ("URL", text_of(status, "url")),
    ]
    if ready and not report.is_seen:
        seen = f"{status.get('observedGeneration')} of {report.service['metadata'].get('generation')}"
        rows.insert(1, ("Note", f"what follows is about an older spec (generation {seen}): the operator is behind"))
    return [f"{label:<9}{clean(text)}".rstrip() for label, text in rows if text]


def _rollout(report: ServiceReport) -> str:
    condition = report.condition(ConditionType.ROLLOUT_COMPLETE)
    if not condition:
        return ""
    revision = mapping(report.status.get("revision"))
    current, target = text_of(revision, "current"), text_of(revision, "target")
    arrow = f" ({current} → {target})" if current and target and current != target else ""
    return f"{rollout_word(report)}{arrow}: {text_of(condition, 'message')}"


def _pools(report: ServiceReport) -> list[str]:
    keys = ("desired", "current", "serving", "updated", "draining", "unhealthy")
    rows = [[text_of(pool, "name"), *(number(whole(pool.get(k))) for k in keys)] for pool in report.entries("pools")]
    return table(["POOL", *(key.upper() for key in keys)], rows)


def _instances(report: ServiceReport, agents_note: str) -> list[str]:
    head = ["INSTANCE", "POOL", "PHASE", "NODE", "REVISION", "AGE", "IN-FLIGHT", "RESTARTS"]
    rows = [
        [
            i.name,
            i.pod.pool,
            _phase(i),
            i.pod.node,
            i.pod.revision,
            duration(report.now - i.pod.created_at if i.pod.created_at else None),
            number(i.in_flight),
            number(i.restarts),
        ]
        for i in report.instances
    ]
    lines = table(head, rows) or ["No instances."]
    if agents_note and any(i.in_flight is None for i in report.instances):
        lines.append(f"IN-FLIGHT {UNKNOWN}: {agents_note}.")
    return lines


def _phase(instance: InstanceReport) -> str:
    if instance.is_requested and instance.pod.drain_started_at is None and instance.pod.deletion_at is None:
        return f"{instance.phase} (drain asked for)"
    return str(instance.phase)


def _startup(report: ServiceReport) -> list[str]:
    rows = [
        [i.name, *(_span(span, report.now) for span in i.startup), duration(i.startup_s)]
        for i in report.instances
        if any(span.seconds(report.now) is not None for span in i.startup)
    ]
    return table(["START-UP", *(STAGE_HEADS[stage] for stage in Stage), "TOTAL"], rows)


def _span(span: Span, now: float) -> str:
    text = duration(span.seconds(now))
    return f"{text}…" if span.is_under_way else text


def drain_lines(report: ServiceReport) -> list[str]:
    """One line per instance that leaves or is asked to."""
    leaving = [(i.name, drain_progress(report, i)) for i in report.instances if i.is_leaving]
    return [f"{name}: {progress.text}" for name, progress in leaving]


@dataclass(frozen=True, slots=True)
class Progress:
    what: str
    times: str
    """"" when not known."""

    @property
    def text(self) -> str:
        return ", ".join(part for part in (self.what, self.times) if part)


def drain_progress(report: ServiceReport, instance: InstanceReport) -> Progress:
    """`draining (NodeDrain), 3 of 12 requests in flight` and `41s of 10m`: what is known of it, nothing else."""
    pod, said = instance.pod, report.drain_entry(instance.name)
    if pod.deletion_at is not None:
        word = "stopping"
    elif pod.drain_started_at is not None:
        word = "draining"
    else:
        return Progress("asked for; it serves on until its replacement serves, where one is needed", "")
    why = text_of(said, "reason") or pod.drain_reason
    parts = [f"{word} ({why})" if why else word, _requests(said, instance.in_flight)]
    began = _elapsed(report, instance, said)
    limit = whole(said.get("timeoutSeconds"))
    times = f"{duration(began)} of {duration(limit)}" if limit else f"for {duration(began)}"
    return Progress(", ".join(part for part in parts if part), times if began is not None else "")


def _elapsed(report: ServiceReport, instance: InstanceReport, said: Object) -> float | None:
    """Seconds since the drain began: those of the count that is shown beside it, else by the mark on the pod."""
    noted = whole(said.get("elapsedSeconds"))
    if noted is not None:
        return noted
    began = instance.pod.drain_started_at
    return report.now - began if began is not None else None


def _requests(said: Object, in_flight: int | None) -> str:
    begun = whole(said.get("of"))
    if in_flight is None:
        return "requests in flight unknown"
    if begun and in_flight <= begun:  # more: routers sent some before they let go
        return f"{in_flight} of {count(begun, 'request')} in flight"
    return f"{count(in_flight, 'request')} in flight"


def problem_lines(report: ServiceReport) -> list[str]:
    """What is wrong and, one line below, what to do."""
    lines = []
    for problem in report.entries("problems"):
        where = f" on {node}" if (node := text_of(problem, "node")) else ""
        since = report.seconds_since(problem.get("since"))
        age = f", for {duration(since)}" if since is not None else ""
        what = f"{text_of(problem, 'phase')}, {text_of(problem, 'reason')}"
        lines.append(f"{text_of(problem, 'name')}{where} ({what}{age}): {sentence(text_of(problem, 'message'))}")
        step = report.next_step(problem)
        lines += [f"  next: {step}"] if step else []
    return lines


def backoff_lines(report: ServiceReport) -> list[str]:
    """Places in pools whose instances fail one after the other, while the next one has to wait."""
    lines = []
    for pool in report.entries("pools"):
        for entry in maps(pool.get("backoff")):
            failures, left = whole(entry.get("failures")), report.seconds_since(entry.get("retryAt"))
            if left is None or left >= 0:
                continue
            times = f"failed {count(failures, 'time')} in a row" if failures else "failed"
            why = f" ({text_of(entry, 'reason')})" if entry.get("reason") else ""
            place = f"pool {text_of(pool, 'name')}, index {number(whole(entry.get('index')))}"
            lines.append(f"{place}: {times}{why}; the next one may be created in {duration(-left)}")
    return lines


def failure_lines(report: ServiceReport) -> list[str]:
    """The evidence of engines that ended, newest first."""
    lines = []
    for failure in report.entries("lastFailures"):
        name = text_of(failure, "instance")
        ago = report.seconds_since(failure.get("at"))
        code = whole(failure.get("exitCode"))
        parts = [
            f"exit code {code}" if code is not None else "",
            text_of(failure, "reason"),
            f"on {node}" if (node := text_of(failure, "node")) else "",
            f"{duration(ago)} ago" if ago is not None else "",
        ]
        said = clean(text_of(failure, "message"))
        if len(said) > LAST_WORDS:
            said = "…" + said[-LAST_WORDS:]  # the end says why it ended
        lines.append(f"{name}: {', '.join(p for p in parts if p) or 'ended'}" + (f": {said}" if said else ""))
    return lines


def avoided_lines(report: ServiceReport) -> list[str]:
    """Nodes that new instances are kept away from now; entries whose time is over are none any more."""
    lines = []
    for entry in report.entries("avoidedNodes"):
        left = report.seconds_since(entry.get("until"))
        if left is not None and left >= 0:
            continue
        until = f" for {duration(-left)} more" if left is not None else ""
        why = text_of(entry, "reason")
        lines.append(f"{text_of(entry, 'node')}{until}" + (f": {sentence(why)}" if why else ""))
    return lines
