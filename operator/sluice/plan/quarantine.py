"""Nodes that new instances stay away from, because several failed there; and where a replacement rather goes.

A node is blamed for what failed there, unless the same revision fails elsewhere too and serves nowhere: then the
revision is at fault. Avoiding is wiring of new pods (node affinity), never part of a revision, and it always ends: at
its time, or as soon as a pod finds no place because of it. All that is known stands in `status.avoidedNodes` and
`status.lastFailures`; losing them forgets a quarantine and nothing else.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sluice.api import names
from sluice.api.conditions import Reason
from sluice.api.status import MAX_AVOIDED
from sluice.plan.failures import Failure
from sluice.plan.health import GiveUp, Instance
from sluice.plan.snapshot import PodFacts
from sluice.plan.times import format_time, parse_time

THRESHOLD: Final = 2
"""Instances that failed on a node within `EVIDENCE_S`."""
EVIDENCE_S: Final = 3600.0
AVOID_S: Final = 1800.0
"""How long a node is avoided after the last failure there."""
UNSCHEDULABLE_LIMIT_S: Final = 60.0
"""How long a pod that avoids nodes may find no place before a node is allowed again."""
HOSTNAME: Final = "kubernetes.io/hostname"

_BLAMED: Final = frozenset(
    {
        Reason.CRASH_LOOP,
        Reason.OUT_OF_MEMORY,
        Reason.STARTUP_TIMEOUT,
        Reason.SELF_TEST_FAILED,
        Reason.ADMISSION_FAILED,
    }
)


@dataclass(frozen=True, slots=True)
class AvoidedNode:
    node: str
    until: float
    """Seconds since the epoch; once it has passed, only a failure after it counts again."""
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a new pod must not, and should not, go; node names."""

    avoid: tuple[str, ...] = ()
    prefer_not: tuple[str, ...] = ()


ANYWHERE: Final = Placement()


def load(status: Mapping[str, Any]) -> tuple[AvoidedNode, ...]:
    """Entries of a status, unreadable ones left out."""
    found = []
    for entry in status.get("avoidedNodes") or []:
        until = parse_time(entry.get("until")) if isinstance(entry, Mapping) else None
        if until is not None and isinstance(entry.get("node"), str):
            found.append(AvoidedNode(entry["node"], until, str(entry.get("reason") or "")))
    return tuple(found)


def find_no_place(instance: Instance, now: float) -> GiveUp | None:
    """A pod that stays away from nodes and finds no other: affinity can't be changed, so it is built anew."""
    pod = instance.pod
    if not instance.is_live or not pod.avoids or now < check_at(pod):
        return None
    text = f"no place on other nodes than {', '.join(pod.avoids)}, which it avoids: {pod.scheduling_message}"
    return GiveUp(Reason.UNSCHEDULABLE, text)


def check_at(pod: PodFacts) -> float:
    """When a pod that avoids nodes has waited long enough; infinite while that can't come."""
    if pod.scheduled or not pod.avoids or not pod.scheduling_message:
        return float("inf")
    return (pod.unschedulable_since or pod.created_at) + UNSCHEDULABLE_LIMIT_S


def update(
    before: Sequence[AvoidedNode], failures: Sequence[Failure], instances: Sequence[Instance], now: float
) -> tuple[AvoidedNode, ...]:
    """The nodes to avoid from what failed, less one that is needed again; those whose time has come stay listed
    for as long as their old failures could be taken for new ones."""
    known = {entry.node: entry for entry in before if now <= entry.until + EVIDENCE_S}
    serving = {i.pod.revision for i in instances if i.is_serving}
    for node, blamed in _blamed(failures, serving, now).items():
        last = max(failure.at for failure in blamed)
        entry = known.get(node)
        is_news = entry is None or last > entry.until or (now < entry.until and last + AVOID_S > entry.until)
        if len(blamed) >= THRESHOLD and is_news and now < last + AVOID_S:
            what = ", ".join(sorted({failure.reason for failure in blamed}))
            known[node] = AvoidedNode(node, last + AVOID_S, f"{len(blamed)} instances failed there: {what}")
    stuck = [i.pod for i in instances if i.gives_up is not None and i.gives_up.reason is Reason.UNSCHEDULABLE]
    needed = _oldest(known.values(), stuck, now)
    if needed is not None:
        reason = "no other node takes the instances, so it is used again"
        known[needed.node] = replace(needed, until=float(int(now)), reason=reason)
    return tuple(sorted(known.values(), key=lambda e: (-e.until, e.node))[:MAX_AVOIDED])


def placement(avoided: Iterable[AvoidedNode], failures: Iterable[Failure], now: float) -> Placement:
    """Where new pods go: never to an avoided node, rather not where one was just given up."""
    avoid = tuple(sorted(entry.node for entry in avoided if now < entry.until))
    bad = {f.node for f in failures if f.replaced and f.node and f.reason in _BLAMED and now < f.at + EVIDENCE_S}
    return Placement(avoid, tuple(sorted(bad - set(avoid))))


def place(pod: dict[str, Any], where: Placement) -> dict[str, Any]:
    """The built pod with its node affinity narrowed; what the user asked for stays (terms of a selector are ORed, so
    each gets the condition)."""
    if not where.avoid and not where.prefer_not:
        return pod
    affinity = dict(pod["spec"].get("affinity") or {})
    node = dict(affinity.get("nodeAffinity") or {})
    required, preferred = (
        "requiredDuringSchedulingIgnoredDuringExecution",
        "preferredDuringSchedulingIgnoredDuringExecution",
    )
    metadata = pod["metadata"]
    if where.avoid:
        terms = (node.get(required) or {}).get("nodeSelectorTerms") or [{}]
        narrowed = [
            {**t, "matchExpressions": [*(t.get("matchExpressions") or []), _not_in(where.avoid)]} for t in terms
        ]
        node[required] = {"nodeSelectorTerms": narrowed}
        annotations = {**metadata.get("annotations", {}), names.ANNOTATION_AVOIDS: ",".join(where.avoid)}
        metadata = {**metadata, "annotations": annotations}
    if where.prefer_not:
        term = {"weight": 100, "preference": {"matchExpressions": [_not_in(where.prefer_not)]}}
        node[preferred] = [*(node.get(preferred) or []), term]
    affinity["nodeAffinity"] = node
    return {**pod, "metadata": metadata, "spec": {**pod["spec"], "affinity": affinity}}


def entries(avoided: Iterable[AvoidedNode]) -> list[dict[str, Any]]:
    """As `status.avoidedNodes` holds them."""
    return [{"node": e.node, "until": format_time(e.until), "reason": e.reason[:256]} for e in avoided]


def _blamed(failures: Sequence[Failure], serving: Collection[str], now: float) -> dict[str, list[Failure]]:
    nodes_of: dict[str, set[str]] = {}
    counted = [f for f in failures if f.replaced and f.node and f.reason in _BLAMED and now < f.at + EVIDENCE_S]
    for failure in counted:
        nodes_of.setdefault(failure.revision, set()).add(failure.node)
    found: dict[str, list[Failure]] = {}
    for failure in counted:
        if failure.revision in serving or len(nodes_of[failure.revision]) == 1:
            found.setdefault(failure.node, []).append(failure)
    return found


def _oldest(avoided: Iterable[AvoidedNode], stuck: Sequence[PodFacts], now: float) -> AvoidedNode | None:
    """The node to use again first; None while every pod has a place."""
    asked = {node for pod in stuck for node in pod.avoids}
    active = [entry for entry in avoided if now < entry.until and entry.node in asked]
    return min(active, key=lambda e: (e.until, e.node), default=None)


def _not_in(nodes: Sequence[str]) -> dict[str, Any]:
    return {"key": HOSTNAME, "operator": "NotIn", "values": list(nodes)}
