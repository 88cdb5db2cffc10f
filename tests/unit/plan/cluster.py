"""A cluster in memory for the planner: builds snapshots, carries out plans, plays kubelet, engines and routers.

Pure and step by step: `Cluster.pass_()` is one reconcile pass, `play()` lets the rest of the world move once. After
every pass the safety properties of `assert_safe` hold, or the test fails at the step that broke them.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

from sluice.api import names
from sluice.api.agent import AgentState, EnginePhase, SelfTest, Signal
from sluice.api.config import OperatorConfig
from sluice.api.router import RoutedWorker, RouterState, WorkerList, WorkerStatus
from sluice.plan.actions import Action, Annotate, Apply, Create, Delete, Outcome, PutWorkers, Result, SetGate
from sluice.plan.facts import node_facts, pod_facts
from sluice.plan.planner import Plan, plan
from sluice.plan.problems import outcome_events
from sluice.plan.snapshot import AgentFacts, Event, RouterFacts, ServiceSnapshot
from sluice.plan.status import compute_status
from sluice.plan.times import format_time

SERVICE_UID = "11111111-2222-3333-4444-555555555555"
START = 1_800_000_000.0


def a_service(spec: dict[str, Any] | None = None, name: str = "chat", uid: str = SERVICE_UID) -> dict[str, Any]:
    """A simulated one-pool service; `spec` replaces top-level fields."""
    base: dict[str, Any] = {"model": {"uri": "sim://tiny"}, "engine": {"type": "Simulated"}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVICE_KIND,
        "metadata": {"name": name, "namespace": "team", "uid": uid, "generation": 1},
        "spec": {**base, **(spec or {})},
    }


def pools(replicas: int, **more: Any) -> list[dict[str, Any]]:
    return [{"name": "default", "replicas": replicas, **more}]


@dataclass
class Engine:
    """What the agent of one pod would say."""

    phase: EnginePhase = EnginePhase.READY
    reason: str = ""
    run: int = 1
    in_flight: int | None = 0
    silent: bool = False
    message: str = ""
    missing: tuple[Signal, ...] = ()
    started_s_ago: float = 0.0
    """Age of the engine run; 0: it never grows old."""


@dataclass
class Cluster:
    service: dict[str, Any]
    config: OperatorConfig = field(default_factory=OperatorConfig)
    others_rolling: int = 0
    now: float = START
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    children: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    """Pod name to engine; made when the kubelet starts the pod, unless a test put one there."""
    lists: dict[str, WorkerList] = field(default_factory=dict)
    """Router pod name to the list it holds."""
    silent_routers: set[str] = field(default_factory=set)
    starts: bool = True
    """False: new pods stay Pending."""
    node: str = "node-1"
    """Where the scheduler puts new pods; "": nowhere."""
    refuse: set[str] = field(default_factory=set)
    """Kinds whose creation is refused."""
    events: list[Event] = field(default_factory=list)
    created: int = 0
    deleted_by_us: list[str] = field(default_factory=list)
    count: int = 0

    # ------------------------------------------------------------------ the operator
    def snapshot(self) -> ServiceSnapshot:
        pods = tuple(sorted((pod_facts(p) for p in self.pods.values()), key=lambda p: (p.created_at, p.name)))
        return ServiceSnapshot(
            service=copy.deepcopy(self.service),
            pods=pods,
            children=copy.deepcopy(self.children),
            profiles=self.profiles,
            nodes={name: node_facts(node) for name, node in self.nodes.items()},
            agents={p.uid: AgentFacts(*word) for p in pods if (word := self._agent(p.name)) is not None},
            routers={p.uid: RouterFacts(*said) for p in pods if (said := self._router(p.name)) is not None},
            config=self.config,
            signing_keys='{"keys":[]}',
            others_rolling=self.others_rolling,
        )

    def pass_(self) -> Plan:
        """One reconcile pass: plan, carry out, write status."""
        snapshot = self.snapshot()
        made = plan(snapshot, self.now)
        results = tuple(self._carry_out(action) for action in made.actions)
        self.events += [*made.events, *outcome_events(results)]
        self.service["status"] = compute_status(snapshot, made, results, self.now)
        self.assert_safe()
        return made

    def _carry_out(self, action: Action) -> Result:
        match action:
            case Create(body=body) | Apply(body=body):
                return self._write(action, body)
            case Delete(target=target):
                if target.kind != "Pod":
                    self.children.pop((target.kind, target.name), None)
                elif target.name in self.pods and self.pods[target.name]["metadata"]["uid"] == target.uid:
                    self.deleted_by_us.append(target.name)
                    self.delete_pod(target.name, action.grace_s)
            case Annotate(pod=ref, annotations=annotations):
                kept = {**self.pods[ref.name]["metadata"].get("annotations", {}), **annotations}
                self.pods[ref.name]["metadata"]["annotations"] = {k: v for k, v in kept.items() if v is not None}
            case SetGate(pod=ref, routable=routable):
                self._condition(ref.name, names.READINESS_GATE, routable)
            case PutWorkers(router=ref, workers=workers):
                self.lists[ref.name] = workers
        return Result(action, Outcome.DONE)

    def _write(self, action: Create | Apply, body: Any) -> Result:
        kind, name = body["kind"], body["metadata"]["name"]
        if kind in self.refuse:
            return Result(action, Outcome.REFUSED, "QuotaExceeded", "exceeded quota: pods")
        made = copy.deepcopy(dict(body))
        self.count += 1
        made["metadata"].setdefault("uid", f"uid-{self.count}")
        made["metadata"]["creationTimestamp"] = format_time(self.now)
        if kind == "Pod":
            if name not in self.pods:  # AlreadyExists with our owner is done
                self.created += 1
                # A wiped status forgets build numbers, so that a name may come back once its pod is gone.
                self.deleted_by_us = [gone for gone in self.deleted_by_us if gone != name]
                self.pods[name] = {**made, "status": {"phase": "Pending"}}
            return Result(action, Outcome.DONE)
        if isinstance(action, Create) and (kind, name) in self.children:
            return Result(action, Outcome.DONE)
        self.children[kind, name] = made
        return Result(action, Outcome.DONE)

    # ------------------------------------------------------------------ everything else
    def play(self, seconds: float = 1.0) -> None:
        """Kubelet, Deployment controller and garbage collection move once; the clock goes on."""
        self.now += seconds
        self._deployment()
        for name in list(self.pods):
            pod = self.pods[name]
            engine = self.engines.get(name)
            ends = pod_facts(pod).deletion_at
            if ends is not None:
                idle = engine is None or not engine.in_flight or self.now >= ends
                if idle and self._node_is_up(pod):
                    del self.pods[name]
                continue
            if self.starts and pod["status"].get("phase") == "Pending" and "nodeName" not in pod["spec"]:
                self._start(name)
        for name in self.engine_pods():
            facts = pod_facts(self.pods[name])
            self._condition(name, "Ready", facts.gate and facts.phase == "Running")
        for name in self._router_pods():
            self._condition(name, "Ready", any(w.status is WorkerStatus.READY for w in self._routed(name)))

    def run(self, passes: int = 60, seconds: float = 1.0) -> None:
        """Passes and plays in turn until a pass does nothing and nothing moves any more."""
        for _ in range(passes):
            made = self.pass_()
            before = copy.deepcopy((self.pods, self.engines))
            self.play(seconds)
            if not made.actions and made.requeue_after_s is None and before == (self.pods, self.engines):
                return
        raise AssertionError(f"no rest after {passes} passes: {self.pass_().actions}")

    def run_for(self, seconds: float, step_s: float = 1.0) -> None:
        """Passes and plays in turn for so long."""
        end = self.now + seconds
        while self.now < end:
            self.pass_()
            self.play(step_s)
        self.pass_()

    def delete_pod(self, name: str, grace_s: int | None = None) -> None:
        """As the API does it: deletionTimestamp is the end of the grace period."""
        pod = self.pods[name]
        grace = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionGracePeriodSeconds"] = grace
            pod["metadata"]["deletionTimestamp"] = format_time(self.now + grace)
        elif grace == 0:
            del self.pods[name]

    def crash(self, name: str, code: int = 1, message: str = "boom", reason: str = "Error") -> None:
        """The engine's container ends and waits for the kubelet to start it again."""
        [engine] = self.pods[name]["status"]["containerStatuses"]
        began = engine["state"].get("running", {}).get("startedAt") or format_time(self.now)
        ended = {"exitCode": code, "reason": reason, "message": message, "startedAt": began}
        engine["lastState"] = {"terminated": {**ended, "finishedAt": format_time(self.now)}}
        engine["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
        self.engines[name] = Engine(EnginePhase.LOADING, run=self.engines[name].run + 1)

    def restart(self, name: str) -> None:
        """The kubelet starts it again; it loads."""
        [engine] = self.pods[name]["status"]["containerStatuses"]
        engine["restartCount"] += 1
        engine["state"] = {"running": {"startedAt": format_time(self.now)}}

    def cordon(self, node: str, on: bool = True) -> None:
        self.nodes[node]["spec"] = {"unschedulable": on}

    def annotate(self, pod: str, name: str, value: str | None) -> None:
        """A user sets (or removes) an annotation."""
        annotations = self.pods[pod]["metadata"].setdefault("annotations", {})
        if value is None:
            annotations.pop(name, None)
        else:
            annotations[name] = value

    def edit(self, **spec: Any) -> None:
        """The user applies a changed spec."""
        self.service["spec"] = {**self.service["spec"], **spec}
        self.service["metadata"]["generation"] += 1

    def engine_pods(self) -> list[str]:
        return [n for n, p in self.pods.items() if p["metadata"]["labels"][names.LABEL_COMPONENT] == "engine"]

    def live_pods(self) -> list[str]:
        return [n for n in self.engine_pods() if "deletionTimestamp" not in self.pods[n]["metadata"]]

    def listed(self) -> set[str]:
        """Instances that some router would send a request to."""
        return {w.id for r in self._router_pods() for w in self._routed(r) if w.status is WorkerStatus.READY}

    def condition(self, kind: str) -> dict[str, Any]:
        return next(c for c in self.service["status"]["conditions"] if c["type"] == kind)

    def pool_status(self) -> dict[str, Any]:
        return dict(self.service["status"]["pools"][0])

    def assert_safe(self) -> None:
        """After a pass no router that can be reached is told of an instance that leaves, failed, or never served."""
        for router, held in self.lists.items():
            for worker in held.workers if router not in self.silent_routers else []:
                if worker.id not in self.pods:
                    raise AssertionError(f"{router} was told of {worker.id}, which does not exist")
                pod = pod_facts(self.pods[worker.id])
                if pod.drain_started_at or pod.deletion_at or pod.phase != "Running" or pod.owner_uid != SERVICE_UID:
                    raise AssertionError(f"{router} was told of {worker.id}, which leaves or is not ours")
        for name in set(self.deleted_by_us) & self.listed():
            raise AssertionError(f"{name} was deleted by us while a router sends it requests")

    def _start(self, name: str) -> None:
        self.count += 1
        pod = self.pods[name]
        node = self.nodes.setdefault(self.node, a_node(self.node)) if self.node else None
        if node is None or node_facts(node).unschedulable:
            refused = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
            pod["status"]["conditions"] = [refused]
            return
        pod["spec"]["nodeName"] = self.node
        containers = [c["name"] for c in pod["spec"]["containers"]]
        sidecars = [c["name"] for c in pod["spec"].get("initContainers", [])]
        pod["status"] = {
            "phase": "Running",
            "podIP": f"10.0.{self.count // 250}.{self.count % 250 + 1}",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [running(c) for c in containers],
            "initContainerStatuses": [running(c) for c in sidecars],
        }
        if names.CONTAINER_ENGINE in containers:
            self.engines.setdefault(name, Engine())

    def _deployment(self) -> None:
        for (kind, name), live in self.children.items():
            if kind != "Deployment":
                continue
            for number in range(live["spec"]["replicas"]):
                pod_name = f"{name}-{number}"
                if pod_name not in self.pods:
                    self.count += 1
                    template = copy.deepcopy(live["spec"]["template"])
                    metadata = {
                        "name": pod_name,
                        "namespace": "team",
                        "uid": f"uid-{self.count}",
                        "creationTimestamp": format_time(self.now),
                        "labels": template["metadata"]["labels"],
                        "ownerReferences": [{"kind": "ReplicaSet", "uid": "rs", "name": "rs", "controller": True}],
                    }
                    self.pods[pod_name] = {
                        "metadata": metadata,
                        "spec": template["spec"],
                        "status": {"phase": "Pending"},
                    }
                    self._start(pod_name)

    def _router_pods(self) -> list[str]:
        return [n for n, p in self.pods.items() if p["metadata"]["labels"][names.LABEL_COMPONENT] == "router"]

    def _routed(self, router: str) -> list[RoutedWorker]:
        """smg's view: a listed worker is ready while its engine run is the one in the list and in good health."""
        held = self.lists.get(router)
        routed = []
        for worker in held.workers if held else []:
            engine = self.engines.get(worker.id)
            alive = worker.id in self.pods and engine is not None and engine.phase is EnginePhase.READY
            same = engine is not None and worker.engine_id == f"{worker.id}#{engine.run}"
            status = WorkerStatus.READY if alive and same else WorkerStatus.WITHHELD
            routed.append(RoutedWorker(id=worker.id, url=worker.url, engine_id=worker.engine_id, status=status))
        return routed

    def _agent(self, name: str) -> tuple[AgentState, float] | None:
        engine = self.engines.get(name)
        if engine is None or name not in self.pods:
            return None
        state = AgentState(
            said_at=self.now,
            seq=1,
            instance=name,
            engine="Simulated",
            engine_id=f"{name}#{engine.run}",
            phase=engine.phase,
            reason=engine.reason,
            message=engine.message,
            phase_since=START,
            started_at=self.now - engine.started_s_ago,
            self_test=SelfTest(passed=engine.phase is EnginePhase.READY),
            in_flight=engine.in_flight,
            missing=list(engine.missing),
        )
        return state, 60.0 if engine.silent else 0.0

    def _router(self, name: str) -> tuple[RouterState, float] | None:
        if name not in self._router_pods() or self.pods[name]["status"].get("phase") != "Running":
            return None
        held = self.lists.get(name)
        state = RouterState(
            generation=held.generation if held else None, smg_reachable=True, workers=self._routed(name), wanted=held
        )
        return state, 60.0 if name in self.silent_routers else 0.0

    def _condition(self, name: str, kind: str, value: bool) -> None:
        conditions = self.pods[name]["status"].setdefault("conditions", [])
        conditions[:] = [c for c in conditions if c["type"] != kind]
        conditions.append({"type": kind, "status": "True" if value else "False"})

    def _node_is_up(self, pod: dict[str, Any]) -> bool:
        node = self.nodes.get(pod["spec"].get("nodeName", ""))
        return node is None or node_facts(node).ready is True


def a_node(name: str, ready: str = "True") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "status": {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {"cpu": "8"}},
    }


def running(name: str) -> dict[str, Any]:
    return {"name": name, "state": {"running": {}}, "ready": True, "started": True, "restartCount": 0}


def served(replicas: int, **spec: Any) -> Cluster:
    """A cluster in which `replicas` instances serve."""
    cluster = Cluster(a_service({"pools": pools(replicas), **spec}))
    cluster.run()
    assert cluster.pool_status()["serving"] == replicas
    return cluster
