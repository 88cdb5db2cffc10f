"""A seeded random life of a cluster: edits, crashes, lost and late events, dying pods, silent agents, then calm.

A profile says what may go wrong. After the storm everything is repaired, and the cluster has to converge: all desired
instances serve on the newest revision, nothing is left over, an operator restart writes nothing, a deletion ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sluice.api import names
from sluice.runtime import kinds
from tests.fakeapi.cluster import STRATEGIC_PATCH, Options
from tests.fakeapi.disruption import is_ready
from tests.fakeapi.errors import ApiError
from tests.fakeapi.faults import unavailable
from tests.played.world import Mood, PlayedEngine, PlayedRouter
from tests.sim.client import Attempt, Crash
from tests.sim.simulation import NAMESPACE, NotConvergedError, Simulation, is_dead, is_leaving, nothing

Object = dict[str, Any]

KUBELET = Options(manager="kubelet")
CALM_EDITS = {"suspend": False, "rollout": {"paused": False}}


@dataclass(frozen=True, slots=True)
class Profile:
    """What the storm may do, beside letting time pass, events arrive, polls happen and passes run."""

    name: str
    steps: int = 250
    edits: bool = True
    crashes: bool = True
    """The operator dies, between passes and at any write of one."""
    unreliable_watch: bool = True
    """Events are lost, late or repeated."""
    api_errors: bool = False
    silence: bool = False
    """Agents and routers stop answering for a while."""
    losses: bool = False
    """Engines fail, pods are deleted and evicted, nodes go away."""
    moves: bool = False
    """Nodes are cordoned and uncordoned, drains are asked for and taken back."""
    requests: bool = True


PROFILES = (
    Profile("edits"),
    Profile("silence", silence=True),
    Profile("losses", losses=True),
    Profile("moves", moves=True),
    Profile("everything", silence=True, losses=True, api_errors=True, moves=True),
)


@dataclass(eq=False)
class Storm:
    """One run: `go()` does everything and raises with the log when something doesn't hold."""

    seed: int
    profile: Profile
    sim: Simulation = field(init=False)

    def __post_init__(self) -> None:
        self.sim = Simulation(seed=f"{self.profile.name} {self.seed}", load_s=5.0)
        self.rng = self.sim.rng
        self.sim.invariants.strict_availability = not (self.profile.losses or self.profile.silence)
        self.sim.invariants.moves = self.profile.moves
        self._version = 0

    def go(self) -> None:
        sim = self.sim
        try:
            sim.start_operator()
            sim.create_service(replicas=self.rng.randint(1, 4), rollout=self._a_rollout())
            if self.rng.random() < 0.6:
                sim.settle(until=self._is_converged)
            sim.before_write, sim.after_write = self._maybe_break, self._maybe_crash
            for _ in range(self.profile.steps):
                self._step()
                sim.after_step()
            self._calm()
            self._restart_changes_nothing()
            self._deletion_ends()
        except AssertionError as error:
            raise AssertionError(f"{self._name}: {error}") from error
        finally:
            sim.close()

    @property
    def _name(self) -> str:
        return f"seed {self.seed}, profile {self.profile.name}"

    # The storm

    def _step(self) -> None:
        steps = [step for step in self._steps() if step[0] > 0]
        weights = [weight for weight, _ in steps]
        self.rng.choices([step for _, step in steps], weights)[0]()

    def _steps(self) -> list[tuple[float, Callable[[], None]]]:
        p = self.profile
        if self.sim.operator is None:
            return [(3, self._start), (4, self._machinery), (2, self._time), (2 * p.requests, self._request)]
        return [
            (12, self._deliver),
            (12, self._pass),
            (10, self._machinery),
            (6, self._poll),
            (6, self._time),
            (6 * p.requests, self._request),
            (6 * p.requests, self._answer),
            (1, self._relist),
            (2 * p.edits, self._edit),
            (0.7 * p.crashes, self.sim.kill_operator),
            (2 * p.unreliable_watch, self._bad_delivery),
            (2 * p.silence, self._silence),
            (2 * p.losses, self._loss),
            (2 * p.moves, self._move),
        ]

    def _start(self) -> None:
        self.sim.start_operator()

    def _deliver(self) -> None:
        waiting = self.sim.running.undelivered()
        if waiting:
            self.sim.running.deliver(self.rng.choice(waiting))

    def _bad_delivery(self) -> None:
        operator = self.sim.running
        waiting = operator.undelivered()
        if waiting and self.rng.random() < 0.5:
            kind = self.rng.choice(waiting)
            event = operator.lose(kind)
            self.sim.say(f"lost: {event.type} {kind.name} {event.object['metadata']['name']}")
        elif operator.seen:
            operator.hand_over(self.rng.choice(operator.seen))

    def _relist(self) -> None:
        self.sim.running.relist(self.rng.choice(kinds.WATCHED))

    def _pass(self) -> None:
        self.sim.run_pass()

    def _machinery(self) -> None:
        if self.rng.random() < 0.3:
            self.sim.machinery.settle()
        else:
            self.sim.machinery.round()

    def _poll(self) -> None:
        operator = self.sim.running
        for follower in (operator.agents, operator.routers):
            for uid in follower.followed():
                if self.rng.random() < 0.7:
                    follower.poll(uid)

    def _time(self) -> None:
        self.sim.advance(self.rng.choice([0.1, 0.5, 1.0, 2.0, 5.0, 5.0, 20.0]))

    def _request(self) -> None:
        for service in self.sim.services():
            self.sim.send_request(service)

    def _answer(self) -> None:
        self.sim.finish_request()

    def _edit(self) -> None:
        kind = self.rng.choice(["replicas", "replicas", "args", "args", "budget", "paused", "suspend", "routers"])
        match kind:
            case "replicas":
                self.sim.scale(self.rng.randint(0, 5))
            case "args":
                self._version += 1
                self.sim.edit_service({"engine": {"args": [f"--seed={self._version % 3}"]}})
            case "budget":
                self.sim.edit_service({"rollout": self._a_rollout()})
            case "paused":
                self.sim.edit_service({"rollout": {"paused": self.rng.random() < 0.4}})
            case "suspend":
                self.sim.edit_service({"suspend": self.rng.random() < 0.3})
            case "routers":
                self.sim.edit_service({"routing": {"replicas": self.rng.randint(1, 3)}})

    def _a_rollout(self) -> Object:
        surge = self.rng.choice([0, 1, 1, 2])
        return {"maxSurge": surge, "maxUnavailable": self.rng.choice([1, 2]) if not surge else self.rng.randint(0, 1)}

    def _silence(self) -> None:
        programs: list[PlayedEngine | PlayedRouter] = [
            *self.sim.world.engines.values(),
            *self.sim.world.routers.values(),
        ]
        if programs:
            program = self.rng.choice(programs)
            program.silent = not program.silent
            self.sim.say(f"{program.ip} {'falls silent' if program.silent else 'answers again'}")

    def _loss(self) -> None:
        losses = (
            self._crash_engine,
            self._fail_pod,
            self._delete_pod,
            self._evict,
            self._mood,
            self._node,
            self._kill_router,
        )
        self.rng.choice(losses)()

    # Moves

    def _move(self) -> None:
        pod = self._some_pod()
        match self.rng.choice(["cordon", "uncordon", "ask", "take back"]):
            case "cordon":
                node = self.rng.choice(self.sim.machinery.nodes)
                self.sim.say(f"node {node} is cordoned")
                self.sim.machinery.cordon(node)
            case "uncordon":
                self._uncordon()
            case "ask" if pod:
                self._ask(pod, "x")
            case "take back" if pod:
                self._ask(pod, None)

    def _uncordon(self) -> None:
        for node in sorted(self.sim.machinery.cordoned()):
            self.sim.say(f"node {node} is uncordoned")
            self.sim.machinery.cordon(node, on=False)

    def _ask(self, pod: Object, value: str | None) -> None:
        """A user asks for a drain, or (None) takes that back."""
        notes = pod["metadata"].get("annotations") or {}
        if (names.ANNOTATION_DRAIN_REQUESTED in notes) == (value is not None):
            return
        name = pod["metadata"]["name"]
        self.sim.say(f"user {'asks to drain' if value else 'takes back the drain of'} {name}")
        patch = {"metadata": {"annotations": {names.ANNOTATION_DRAIN_REQUESTED: value}}}
        resource = self.sim.cluster.resource("", "pods")
        self.sim.cluster.patch(resource, NAMESPACE, name, patch, options=Options("user"))

    # Losses

    def _some_pod(self) -> Object | None:
        pods = self.sim.engine_pods()
        return self.rng.choice(pods) if pods else None

    def _crash_engine(self) -> None:
        pod = self._some_pod()
        engine = self.sim.engine(pod) if pod else None
        if engine is not None:
            self.sim.say(f"engine of {engine.instance} crashes")
            engine.restart(self.sim.now)

    def _fail_pod(self) -> None:
        pod = self._some_pod()
        if pod and pod["spec"].get("nodeName") and not is_dead(pod):
            self._report(pod, {"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"})
            self.sim.say(f"pod {pod['metadata']['name']} fails")
            self.sim.world.stop(pod["metadata"]["uid"])

    def _report(self, pod: Object, status: Object) -> None:
        resource = self.sim.cluster.resource("", "pods")
        ready = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "False"}]
        self.sim.cluster.patch(
            resource,
            NAMESPACE,
            pod["metadata"]["name"],
            {"status": {**status, "conditions": ready}},
            patch_type=STRATEGIC_PATCH,
            subresource="status",
            options=KUBELET,
        )

    def _delete_pod(self) -> None:
        pod = self._some_pod()
        if pod:
            self.sim.say(f"somebody deletes pod {pod['metadata']['name']}")
            resource = self.sim.cluster.resource("", "pods")
            self.sim.cluster.delete(resource, NAMESPACE, pod["metadata"]["name"], None, Options("user"))

    def _evict(self) -> None:
        pod = self._some_pod()
        if pod:
            try:
                self.sim.cluster.evict(NAMESPACE, pod["metadata"]["name"], {}, Options("drainer"))
                self.sim.say(f"pod {pod['metadata']['name']} is evicted")
            except ApiError as error:
                if error.code not in (404, 429):
                    raise

    def _mood(self) -> None:
        engines = list(self.sim.world.engines.values())
        if engines:
            engine = self.rng.choice(engines)
            engine.mood = self.rng.choice([Mood.WELL, Mood.SUSPECT, Mood.HUNG])
            self.sim.say(f"engine of {engine.instance} is {engine.mood}")

    def _node(self) -> None:
        stopped = self.sim.machinery.stopped_nodes
        if stopped:
            self._node_returns()
        else:
            node = self.rng.choice(self.sim.machinery.nodes)
            stopped.add(node)
            self.sim.machinery.report_node(node, ready="Unknown")
            self.sim.say(f"node {node} is lost")
            for program in self._programs_on(node):
                program.silent = True

    def _node_returns(self) -> None:
        for node in sorted(self.sim.machinery.stopped_nodes):
            self.sim.machinery.stopped_nodes.discard(node)
            self.sim.machinery.report_node(node, ready="True")
            self.sim.say(f"node {node} returns")
            for program in self._programs_on(node):
                program.silent = False

    def _programs_on(self, node: str) -> list[Any]:
        pods = [*self.sim.engine_pods(), *self.sim.router_pods()]
        uids = [pod["metadata"]["uid"] for pod in pods if pod["spec"].get("nodeName") == node]
        everyone = {**self.sim.world.engines, **self.sim.world.routers}
        return [everyone[uid] for uid in uids if uid in everyone]

    def _kill_router(self) -> None:
        pods = self.sim.router_pods()
        if pods:
            name = self.rng.choice(pods)["metadata"]["name"]
            self.sim.say(f"router pod {name} is deleted")
            resource = self.sim.cluster.resource("", "pods")
            self.sim.cluster.delete(resource, NAMESPACE, name, {"gracePeriodSeconds": 0}, Options("user"))

    # What befalls the operator's writes

    def _maybe_break(self, attempt: Attempt) -> None:
        if self.profile.crashes and self.rng.random() < 0.015:
            self.sim.say(f"crash before {attempt.verb} {attempt.kind}")
            raise Crash
        if self.profile.api_errors and attempt.verb != "put" and self.rng.random() < 0.03:
            self.sim.say(f"the API server answers 503 to {attempt.verb} {attempt.kind}")
            kind = kinds.BY_NAME[attempt.kind]
            raise self.sim.running.client.error(attempt.verb, kind, attempt.name, unavailable())

    def _maybe_crash(self, attempt: Attempt) -> None:
        if self.profile.crashes and self.rng.random() < 0.015:
            self.sim.say(f"crash after {attempt.verb} {attempt.kind}")
            raise Crash

    # Calm

    def _calm(self) -> None:
        """Repair everything; then it has to converge."""
        sim = self.sim
        sim.say("-- calm --")
        sim.before_write = sim.after_write = nothing
        self._node_returns()
        self._uncordon()
        for pod in sim.engine_pods():
            self._ask(pod, None)
        if sim.operator is None:
            sim.start_operator()
        for engine in sim.world.engines.values():
            engine.silent, engine.mood, engine.in_flight = False, Mood.WELL, 0
        for router in sim.world.routers.values():
            router.silent = False
        sim.edit_service(CALM_EDITS)
        sim.heal_views()
        sim.settle(until=self._is_converged)
        sim.settle()
        if not self._is_converged():
            raise NotConvergedError(f"it converged and left again\n{sim.report()}")

    def _is_converged(self) -> bool:
        sim = self.sim
        service = sim.service()
        desired = sum(pool["replicas"] for pool in service["spec"]["pools"])
        pods = sim.engine_pods()
        revisions = {pod["metadata"]["labels"][names.LABEL_REVISION] for pod in pods}
        routers = sim.router_pods()
        return (
            len(pods) == desired
            and all(sim.is_available(pod) for pod in pods)
            and len(revisions) <= 1
            and len(routers) == service["spec"]["routing"]["replicas"]
            and all(is_ready(router) or not desired for router in routers)
            and sim.condition("Ready").get("status") == "True"
            and sim.condition("RolloutComplete").get("status") == "True"
            and not any(is_leaving(pod) for pod in pods)
        )

    def _restart_changes_nothing(self) -> None:
        sim = self.sim
        with sim.writing_nothing():
            sim.kill_operator()
            sim.start_operator()
            sim.settle()

    def _deletion_ends(self) -> None:
        sim = self.sim
        present = self.rng.random() < 0.7
        if not present:
            sim.kill_operator()
        for _ in range(5):
            for service in sim.services():
                sim.send_request(service)
        sim.delete_service()
        sim.collect_garbage()
        sim.settle(until=self._is_empty, within_s=60 + 120)

    def _is_empty(self) -> bool:
        left = [
            obj for key, obj in self.sim.cluster.storage.everything() if obj["metadata"].get("namespace") == NAMESPACE
        ]
        return not left
