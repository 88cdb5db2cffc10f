"""A whole simulated cluster with one operator: the API core, played pods and controllers, and a clock of its own.

Everything happens through methods, one thing at a time, so a seeded driver or a scenario decides the order. Each step
is followed by the invariants; each write of the operator is checked before it is committed.
"""

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sluice.api import names
from sluice.api.agent import EnginePhase
from sluice.api.config import OperatorConfig
from sluice.runtime import kinds
from tests.fakeapi import collector, crds
from tests.fakeapi.cluster import FakeCluster, Options
from tests.fakeapi.contract import a_service
from tests.fakeapi.disruption import is_ready
from tests.played.controllers import Machinery
from tests.played.pods import is_engine, is_router
from tests.played.world import PlayedEngine, PlayedRouter, World
from tests.sim.client import Attempt, Crash
from tests.sim.invariants import Invariants
from tests.sim.operator import SimOperator

Object = dict[str, Any]

NAMESPACE = "sim"
START = 1_800_000_000.0
USER = Options(manager="user")
SETTLE_S = 3 * 3600.0
"""Simulated time within which everything must have converged once nothing goes wrong any more."""
_HASH_SUFFIX = re.compile(r"-[0-9a-f]{8}\b")


def nothing(attempt: Attempt) -> None:
    """The hook that does nothing."""
    del attempt


class NotConvergedError(AssertionError):
    """The cluster did not come to rest; the text says what is missing."""


class Simulation:
    def __init__(self, *, seed: int | str = 0, load_s: float = 0.0, config: OperatorConfig | None = None) -> None:
        self.rng = random.Random(seed)
        self.now = START
        self.config = config or OperatorConfig()
        self.log: list[str] = []
        self.loop = asyncio.new_event_loop()
        self.cluster = crds.install(FakeCluster(clock=self.clock))
        self.cluster.create(self.cluster.resource("", "namespaces"), "", {"metadata": {"name": NAMESPACE}})
        self.world = World(clock=self.clock, load_s=load_s)
        self.machinery = Machinery(self.cluster, self.world)
        self.invariants = Invariants(self)
        self.before_write: Callable[[Attempt], None] = nothing
        """May raise Crash or an ApiError-made KubeError; called after the invariants saw the attempt."""
        self.after_write: Callable[[Attempt], None] = nothing
        self.operator: SimOperator | None = None

    def clock(self) -> float:
        return self.now

    def close(self) -> None:
        self.loop.close()

    def say(self, text: str) -> None:
        self.log.append(f"{self.now - START:7.1f}  {text}")

    # The operator's life

    def start_operator(self, config: OperatorConfig | None = None) -> SimOperator:
        self.config = config or self.config
        self.say("operator starts")
        self.operator = SimOperator(
            self.cluster,
            self.world,
            self.loop,
            clock=self.clock,
            before=self._before,
            after=self._after,
            config=self.config,
        )
        return self.operator

    def kill_operator(self) -> None:
        if self.operator is not None:
            self.operator.close()
            self.operator = None
            self.say("operator is killed")

    @property
    def running(self) -> SimOperator:
        assert self.operator is not None, "no operator runs"
        return self.operator

    def run_pass(self) -> bool:
        """One pass, if a key waits; a Crash out of it ends the operator. True if a pass ran."""
        try:
            return self.running.run_one() is not None
        except (Crash, BaseExceptionGroup) as error:
            cause = _first(error)
            if not isinstance(cause, Crash):
                raise cause from error
            self.kill_operator()
            return True

    def _before(self, attempt: Attempt) -> None:
        self.invariants.before(attempt)
        self.before_write(attempt)

    def _after(self, attempt: Attempt) -> None:
        self.say(f"operator: {describe(attempt)}")
        self.invariants.after(attempt)
        self.after_write(attempt)

    # The user's doings

    def create_service(self, name: str = "demo", *, replicas: int = 1, **spec: Any) -> Object:
        self.say(f"user creates {name} with {replicas} replicas")
        body = a_service(name, NAMESPACE, replicas=replicas, spec={"drain": {"timeoutSeconds": 60}, **spec})
        return self.cluster.create(self._services, NAMESPACE, body, Options("user", strict=True))

    def edit_service(self, patch: Object, name: str = "demo") -> Object:
        """Merge patch on the spec."""
        self.say(f"user edits {name}: {patch}")
        return self.cluster.patch(self._services, NAMESPACE, name, {"spec": patch}, options=USER)

    def scale(self, replicas: int, name: str = "demo") -> None:
        pools = [{**pool, "replicas": replicas} for pool in self.service(name)["spec"]["pools"]]
        self.edit_service({"pools": pools}, name)

    def delete_service(self, name: str = "demo") -> None:
        self.say(f"user deletes {name}")
        self.cluster.delete(self._services, NAMESPACE, name, {"propagationPolicy": "Background"}, USER)

    @property
    def _services(self) -> Any:
        return self.cluster.resource(names.GROUP, names.SERVICE_PLURAL)

    # What is there

    def services(self) -> list[Object]:
        return self.cluster.objects(names.SERVICE_PLURAL, names.GROUP, NAMESPACE)

    def service(self, name: str = "demo") -> Object:
        return self.cluster.get(self._services, NAMESPACE, name)

    def condition(self, kind: str, name: str = "demo") -> Object:
        """The condition of this type; {} while there is none."""
        conditions = self.service(name).get("status", {}).get("conditions") or []
        return next((c for c in conditions if c["type"] == kind), {})

    def engine_pods(self, *, leaving: bool | None = None) -> list[Object]:
        """Engine pods of all services; only those that (do not) leave if told so."""
        pods = [pod for pod in self.cluster.objects("pods", namespace=NAMESPACE) if is_engine(pod)]
        return [pod for pod in pods if leaving is None or is_leaving(pod) == leaving]

    def router_pods(self) -> list[Object]:
        return [pod for pod in self.cluster.objects("pods", namespace=NAMESPACE) if is_router(pod)]

    def engine(self, pod: Object) -> PlayedEngine | None:
        return self.world.engines.get(pod["metadata"]["uid"])

    def taking_routers(self, service_uid: str) -> Iterator[PlayedRouter]:
        """Routers that the Service sends new requests to."""
        for pod in self.router_pods():
            played = self.world.routers.get(pod["metadata"]["uid"])
            mine = pod["metadata"]["labels"].get(names.LABEL_SERVICE_UID) == service_uid
            if played is not None and mine and is_ready(pod) and "deletionTimestamp" not in pod["metadata"]:
                yield played

    def is_routed(self, pod: Object) -> bool:
        """Some router that takes requests would send one to this engine."""
        ip = ip_of(pod)
        return bool(ip) and any(url_of(ip) in urls for urls in self._routed_urls(pod))

    def is_available(self, pod: Object) -> bool:
        """Serving in truth: every router that takes requests sends them here, and the pod doesn't leave."""
        ip = ip_of(pod)
        urls = self._routed_urls(pod)
        return bool(ip and urls) and all(url_of(ip) in listed for listed in urls) and not is_leaving(pod)

    def _routed_urls(self, pod: Object) -> list[set[str]]:
        uid = pod["metadata"]["labels"].get(names.LABEL_SERVICE_UID, "")
        return [self.world.routed_urls(router, self.now) for router in self.taking_routers(uid)]

    # Requests

    def send_request(self, service: Object) -> bool:
        """One request through a random open router. False: there was nowhere to send it."""
        routers = list(self.taking_routers(service["metadata"]["uid"]))
        if not routers:
            return False
        urls = sorted(self.world.routed_urls(self.rng.choice(routers), self.now))
        if not urls:
            return False
        engine = self.world.at(self.rng.choice(urls).removeprefix("http://").partition(":")[0])
        assert isinstance(engine, PlayedEngine)
        if engine.phase(self.now) is EnginePhase.LOADING:
            return False  # the process was restarted a moment ago: connection refused, the router tries another
        engine.in_flight += 1
        return True

    def finish_request(self) -> bool:
        busy = [engine for engine in self.world.engines.values() if engine.in_flight]
        if not busy:
            return False
        self.rng.choice(sorted(busy, key=lambda e: e.uid)).in_flight -= 1
        return True

    # Time and rest

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def settle(self, *, until: Callable[[], bool] | None = None, within_s: float = SETTLE_S) -> None:
        """Let everything run in a fair order until nothing moves, or until `until` holds.

        Raises:
            NotConvergedError: after `within_s` simulated seconds.
        """
        end = self.now + within_s
        quiet = 0
        while self.now < end:
            if until is not None and until():
                return
            if self._round():
                quiet = 0
                continue
            quiet += 1
            if until is None and quiet > 20:
                return
            self.advance(1.0 if quiet < 10 else 10.0)
        raise NotConvergedError(f"not converged within {within_s:.0f} simulated seconds\n{self.report()}")

    def _round(self) -> bool:
        """Everything that can happen now, once. True if the API changed."""
        before = self.cluster.storage.rv
        self.machinery.settle()
        self.after_step()
        if self.operator is not None:
            for kind in self.operator.undelivered():
                while self.operator.pending[kind.name]:
                    self.operator.deliver(kind)
            self.operator.poll_all()
            for _ in range(50):
                if self.operator is None or not self.run_pass():
                    break
                self.after_step()
        return self.cluster.storage.rv != before

    def heal_views(self) -> None:
        """What the five-minute refresh does."""
        self.running.relist_all()

    def after_step(self) -> None:
        self.invariants.after_step()

    def collect_garbage(self) -> None:
        collector.collect_all(self.cluster)

    @contextmanager
    def writing_nothing(self) -> Iterator[None]:
        """The operator must not write inside the block."""
        mark = len(self.cluster.audit)
        yield
        written = self.cluster.writes(since=mark, manager=names.FIELD_MANAGER, changed=False)
        assert not written, f"writes in steady state: {written}"

    def report(self) -> str:
        """State for a failing test."""
        lines = []
        for service in self.services():
            lines.append(f"service {service['metadata']['name']} generation {service['metadata']['generation']}")
            for c in service.get("status", {}).get("conditions") or []:
                lines.append(f"  {c['type']}={c['status']} {c['reason']}: {c['message']}")
        for pod in [*self.engine_pods(), *self.router_pods()]:
            engine = self.engine(pod)
            phase = engine.phase(self.now) if engine else "-"
            lines.append(
                f"pod {short(pod['metadata']['name'])} {(pod.get('status') or {}).get('phase')} engine={phase} "
                f"leaving={is_leaving(pod)} available={self.is_available(pod)} ready={is_ready(pod)} "
                f"node={pod['spec'].get('nodeName')}"
            )
        if self.operator is not None:
            lines.append(f"queue depth {self.operator.queue.depth()}, next due {self.operator.queue.next_due()}")
        return "\n".join([*lines, "last steps:", *self.log[-60:]])


def is_leaving(pod: Object) -> bool:
    meta = pod["metadata"]
    return "deletionTimestamp" in meta or names.ANNOTATION_DRAIN_STARTED_AT in (meta.get("annotations") or {})


def is_dead(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def ip_of(pod: Object) -> str:
    return str((pod.get("status") or {}).get("podIP") or "")


def url_of(ip: str) -> str:
    return f"http://{ip}:8000"


def short(name: str) -> str:
    """A derived name without its hash."""
    return _HASH_SUFFIX.sub("", name)


def describe(attempt: Attempt) -> str:
    """One readable line about a write."""
    target = f"{attempt.kind} {short(attempt.name)}"
    body = attempt.body
    if attempt.verb == "put":
        workers = [short(worker.id) for worker in body.workers]  # type: ignore[union-attr]  # a put carries a WorkerList
        return f"workers of {target.removeprefix('Workers ')}: {workers}"
    assert isinstance(body, dict)
    if attempt.kind == names.SERVICE_KIND and attempt.subresource == "status":
        shown = {c["type"]: c["status"] for c in body["status"].get("conditions", [])}
        reasons = {c["type"]: c["reason"] for c in body["status"].get("conditions", [])}
        return f"status of {attempt.name}: Ready={shown.get('Ready')}/{reasons.get('Ready')}"
    if attempt.kind == kinds.POD.name and attempt.subresource == "status":
        gate = body["status"]["conditions"][0]
        return f"gate of {target} {gate['status']} ({gate['reason']})"
    if attempt.kind == kinds.POD.name and attempt.verb == "patch":
        notes = body["metadata"].get("annotations") or {}
        reason = notes.get(names.ANNOTATION_DRAIN_REASON)
        return f"drain of {target} starts ({reason})" if reason else f"annotate {target}"
    return f"{attempt.verb} {target}"


def _first(error: BaseException) -> BaseException:
    """The first error inside (nested) groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
