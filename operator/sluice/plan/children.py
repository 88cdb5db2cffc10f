"""Which of the wanted children differ from the live ones: only those are applied, foreign ones never.

A child is as wanted when it carries the digest of what we would render (which catches removed fields) and still has
every wanted field (which catches changes by others). Fields that we do not mean are left to whoever set them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.api import names
from sluice.plan.actions import Apply
from sluice.plan.facts import controller_uid
from sluice.plan.metadata import stamped
from sluice.plan.snapshot import ServiceSnapshot


@dataclass(frozen=True, slots=True)
class Conflict:
    """An object of another owner stands where a child of ours should."""

    kind: str
    name: str

    @property
    def message(self) -> str:
        return (
            f"{self.kind} {self.name!r} exists and does not belong to this InferenceService; it is left as it is: "
            "delete or rename it, or give the InferenceService another name"
        )


def changed(
    snapshot: ServiceSnapshot, wanted: Iterable[dict[str, Any]]
) -> tuple[tuple[Apply, ...], tuple[Conflict, ...]]:
    """What to apply, in the given order, and what stands in the way. A child that is being deleted is waited for."""
    applies: list[Apply] = []
    conflicts: list[Conflict] = []
    for plain in wanted:
        body = plain if names.ANNOTATION_SPEC_HASH in plain["metadata"].get("annotations", {}) else stamped(plain)
        kind, name = body["kind"], body["metadata"]["name"]
        live = snapshot.children.get((kind, name))
        if live is not None and controller_uid(live["metadata"]) != snapshot.uid:
            conflicts.append(Conflict(kind, name))
        elif live is None or (not live["metadata"].get("deletionTimestamp") and not is_covered(body, live)):
            applies.append(Apply(body, scope=f"{kind}/{name}"))
    return tuple(applies), tuple(conflicts)


def own(snapshot: ServiceSnapshot, kind: str, name: str) -> Mapping[str, Any] | None:
    """The live child of this name if it is ours."""
    live = snapshot.children.get((kind, name))
    return live if live is not None and controller_uid(live["metadata"]) == snapshot.uid else None


def is_covered(wanted: Any, live: Any) -> bool:
    """True if `live` has everything of `wanted`; more is fine, except in lists that nobody else may add to.

    Entries of lists are told apart by `name` where they have one (containers, env, ports, volumes; owner references
    have one too), so that an injected sidecar is no difference. Both are JSON, so `dict` is asked for: asking for
    `Mapping` was half of the time of a pass that changes nothing.
    """
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(key in live and is_covered(wanted[key], live[key]) for key in wanted)
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return False
        if wanted and all(isinstance(item, dict) and "name" in item for item in wanted):
            by_name = {item["name"]: item for item in live if isinstance(item, dict) and "name" in item}
            return all(item["name"] in by_name and is_covered(item, by_name[item["name"]]) for item in wanted)
        return len(wanted) == len(live) and all(is_covered(a, b) for a, b in zip(wanted, live, strict=True))
    return bool(wanted == live)
