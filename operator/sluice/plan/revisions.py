"""Revisions of a pool: what was declared and what the operator resolved for it, kept in one ControllerRevision each.

Invariants:
- The same declaration is the same revision, whichever operator version asks: it is found by comparing what is stored,
  and only a new declaration gets a new digest (S096: a new operator rolls nothing).
- Images and default arguments come from the ControllerRevision once it exists, so a replacement is built like its
  siblings after the operator's configuration changed (D13). What a changed one does is the policy's to say (S098).
- The current revision is recovered from the children when status was lost (S028).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sluice.api import names
from sluice.api.base import ApiModel
from sluice.api.config import OperatorConfig
from sluice.api.v1alpha1 import UpgradePolicy
from sluice.plan.declared import PoolDeclaration, digest
from sluice.plan.engines import ADAPTERS
from sluice.plan.facts import controller_uid
from sluice.plan.metadata import child_metadata
from sluice.plan.snapshot import PodFacts, ServiceSnapshot

KIND = "ControllerRevision"


class Resolved(ApiModel):
    """What the operator's configuration said when the revision was made; stays for the revision's life."""

    engine_image: str
    agent_image: str
    pull_policy: str
    default_args: list[str] = []

    def is_as(self, other: "Resolved") -> bool:
        """True if pods run the same either way; when an image is pulled is no difference."""
        return self.model_copy(update={"pull_policy": other.pull_policy}) == other


@dataclass(frozen=True, slots=True)
class Revision:
    id: str
    """Digest of the declaration when it was made; label value `serving.sluice.dev/revision`."""
    pool: str
    number: int
    """Rises with each revision of the pool; orders them by age."""
    declaration: PoolDeclaration
    resolved: Resolved
    name: str
    """Of the ControllerRevision."""
    uid: str = ""
    """"": not stored yet."""


def load(snapshot: ServiceSnapshot) -> dict[str, tuple[Revision, ...]]:
    """Stored revisions by pool, oldest first. Objects of other owners and unreadable ones are passed over."""
    found: dict[str, list[Revision]] = {}
    for (kind, _), obj in snapshot.children.items():
        if kind == KIND and controller_uid(obj["metadata"]) == snapshot.uid:
            revision = _parse(obj)
            if revision is not None:
                found.setdefault(revision.pool, []).append(revision)
    return {pool: tuple(sorted(some, key=lambda r: (r.number, r.id))) for pool, some in found.items()}


def target(
    snapshot: ServiceSnapshot,
    pool: str,
    declaration: PoolDeclaration,
    stored: Sequence[Revision],
    *,
    said: str = "",
    policy: UpgradePolicy = UpgradePolicy.ON_NEW_REVISION,
) -> Revision:
    """The stored revision with this declaration, else a new one from the present configuration.

    Several have the same declaration where changed defaults were rolled out: `said`, the target that status names, is
    meant then, or under `Rolling` the one with today's defaults. A new one of those waits while many others roll.
    """
    wanted = declaration.canonical()
    today = resolve(declaration, snapshot.config)
    same = [revision for revision in reversed(stored) if revision.declaration.canonical() == wanted]
    if policy is UpgradePolicy.ROLLING:
        if (as_today := next((r for r in same if r.resolved.is_as(today)), None)) is not None:
            return as_today
        if same and snapshot.others_rolling < snapshot.config.limits.parallel_upgrades:
            return _new(snapshot, pool, declaration, stored, today)
    if same:
        return next((r for r in same if r.id == said), same[0])
    if policy is UpgradePolicy.MANUAL and stored:
        before = next((r for r in stored if r.id == said), stored[-1])
        return _new(snapshot, pool, declaration, stored, _pinned(declaration, today, before))
    return _new(snapshot, pool, declaration, stored, today)


def waits_for_others(snapshot: ServiceSnapshot, wanted: Revision, policy: UpgradePolicy) -> bool:
    """True if changed defaults are to be rolled out, and enough others are rolling."""
    return policy is UpgradePolicy.ROLLING and is_drifted(snapshot, wanted)


def is_drifted(snapshot: ServiceSnapshot, revision: Revision) -> bool:
    """True if the configuration says something else today than when the revision was made."""
    return not revision.resolved.is_as(resolve(revision.declaration, snapshot.config))


def _new(
    snapshot: ServiceSnapshot, pool: str, declaration: PoolDeclaration, stored: Sequence[Revision], resolved: Resolved
) -> Revision:
    revision_id = digest(declaration)
    if any(r.id == revision_id for r in stored):
        revision_id = names.short_hash(revision_id + resolved.model_dump_json(), length=10)
    return Revision(
        id=revision_id,
        pool=pool,
        number=max((r.number for r in stored), default=0) + 1,
        declaration=declaration,
        resolved=resolved,
        name=names.child_name(snapshot.name, snapshot.uid, pool, revision_id),
    )


def _pinned(declaration: PoolDeclaration, today: Resolved, before: Revision) -> Resolved:
    """The defaults of the revision before, but for what they don't fit: another type of engine."""
    if before.declaration.engine.type is not declaration.engine.type:
        return today.model_copy(update={"agent_image": before.resolved.agent_image})
    image = declaration.engine.image
    if not image:
        image = today.engine_image if before.declaration.engine.image else before.resolved.engine_image
    return before.resolved.model_copy(update={"engine_image": image})


def current(
    stored: Sequence[Revision], wanted: Revision | None, pods: Iterable[PodFacts], said: str
) -> Revision | None:
    """The revision that served last in full: what status says, else what most routed (else: most) pods carry.

    `said` is `status.pools[].revision.current`; it counts only if such a revision is stored or wanted.
    """
    known: dict[str, Revision] = {r.id: r for r in stored} | ({wanted.id: wanted} if wanted else {})
    if said in known:
        return known[said]
    votes: dict[str, tuple[int, int, int]] = {}
    for pod in pods:
        if pod.revision in known and pod.deletion_at is None:
            routed, total, _ = votes.get(pod.revision, (0, 0, 0))
            # On a tie the older one: it is the one that a rollout comes from.
            votes[pod.revision] = (routed + pod.gate, total + 1, -known[pod.revision].number)
    return known[max(votes, key=votes.__getitem__)] if votes else None


def unused(
    stored: Sequence[Revision], wanted: Revision | None, now_current: Revision | None, used: Collection[str]
) -> tuple[Revision, ...]:
    """Stored revisions that may go: not in use, neither target nor current, nor the last that served before.

    While a rollout is under way its start is `current`, so all others go; after it the newest of the others is the
    one that a rollback would rebuild. Nothing goes while the target or current one is unknown.
    """
    if wanted is None or now_current is None:
        return ()
    others = [r for r in stored if r.id not in used and r.id not in (wanted.id, now_current.id)]
    return tuple(others if wanted.id != now_current.id else others[:-1])


def build(snapshot: ServiceSnapshot, revision: Revision) -> dict[str, Any]:
    """The ControllerRevision; immutable, so created once and never changed."""
    labels = {names.LABEL_POOL: revision.pool, names.LABEL_REVISION: revision.id}
    return {
        "apiVersion": "apps/v1",
        "kind": KIND,
        "metadata": child_metadata(snapshot, revision.name, names.COMPONENT_ENGINE, labels),
        "revision": revision.number,
        "data": {
            "declared": revision.declaration.canonical(),
            "resolved": revision.resolved.model_dump(mode="json", by_alias=True),
        },
    }


def resolve(declaration: PoolDeclaration, config: OperatorConfig) -> Resolved:
    """What the configuration says today."""
    adapter = ADAPTERS[declaration.engine.type]
    return Resolved(
        engine_image=declaration.engine.image or adapter.default_image(config),
        agent_image=config.images.engine,
        pull_policy=config.images.pull_policy,
        default_args=list(adapter.default_args(config)),
    )


def _parse(obj: Mapping[str, Any]) -> Revision | None:
    meta = obj["metadata"]
    labels: dict[str, str] = meta.get("labels") or {}
    data = obj.get("data") or {}
    try:
        # Fields of a later version are passed over: an older operator must still know its pods.
        declaration = PoolDeclaration.model_validate(data.get("declared"), extra="ignore")
        resolved = Resolved.model_validate(data.get("resolved"), extra="ignore")
    except ValidationError:
        return None
    if not labels.get(names.LABEL_POOL) or not labels.get(names.LABEL_REVISION):
        return None
    return Revision(
        id=labels[names.LABEL_REVISION],
        pool=labels[names.LABEL_POOL],
        number=int(obj.get("revision") or 0),
        declaration=declaration,
        resolved=resolved,
        name=meta["name"],
        uid=meta.get("uid", ""),
    )
