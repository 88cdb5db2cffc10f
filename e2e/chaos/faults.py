"""Rows in which something breaks: how fast it is out of the routers' lists, and what it costs."""

import json
import os
import threading
import time
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass, field

from e2e.chaos.observe import Routes, a_spec, gate_of, heal, inject, names_of, restarts, steadily
from e2e.product import Object, Product, Service, fetch, kill_container, until

SETTLE_S = 240.0
CONTEXT = 4096
"""Tokens of four characters; the longest prompt leaves room for the longest answer."""
CONTEXT_WORDS = (CONTEXT - 160) * 4 // 5
HANG_S = 15
"""`hangTimeoutSeconds` of `a_spec`."""


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of a row: name to value; `details` for a failed row's reader."""

    figures: dict[str, float]
    details: Object = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    run: Callable[[Product, Service], Result]
    spec: Object = field(default_factory=lambda: a_spec(2))


def engine_id_of(service: Service, pod: Object) -> str:
    state: Object = json.loads(fetch(service.bed, f"http://{pod['status']['podIP']}:9900/state"))
    return str(state["engineId"])


def hang_idle(_: Product, service: Service) -> Result:
    """Frozen with `/health` 200 and no traffic: out at once, back when it thaws before the hang time-out."""
    (victim, *_others) = service.pods()
    name, routes = victim["metadata"]["name"], Routes(service)
    started = time.monotonic()
    inject(service, victim, "hang")
    unrouted_s = routes.seconds_until_without(name, started, 60)
    heal(service, victim)
    until("routed again", lambda: name in routes.instances(), 60)
    thawed_restarts = restarts(service.pods())
    inject(service, victim, "hang")
    until(
        "restarted or replaced", lambda: restarts(service.pods()) > 0 or name not in names_of(service.pods()), SETTLE_S
    )
    service.wait_settled(SETTLE_S)
    return Result({"unrouted_s": unrouted_s, "restarts_after_thaw": thawed_restarts})


def hang_busy(_: Product, service: Service) -> Result:
    """Frozen under load. Requests that it holds are lost; the load is stopped hard afterwards."""
    (victim, *_others) = service.pods()
    name, routes = victim["metadata"]["name"], Routes(service)
    with service.traffic() as traffic:
        traffic.wait_for(20)
        started = time.monotonic()
        inject(service, victim, "hang")
        unrouted_s = routes.seconds_until_without(name, started, 120)
    return Result({"unrouted_s": unrouted_s}, traffic.result)


def saturation(_: Product, service: Service) -> Result:
    """Twice as many requests as slots, with prompts up to the context limit: busy is not dead."""
    seconds = 300 if os.environ.get("SLUICE_E2E") == "full" else 30
    with service.traffic(concurrency=16, prompt_words=CONTEXT_WORDS) as traffic:
        traffic.wait_for(16)
        names = names_of(service.pods())
        held = steadily(lambda: all(gate_of(p) for p in service.pods()) and names_of(service.pods()) == names, seconds)
    return Result({"unroutes": 0 if held else 1, "restarts": restarts(service.pods())}, traffic.result)


def engine_kill9(_: Product, service: Service) -> Result:
    (victim, *_others) = service.pods()
    name, routes = victim["metadata"]["name"], Routes(service)
    with service.traffic() as traffic:
        traffic.wait_for(20)
        state = json.loads(fetch(service.bed, f"http://{victim['status']['podIP']}:9900/state"))
        started = time.monotonic()
        kill_container(victim, "engine")
        unrouted_s = routes.seconds_until_without(name, started, 60)
        service.wait_settled(SETTLE_S)
        traffic.wait_for(50)
    own = 8  # the driver's requests in flight: no more can have been on the killed engine
    return Result(
        {"unrouted_s": unrouted_s, "lost_beyond_own": max(0, traffic.lost - own)}, {**traffic.result, **state}
    )


def router_kill9(_: Product, service: Service) -> Result:
    """One of two routers dies: only what it carried at that moment may fail."""
    (victim, *_others) = service.pods("router")
    with service.traffic(reconnects=5) as traffic:
        traffic.wait_for(20)
        before = restarts(service.pods("router"), "smg")
        kill_container(victim, "smg")
        until("smg restarted", lambda: restarts(service.pods("router"), "smg") > before, 60)
        service.wait_settled(SETTLE_S)
        traffic.wait_for(100)
    return Result({"lost_beyond_own": max(0, traffic.lost - 8)}, traffic.result)


def node_lost(product: Product, service: Service) -> Result:
    """The link of a node with an engine is cut, and comes back later."""
    routers = {p["spec"]["nodeName"] for p in service.pods("router")}
    victim = next(p for p in service.pods() if p["spec"]["nodeName"])
    node, name = victim["spec"]["nodeName"], victim["metadata"]["name"]
    routes = Routes(service)
    routes.addresses = [
        p["status"]["podIP"] for p in service.pods("router") if p["spec"]["nodeName"] != node
    ] or routes.addresses
    started = time.monotonic()
    product.bed.partition(node)
    try:
        unrouted_s = routes.seconds_until_without(name, started, 120)
        until("NotReady", lambda: not product.bed.is_node_ready(node), 120)
        not_ready = time.monotonic()
        until("replacement created", lambda: len(names_of(service.pods()) - {name}) >= 2, 120, every_s=0.1)
        replaced_s = time.monotonic() - not_ready
    finally:
        product.bed.heal(node)
    product.bed.wait_node_ready(node)
    service.wait_settled(SETTLE_S)
    until("no double", lambda: len(service.pods()) == 2, SETTLE_S)
    return Result({"unrouted_s": unrouted_s, "replaced_s": replaced_s}, {"routers": sorted(routers)})


def bad_rollout(change: Object) -> Callable[[Product, Service], Result]:
    """A revision that never serves: the old one serves on, it is rolled back, and the cluster is not flooded."""

    def run(_: Product, service: Service) -> Result:
        before = names_of(service.pods())
        seen: set[str] = set()
        over = threading.Event()

        def count() -> None:
            while not over.wait(0.3):
                seen.update(p["metadata"]["uid"] for p in service.pods() if p["metadata"]["name"] not in before)

        counter = threading.Thread(target=count)
        counter.start()
        try:
            with service.traffic() as traffic:
                traffic.wait_for(20)
                service.patch(change)
                until("rolled back", lambda: service.condition("Stalled").get("status") == "True", 180)
                until("surge gone", lambda: names_of(service.pods()) == before, 120)
                traffic.wait_for(100)
        finally:
            over.set()
            counter.join()
        said = service.condition("RolloutComplete")
        return Result({"failed": traffic.lost, "pod_creations": len(seen)}, {**traffic.result, "said": said})

    return run


def deadline(_: Product, service: Service) -> Result:
    """A stream that never ends is cut at the deadline and reported as exactly one."""
    (pod, *_others) = service.pods()
    cut: list[str] = []

    def stream() -> None:
        body = {"model": service.name, "prompt": "x", "max_tokens": 30000, "ignore_eos": True, "stream": True}
        try:
            fetch(service.bed, f"{service.url()}/v1/completions", method="POST", body=body, timeout_s=120)
            cut.append("the stream ended")
        except (OSError, urllib.error.URLError) as error:
            cut.append(str(error))

    reader = threading.Thread(target=stream)
    reader.start()
    until("in flight", lambda: _in_flight(service, pod) == 1, 30)
    started = time.monotonic()
    service.patch({"pools": [{"name": "default", "replicas": 0}]})
    until("instance gone", lambda: not service.pods(), 120)
    gone_s = time.monotonic() - started
    reader.join(timeout=90)
    events = service.bed.api.get(f"/apis/events.k8s.io/v1/namespaces/{service.namespace}/events")["items"]
    notes = [e["note"] for e in events if e["reason"] == "RequestsCut"]
    reported = sum("1 requests in flight" in note or "1 request in flight" in note for note in notes)
    return Result({"reported_cut": reported, "gone_s": gone_s}, {"notes": notes, "client": cut})


def _in_flight(service: Service, pod: Object) -> int:
    state: Object = json.loads(fetch(service.bed, f"http://{pod['status']['podIP']}:9900/state"))
    return int(state["inFlight"] or 0)


_NO_RETRIES = {"maxRestarts": 2, "selfTestPeriodSeconds": 2, "hangTimeoutSeconds": 15}


def _simulated(*args: str, faults: list[Object] | None = None) -> Object:
    env = [{"name": "SIM_FAULTS", "value": json.dumps(faults)}] if faults else []
    return {"engine": {"type": "Simulated", "args": list(args), "env": env}}


_BOUNDED = a_spec(2, rollout={"maxSurge": 1, "progressDeadlineSeconds": 60}, health=_NO_RETRIES)

ROWS: tuple[Fault, ...] = (
    Fault("hang_idle", hang_idle, a_spec(2, health={"selfTestPeriodSeconds": 2, "hangTimeoutSeconds": 40})),
    Fault("hang_busy", hang_busy),
    Fault("saturation", saturation, a_spec(2, "--max-num-seqs=4", f"--max-model-len={CONTEXT}")),
    Fault("engine_kill9", engine_kill9),
    Fault("router_kill9", router_kill9),
    Fault("node_lost", node_lost),
    Fault("bad_image", bad_rollout({"engine": {"type": "Simulated", "image": "sluice-engine:no-such"}}), _BOUNDED),
    Fault(
        "crash_first_request",
        bad_rollout(_simulated(faults=[{"name": "crashFirst", "args": {}, "when": "now"}])),
        _BOUNDED,
    ),
    Fault(
        "hang_at_load",
        bad_rollout(_simulated(faults=[{"name": "neverReady", "args": {}, "when": "now"}])),
        _BOUNDED,
    ),
    Fault("deadline", deadline, a_spec(1, drain={"timeoutSeconds": 10})),
)
