"""One pass: look at the snapshot, plan, act, again while there is something to do, report, come back later. All
decisions are `plan`'s.

Invariants: nothing is read from the API inside a pass and nothing is remembered from the last one; status is written
after failures too; a bug in the plan becomes a condition and a back-off, never an exit and never an action.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from time import monotonic
from typing import Any, Final, Protocol

from sluice.api import names
from sluice.api.agent import AgentState
from sluice.api.conditions import ConditionType, Reason, condition
from sluice.api.config import OperatorConfig
from sluice.api.router import RouterState
from sluice.plan.actions import Outcome, Result
from sluice.plan.planner import Plan
from sluice.plan.problems import outcome_events
from sluice.plan.snapshot import Event, ServiceSnapshot
from sluice.runtime import kinds
from sluice.runtime.errors import KubeError, NotFound, Stale
from sluice.runtime.events import Recorder
from sluice.runtime.executor import CREATION_WINDOW_S, CreationLog, Executor
from sluice.runtime.keys import SigningKeys
from sluice.runtime.kinds import Kind
from sluice.runtime.metrics import Metrics
from sluice.runtime.observer import Follower, agent_facts, asked_for
from sluice.runtime.queue import BACKOFF_CAP_S, Key, Queue
from sluice.runtime.routers import router_facts
from sluice.runtime.store import Store, View

log = logging.getLogger(__name__)

PASS_TIMEOUT_S: Final = 60.0
CONFLICT_PAUSE_S: Final = 25.0
"""When to look again at a name that is taken: nothing tells when the foreign object is gone."""
LIMIT_PAUSE_S: Final = 15.0
"""When to look again after the creation limit refused something; part of its window of a minute."""

Object = dict[str, Any]
TRANSIENT_CAP_S: Final = 30.0
"""Back-off of what fails by itself and heals by itself, an API server that is away above all."""

MAX_ROUNDS: Final = 4
"""Of one pass; more than any chain of steps that needs no word from outside. A service that never comes to rest gives
way to the others then."""

ROUNDS_SHARE: Final = 1 / 3
"""Part of a pass's time after which no round is begun: the status has to be written before the pass is stopped."""

PlanFunction = Callable[[ServiceSnapshot, float], Plan]
StatusFunction = Callable[[ServiceSnapshot, Plan, Sequence[Result], float], Object]


class StatusWriter(Protocol):
    async def apply_status(self, kind: Kind, body: Mapping[str, Any]) -> Object: ...
    async def get(self, kind: Kind, namespace: str, name: str) -> Object: ...


class Ended(StrEnum):
    """How a pass ended; all but SUCCESS come back with back-off."""

    SUCCESS = "success"
    REFUSED = "refused"
    """The API said no to something for good."""
    RETRY = "retry"
    """Something transient."""
    ERROR = "error"
    """A bug, or a pass that took too long."""


@dataclass(frozen=True, slots=True)
class _Round:
    """What one round of a pass saw, decided and did."""

    snapshot: ServiceSnapshot
    before: Mapping[str, Any]
    """The status that stands on the object."""
    plan: Plan
    results: tuple[Result, ...]
    now: float

    @property
    def goes_on(self) -> bool:
        """Something was done and nothing went wrong: what went wrong has to get into the status."""
        outcomes = {result.outcome for result in self.results}
        return Outcome.DONE in outcomes and outcomes <= {Outcome.DONE, Outcome.UNCHANGED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciler:
    """Runs passes; knows no kind but InferenceService."""

    store: Store
    queue: Queue
    executor: Executor
    client: StatusWriter
    agents: Follower[AgentState]
    routers: Follower[RouterState]
    recorder: Recorder
    metrics: Metrics
    creations: CreationLog
    keys: SigningKeys
    config: OperatorConfig
    plan: PlanFunction
    compute_status: StatusFunction
    wall_clock: Callable[[], float] = time.time
    uids: dict[Key, str] = field(default_factory=dict)
    """UID last seen per key, to forget what belongs to an object that is gone."""

    async def work(self) -> None:
        """One worker: passes one after the other until the queue is closed."""
        while (key := await self.queue.get()) is not None:
            started = monotonic()
            ended = Ended.ERROR
            try:
                async with asyncio.timeout(PASS_TIMEOUT_S):
                    ended = await self.run(key)
            except TimeoutError:
                log.error("%s %s/%s: the pass took over %.0f s and was stopped", *key, PASS_TIMEOUT_S)
            except Exception:  # the one place: a bug in one service's pass must not end the worker
                log.exception("%s %s/%s: the pass failed", *key)
            finally:
                cap_s = TRANSIENT_CAP_S if ended is Ended.RETRY else BACKOFF_CAP_S
                self.queue.done(key, ended is Ended.SUCCESS, backoff_cap_s=cap_s)
                self.metrics.reconciled(key[0], ended, monotonic() - started)

    async def run(self, key: Key) -> Ended:
        """One pass: rounds of looking, planning and acting while the last one did something, then the status.

        A round sees what the one before did (the store has the responses) and what it would have told: what failed is
        kept in status alone, and is gone from the pods once it was acted on. So the status is written once and right,
        and a step that follows at once does not wait behind other services.
        """
        told: Object | None = None
        started, left = monotonic(), MAX_ROUNDS
        while (view := self.store.view(key)) is not None:
            step = await self._round(key, view, told)
            told = None if step is None else await self._status(key, step)
            left -= 1
            if step is None or told is None:
                return Ended.ERROR
            if not step.goes_on or not left or monotonic() - started > PASS_TIMEOUT_S * ROUNDS_SHARE:
                return await self._conclude(key, step, told)
        self._forget(key)
        return Ended.SUCCESS

    async def _round(self, key: Key, view: View, told: Object | None) -> "_Round | None":
        """Plan and act once; None after a bug in the plan, which is told on the object.

        `told`: the status that the round before came to, not written yet.
        """
        self.uids[key] = str(view.service["metadata"]["uid"])
        self.agents.watch(key, view.pods)
        self.routers.watch(key, view.pods)
        before = view.service.get("status") or {}
        snapshot = self._snapshot(view if told is None else replace(view, service={**view.service, "status": told}))
        now = self.wall_clock()
        try:
            plan = self.plan(snapshot, now)
        except Exception as error:  # a bug: say so on the object, do nothing
            log.exception("%s %s/%s: planning failed", *key)
            await self._write_status(key, snapshot, before, internal_error_status(snapshot, error, now))
            return None
        results = await self.executor.run(snapshot.uid, plan.actions, recent_creations=snapshot.recent_creations)
        self._report(snapshot, plan, results)
        return _Round(snapshot, before, plan, results, now)

    async def _status(self, key: Key, step: "_Round") -> Object | None:
        """What the round would tell; None after a bug, which is told on the object."""
        try:
            return self.compute_status(step.snapshot, step.plan, step.results, step.now)
        except Exception as error:  # a bug again: what was done stays done, the condition says why no more is known
            log.exception("%s %s/%s: computing the status failed", *key)
            failed = internal_error_status(step.snapshot, error, step.now)
            await self._write_status(key, step.snapshot, step.before, failed)
            return None

    async def _conclude(self, key: Key, step: "_Round", status: Object) -> Ended:
        """Write the status of the last round and say when to look again."""
        plan, results = step.plan, step.results
        written = await self._write_status(key, step.snapshot, step.before, status)
        if any(result.outcome is Outcome.DONE for result in results):
            self.queue.add(key)  # the next step may follow from what was just done; the watch brings nothing new
        if plan.requeue_after_s is not None:
            self.queue.add_after(key, plan.requeue_after_s)
        return self._verdict(key, results) if written else Ended.RETRY

    def _snapshot(self, view: View) -> ServiceSnapshot:
        uid = str(view.service["metadata"]["uid"])
        after = self.wall_clock() - CREATION_WINDOW_S
        engines = (pod for pod in view.pods if pod.component == names.COMPONENT_ENGINE)
        young = sum(pod.created_at > after for pod in engines)
        return ServiceSnapshot(
            service=view.service,
            pods=view.pods,
            children=view.children,
            profiles=view.profiles,
            nodes=view.nodes,
            agents=agent_facts(self.agents, view.pods),
            routers=router_facts(self.routers, view.pods),
            asked_s=asked_for(self.agents, view.pods),
            config=self.config,
            signing_keys=self.keys.text,
            recent_creations=max(self.creations.recent(uid), young),
            others_rolling=self.store.rolling(without=uid),
            profiles_known=view.profiles_known,
            nodes_known=view.nodes_known,
        )

    def _forget(self, key: Key) -> None:
        self.agents.forget(key)
        self.routers.forget(key)
        self.queue.forget(key)
        uid = self.uids.pop(key, None)
        if uid is not None:
            self.recorder.forget(uid)

    def _report(self, snapshot: ServiceSnapshot, plan: Plan, results: Sequence[Result]) -> None:
        for event in (*plan.events, *outcome_events(results)):
            self.recorder.record(snapshot.service, event)
        for result in results:
            action = type(result.action).__name__
            self.metrics.acted(action, result.outcome)
            if result.outcome is Outcome.REFUSED:
                instance = getattr(result.action, "instance", "")
                event = Event(result.reason, result.message, warning=True, instance=instance, action=action)
                self.recorder.record(snapshot.service, event)
            if result.outcome in (Outcome.REFUSED, Outcome.FAILED):
                log.warning(
                    "%s/%s: %s %s: %s", snapshot.namespace, snapshot.name, action, result.reason, result.message
                )

    def _verdict(self, key: Key, results: Sequence[Result]) -> Ended:
        if any(result.outcome is Outcome.FAILED for result in results):
            return Ended.RETRY
        refused = [result for result in results if result.outcome is Outcome.REFUSED]
        if refused and all(result.reason == Reason.CREATION_LIMIT for result in refused):
            self.queue.add_after(key, LIMIT_PAUSE_S)
            return Ended.SUCCESS
        if any(result.reason == Reason.NAME_CONFLICT for result in refused):
            self.queue.add_after(key, CONFLICT_PAUSE_S)
        return Ended.REFUSED if refused else Ended.SUCCESS

    async def _write_status(
        self, key: Key, snapshot: ServiceSnapshot, before: Mapping[str, Any], status: Object
    ) -> bool:
        """Write the status if it differs from what stands there; False: not written, try again."""
        if status == before:
            return True
        meta = snapshot.service["metadata"]
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.SERVICE_KIND,
            "metadata": {
                "namespace": snapshot.namespace,
                "name": snapshot.name,
                "uid": snapshot.uid,
                "resourceVersion": meta["resourceVersion"],
            },
            "status": status,
        }
        try:
            self.store.apply("MODIFIED", await self.client.apply_status(kinds.INFERENCE_SERVICE, body))
        except (NotFound, Stale):
            return await self._refresh(key, snapshot)
        except KubeError as error:
            log.warning("%s/%s: status not written: %s", snapshot.namespace, snapshot.name, error)
            return False
        return True

    async def _refresh(self, key: Key, snapshot: ServiceSnapshot) -> bool:
        """The object changed under the pass: read it and look again at once."""
        try:
            live = await self.client.get(kinds.INFERENCE_SERVICE, snapshot.namespace, snapshot.name)
        except KubeError as error:
            # NotFound too: only the watch or a LIST says that a service is gone. An API server that has not heard of
            # a new CRD yet answers 404 for what exists, and what is forgotten here never comes back.
            log.warning("%s/%s: %s", snapshot.namespace, snapshot.name, error)
            return False
        else:
            self.store.apply("MODIFIED", live)
        self.queue.add(key)
        return True


def internal_error_status(snapshot: ServiceSnapshot, error: Exception, now: float) -> Object:
    """The present status with Reconciling=True/InternalError; everything else stays as it was."""
    status = dict(snapshot.status)
    conditions = list(status.get("conditions") or [])
    kind = ConditionType.RECONCILING
    previous = next((c for c in conditions if c.get("type") == kind), None)
    entry = condition(
        kind,
        True,
        Reason.INTERNAL_ERROR,
        f"a bug in the operator stops this service from being planned; running pods are left alone: "
        f"{type(error).__name__}: {error}",
        generation=snapshot.generation,
        now=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        previous=previous,
    )
    status["conditions"] = [c for c in conditions if c.get("type") != kind] + [entry]
    return status
