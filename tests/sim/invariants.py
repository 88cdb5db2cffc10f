"""What must hold after every step and before every write, whatever happened (docs/scenarios.md, "Properties").

Judged against the simulated truth, with what the operator could know taken into account: it is blamed for what it
does, never for what the world did a moment ago.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sluice.api import names
from sluice.api.agent import EnginePhase
from sluice.api.conditions import Reason
from sluice.api.router import WorkerList
from tests.fakeapi.disruption import is_ready
from tests.sim.client import Attempt

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

Object = dict[str, Any]


class ViolationError(AssertionError):
    """An invariant broke; the text says which, with the simulation's state."""


class Invariants:
    def __init__(self, sim: "Simulation") -> None:
        self._sim = sim
        self.strict_availability = True
        """Off where the world itself takes instances away: the operator can't know of a loss at once."""
        self.moves = False
        """Instances may have to leave their node: one replacement more than `maxSurge` 0 allows."""
        self.created: list[str] = []
        """Names of engine pods in the order of their creation."""

    def before(self, attempt: Attempt) -> None:
        """A write is about to be committed."""
        if attempt.verb == "put":
            self._routes_only_those_who_stay(attempt)
        elif attempt.kind == "Pod" and attempt.verb == "delete":
            self._deletes_only_what_is_drained(attempt)
        elif attempt.kind == "Pod" and attempt.verb == "create":
            self._stays_inside_the_surge(attempt)
        elif attempt.kind == "Pod" and attempt.verb == "patch" and not attempt.subresource:
            self._keeps_enough_available(attempt)
        elif attempt.kind == names.SERVICE_KIND:
            self._says_nothing_untrue(attempt)

    def after(self, attempt: Attempt) -> None:
        if attempt.kind == "Pod" and attempt.verb == "create":
            self.created.append(attempt.name)

    def after_step(self) -> None:
        self._one_instance_per_index()
        self._routed_engines_answer()

    # 1: routing

    def _routes_only_those_who_stay(self, attempt: Attempt) -> None:
        """No list that the operator sends names an instance that the operator knows to leave."""
        assert isinstance(attempt.body, WorkerList)
        known = {pod.instance: pod for pod in self._known_pods(attempt.namespace)}
        for worker in attempt.body.workers:
            pod = known.get(worker.id)
            if pod is None or pod.deletion_at is not None or pod.drain_started_at is not None:
                self._fail(f"{worker.id} is routed although it leaves or is gone")

    def _routed_engines_answer(self) -> None:
        """Whatever a router sends requests to has answered a real inference in this engine run."""
        now = self._sim.now
        for router in self._sim.world.routers.values():
            for url in self._sim.world.routed_urls(router, now):
                engine = self._sim.world.at(url.removeprefix("http://").partition(":")[0])
                if engine is None:
                    self._fail(f"{router.name} routes to {url}, where nobody is")

    def _deletes_only_what_is_drained(self, attempt: Attempt) -> None:
        """An instance leaves the routers, and its requests end, before its pod is told to stop."""
        pod = self._pod(attempt)
        if pod is None or "deletionTimestamp" in pod["metadata"] or self._is_dead(pod):
            return
        engine = self._sim.engine(pod)
        if engine is None or self._deadline_is_over(pod):
            return
        if self._sim.is_routed(pod):
            self._fail(f"{attempt.name} is deleted while a router still sends requests to it")
        if engine.in_flight and not engine.silent and engine.phase(self._sim.now) is not EnginePhase.HUNG:
            self._fail(f"{attempt.name} is deleted with {engine.in_flight} requests in flight before the deadline")

    def _deadline_is_over(self, pod: Object) -> bool:
        notes = pod["metadata"].get("annotations") or {}
        started = next((p.drain_started_at for p in self._known_pods() if p.name == pod["metadata"]["name"]), None)
        if names.ANNOTATION_DRAIN_STARTED_AT not in notes or started is None:
            return False
        if notes.get(names.ANNOTATION_DRAIN_REASON) == "NodeLost":
            return True
        service = self._service_of(pod)
        timeout = service["spec"]["drain"]["timeoutSeconds"] if service else 0
        return bool(self._sim.now >= started + timeout)

    # 2: availability and surge

    def _keeps_enough_available(self, attempt: Attempt) -> None:
        notes = self._mapping(attempt.body).get("metadata", {}).get("annotations") or {}
        pod = self._pod(attempt)
        if not self.strict_availability or pod is None or not notes.get(names.ANNOTATION_DRAIN_STARTED_AT):
            return
        service = self._service_of(pod)
        if service is None or service["spec"].get("suspend") or not self._sim.is_available(pod):
            return
        if not is_ready(pod):
            return  # its gate never opened: to the operator it does not serve yet
        name = pod["metadata"]["labels"][names.LABEL_POOL]
        known = self._known_service(service)
        desired = [self._desired(s, name) for s in (service, known) if s is not None]
        if not desired or min(desired) == 0 or any(s and s["spec"].get("suspend") for s in (service, known)):
            return
        floor = min(desired) - max(self._budget(s, "maxUnavailable") for s in (service, known) if s is not None)
        available = sum(self._sim.is_available(p) for p in self._pods_of(service, name))
        if available - 1 < floor:
            self._fail(f"draining {attempt.name} leaves {available - 1} of {min(desired)} instances available")

    def _stays_inside_the_surge(self, attempt: Attempt) -> None:
        body = self._mapping(attempt.body)
        labels = body["metadata"]["labels"]
        if labels.get(names.LABEL_COMPONENT) != names.COMPONENT_ENGINE:
            return
        service = self._service_of({"metadata": {"labels": labels}})
        if service is None:
            return
        pool = labels[names.LABEL_POOL]
        known = self._known_service(service) or service
        known_pods = {p.uid for p in self._known_pods() if p.deletion_at is None and p.drain_started_at is None}
        live = [
            p
            for p in self._pods_of(service, pool)
            if p["metadata"]["uid"] in known_pods and not self._is_dead(p) and not self._is_lost(p)
        ]
        limit = self._desired(known, pool) + max(self._budget(known, "maxSurge"), int(self.moves))
        if attempt.name not in {p["metadata"]["name"] for p in live} and len(live) + 1 > limit:
            names_of = [p["metadata"]["name"] for p in live]
            self._fail(f"creating {attempt.name} makes {len(live) + 1} live instances, at most {limit}: {names_of}")

    def _one_instance_per_index(self) -> None:
        seen: dict[tuple[str, ...], str] = {}
        for pod in self._sim.engine_pods(leaving=False):
            labels = pod["metadata"]["labels"]
            if self._is_dead(pod) or self._is_lost(pod):
                continue
            place = tuple(labels.get(key, "") for key in (names.LABEL_SERVICE_UID, names.LABEL_POOL, names.LABEL_INDEX))
            name = pod["metadata"]["name"]
            if place in seen:
                self._fail(f"{name} and {seen[place]} are the same instance of the pool")
            seen[place] = name

    # 8: status

    def _says_nothing_untrue(self, attempt: Attempt) -> None:
        body = self._mapping(attempt.body)
        live = self._sim.service(attempt.name)
        if body["metadata"].get("resourceVersion") != live["metadata"]["resourceVersion"]:
            return  # will be refused
        status = body["status"]
        conditions = {c["type"]: c for c in status.get("conditions") or []}
        for c in conditions.values():
            if c["reason"] == Reason.INTERNAL_ERROR:
                self._fail(f"planning failed: {c['message']}")
            if not c["reason"] or (c["status"] != "True" and not c["message"]):
                self._fail(f"condition without a reason or message: {c}")
        if _is_true(conditions, "Reconciling") and _is_true(conditions, "Stalled"):
            self._fail("Reconciling and Stalled are both True")
        if status.get("observedGeneration") != live["metadata"]["generation"]:
            self._fail(f"status says generation {status.get('observedGeneration')}")
        if _is_true(conditions, "Ready") and any(
            c["observedGeneration"] != live["metadata"]["generation"] for c in conditions.values()
        ):
            self._fail("Ready=True with a condition of another generation")
        if _is_true(conditions, "RolloutComplete"):
            revisions = {
                (p.pool, p.revision)
                for p in self._known_pods(attempt.namespace)
                if p.service_uid == live["metadata"]["uid"]
                and p.component == names.COMPONENT_ENGINE
                and p.phase not in ("Failed", "Succeeded")
            }
            pools = [pool for pool, _ in revisions]
            if len(pools) != len(set(pools)):
                self._fail(f"RolloutComplete with pods of several revisions: {sorted(revisions)}")

    # Looking things up

    def _known_pods(self, namespace: str = "") -> "list[Any]":
        """Pods as the operator's store has them."""
        operator = self._sim.running
        views = [operator.store.view(key) for key in operator.store.services()]
        pods = [pod for view in views if view is not None for pod in view.pods]
        return [pod for pod in pods if not namespace or pod.namespace == namespace]

    def _known_service(self, service: Object) -> Object | None:
        meta = service["metadata"]
        view = self._sim.running.store.view((names.SERVICE_KIND, meta["namespace"], meta["name"]))
        return dict(view.service) if view is not None else None

    def _pod(self, attempt: Attempt) -> Object | None:
        pods = self._sim.cluster.objects("pods", namespace=attempt.namespace)
        return next((p for p in pods if p["metadata"]["name"] == attempt.name), None)

    def _pods_of(self, service: Object, pool: str) -> list[Object]:
        uid = service["metadata"]["uid"]
        return [
            p
            for p in self._sim.engine_pods()
            if p["metadata"]["labels"].get(names.LABEL_SERVICE_UID) == uid
            and p["metadata"]["labels"].get(names.LABEL_POOL) == pool
        ]

    def _service_of(self, pod: Object) -> Object | None:
        uid = pod["metadata"]["labels"].get(names.LABEL_SERVICE_UID)
        return next((s for s in self._sim.services() if s["metadata"]["uid"] == uid), None)

    def _is_dead(self, pod: Object) -> bool:
        return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")

    def _is_lost(self, pod: Object) -> bool:
        return pod["spec"].get("nodeName") in self._sim.machinery.stopped_nodes

    @staticmethod
    def _desired(service: Object, pool: str) -> int:
        pools = service["spec"]["pools"]
        return next((int(p["replicas"]) for p in pools if p["name"] == pool), 0)

    @staticmethod
    def _budget(service: Object, key: str) -> int:
        return int(service["spec"]["rollout"].get(key) or 0)

    @staticmethod
    def _mapping(body: Mapping[str, Any] | WorkerList) -> Mapping[str, Any]:
        assert isinstance(body, Mapping)
        return body

    def _fail(self, what: str) -> None:
        raise ViolationError(f"{what}\n{self._sim.report()}")


def _is_true(conditions: Mapping[str, Object], kind: str) -> bool:
    return conditions.get(kind, {}).get("status") == "True"
