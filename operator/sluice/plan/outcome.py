"""What status says about failures: why nobody waits any longer, and how evidence is kept inside 16 KiB.

After a failed rollout the service does not run what its spec says: Stalled (kstatus: Failed), while Ready follows the
instances that serve. A pool in which nothing comes to serve is Stalled too, and still tries with growing pauses.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from sluice.api.conditions import Reason
from sluice.plan import backoff, failures, quarantine, rollback, surge
from sluice.plan.backoff import Slot
from sluice.plan.rollback import FAILED_INSTANCES, Attempt
from sluice.plan.snapshot import Event
from sluice.plan.view import PoolView, ServiceView

MAX_STATUS_BYTES: Final = 16 * 1024 - 512
"""Of the whole status as JSON; some room is left for what the API server adds."""
_SHORT: Final = 64


def failed_rollout(view: ServiceView) -> tuple[Reason, str] | None:
    """Reason and message of the first pool whose rollout failed, for RolloutComplete and Stalled."""
    for pool in view.pools:
        attempt = pool.attempt
        if pool.declared is None or attempt is None or attempt.failed is None:
            continue
        if attempt.is_rolled_back:
            back = f"back on revision {pool.current.id}" if pool.current else "back on the revision before"
            return Reason.ROLLED_BACK, f"pool {pool.name}: {back}; {_cause(attempt)}; {_NEXT}"
        if attempt.is_held:
            return attempt.failed, f"pool {pool.name}: the rollout is held; {_cause(attempt)}; {_NEXT}"
        return attempt.failed, f"pool {pool.name}: nothing serves in full yet, tried on with pauses; {_cause(attempt)}"
    return None


def nothing_serves(view: ServiceView) -> tuple[Reason, str] | None:
    """A pool all of whose instances fail, one after the other, although its revision once served."""
    for pool in view.pools:
        slot = _hopeless(pool)
        if slot is not None:
            text = f"pool {pool.name}: {slot.failures} instances in a row failed at place {slot.index} and none serves"
            return Reason(slot.reason), f"{text}; tried on with pauses; see status.lastFailures"
    return None


def serves_on(view: ServiceView) -> bool:
    """A failed rollout took nothing away: Ready is about what serves."""
    found = [pool.attempt for pool in view.pools if pool.attempt is not None]
    return any(attempt.is_rolled_back or attempt.is_held for attempt in found)


def missing_room(view: ServiceView) -> list[str]:
    """What rollouts lack that find no place for an instance more (S029)."""
    if view.desired is None or view.desired.spec.rollout.paused:
        return []
    rollout = view.desired.spec.rollout
    found = [(pool.name, pool.no_room) for pool in view.pools if pool.no_room and pool.no_room.is_certain(view.now)]
    return [f"pool {name}: {surge.explain(rollout, no_room)}" for name, no_room in found if no_room is not None]


def events(view: ServiceView) -> Iterator[Event]:
    """Each told once: it is news while status does not show it."""
    for pool in view.pools:
        attempt = pool.attempt
        if attempt is None or attempt.failed is None or _was_said(view, pool, attempt):
            continue
        reason, what = attempt.failed, "nothing to go back to; it is tried on with growing pauses"
        if attempt.is_rolled_back and pool.current is not None:
            reason, what = Reason.ROLLED_BACK, f"revision {pool.current.id} takes its place again"
        elif attempt.is_held:
            what = "what is there is kept (spec.rollout.onFailure is Hold)"
        note = f"Pool {pool.name}: revision {attempt.revision} failed: {_cause(attempt)}; {what}"
        yield Event(str(reason), note, warning=True, action="Rollout")
    told = {entry.node: entry.until for entry in quarantine.load(view.snapshot.status)}
    for entry in view.avoided:
        if view.now < entry.until and told.get(entry.node, 0.0) <= view.now:
            note = f"Node {entry.node} is avoided until {quarantine.entries([entry])[0]['until']}: {entry.reason}"
            yield Event(str(Reason.NODE_AVOIDED), note, warning=True)


def pool_entry(pool: PoolView) -> dict[str, Any]:
    """What `status.pools[]` holds about failures."""
    entry: dict[str, Any] = {"backoff": backoff.entries(pool.slots)}
    rollout = rollback.entry(pool.attempt)
    return {**entry, "rollout": rollout} if rollout else entry


def service_entry(view: ServiceView) -> dict[str, Any]:
    """What `status` holds about failures."""
    entry: dict[str, Any] = {
        "lastFailures": failures.entries(view.failures),
        "avoidedNodes": quarantine.entries(view.avoided),
    }
    wished = rollback.retry_at(view.snapshot)
    return {**entry, "lastHandledRetryAt": wished} if wished else entry


def fitted(status: dict[str, Any]) -> dict[str, Any]:
    """The status, made smaller where it is too large: evidence is cut first, then the least bad problems go."""
    made = {**status, "lastFailures": list(status["lastFailures"]), "problems": list(status["problems"])}
    for number in reversed(range(len(made["lastFailures"]))):
        if _size(made) <= MAX_STATUS_BYTES:
            return made
        entry = made["lastFailures"][number]
        made["lastFailures"][number] = {**entry, "message": entry["message"][-_SHORT:]}
    while made["problems"] and _size(made) > MAX_STATUS_BYTES:
        made["problems"].pop()
    return made


def _size(status: Mapping[str, Any]) -> int:
    return len(json.dumps(status, ensure_ascii=False).encode())


def _hopeless(pool: PoolView) -> Slot | None:
    if pool.declared is None or not pool.desired or pool.serving or pool.goal is None:
        return None
    mine = (s for s in pool.slots if s.revision == pool.goal.id and s.failures >= FAILED_INSTANCES)
    return next((s for s in mine if s.reason in Reason.__members__.values()), None)


def _was_said(view: ServiceView, pool: PoolView, attempt: Attempt) -> bool:
    for said in view.snapshot.status.get("pools") or []:
        before = said.get("rollout") or {}
        if said.get("name") == pool.name and before.get("attempt") == attempt.token:
            return bool(before.get("revision") == attempt.revision and before.get("failed"))
    return False


def _cause(attempt: Attempt) -> str:
    return f"{attempt.failed}: {attempt.message}"


_NEXT: Final = "change the spec, or set the annotation serving.sluice.dev/retry-at to try again"
