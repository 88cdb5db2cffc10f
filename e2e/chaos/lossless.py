"""Rows in which a service is changed or moved under load and no request may fail, be cut or hang."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from e2e.bed.errors import BedError
from e2e.chaos.observe import a_spec, gate_of, is_ready, names_of, restarts
from e2e.product import MERGE, Object, Product, Service, Traffic, kill_container, until
from e2e.target import SYSTEM, install

SETTLE_S = 240.0
KILL_EVERY_S = 4.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What a disturbance acts on."""

    product: Product
    service: Service
    traffic: Traffic
    requests: int
    """How many the row sends in all."""


@dataclass(frozen=True, slots=True)
class Row:
    """A disturbance; `disturb` returns when it is over and the service has settled."""

    name: str
    disturb: Callable[[Scene], None]
    spec: Object = field(default_factory=lambda: a_spec(2))


@dataclass(frozen=True, slots=True)
class Outcome:
    sent: int
    lost: int
    resent: int
    """See `e2e.traffic.driver`; none of them is lost."""
    seconds: float
    """How long the disturbance took until the service had settled."""
    details: Object


def run_row(row: Row, product: Product, service: Service, requests: int, companion: str = "") -> Outcome:
    """The row under continuous load; at least `requests` requests in all, some before and some after it."""
    with service.traffic() as traffic:
        traffic.wait_for(20)
        started = time.monotonic()
        with COMPANIONS[companion](product):
            row.disturb(Scene(product, service, traffic, requests))
        took = time.monotonic() - started
        if not traffic.is_over:
            traffic.wait_for(max(20, requests - traffic.ended))
    result = traffic.result
    return Outcome(int(result["sent"]), traffic.lost, int(result["resent"]), took, result)


# -- what is done to the service ---------------------------------------------------------------------------------------


def rollout(scene: Scene) -> None:
    service = scene.service
    before = names_of(service.pods())
    service.patch({"engine": {"type": "Simulated", "args": [f"--seed={int(time.time())}"]}})
    until("new revision serves", lambda: _is_settled(service) and not before & names_of(service.pods()), SETTLE_S)


def scale_in(scene: Scene) -> None:
    service = scene.service
    service.patch({"pools": [{"name": "default", "replicas": 2}]})
    until("two instances left", lambda: len(service.pods()) == 2 and _is_settled(service), SETTLE_S)


def delete_pod(scene: Scene) -> None:
    service = scene.service
    (victim, *_others) = service.pods()
    service.delete_pod(victim)
    _wait_replaced(service, victim)


def evict(scene: Scene) -> None:
    """As a descheduler does it: the Eviction API, asked again while a budget refuses."""
    service = scene.service
    (victim, *_others) = service.pods()
    name = victim["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": service.namespace}}
    path = f"/api/v1/namespaces/{service.namespace}/pods/{name}/eviction"

    def is_evicted() -> bool:
        status, _ = scene.product.bed.api.request("POST", path, body)
        return status in (200, 201, 404)

    until("eviction let through", is_evicted, SETTLE_S, every_s=1)
    _wait_replaced(service, victim)


def node_drain(scene: Scene) -> None:
    """`kubectl drain`, then the node comes back; twice, so that the second node carries all engines and routers."""
    for _ in range(2):
        _drain(scene, scene.service.pods()[0]["spec"]["nodeName"])


def _drain(scene: Scene, node: str) -> None:
    service = scene.service
    drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={int(SETTLE_S)}s")
    # Only this service: other tests' pods on the node are not the row's business.
    selector = f"--pod-selector=serving.sluice.dev/service-uid={service.get()['metadata']['uid']}"
    try:
        subprocess.run(
            scene.product.target.kubectl(*drain, selector), check=True, capture_output=True, timeout=SETTLE_S + 30
        )
        service.wait_settled(SETTLE_S)
        assert all(pod["spec"]["nodeName"] != node for pod in service.pods())
    finally:
        subprocess.run(scene.product.target.kubectl("uncordon", node), check=True, capture_output=True, timeout=30)


def router_rolling(scene: Scene) -> None:
    service = scene.service
    before = names_of(service.pods("router"))
    service.patch({"routing": {"policy": "RoundRobin"}})
    until(
        "routers replaced",
        lambda: not before & names_of(service.pods("router")) and all(is_ready(p) for p in service.pods("router")),
        SETTLE_S,
    )
    service.wait_settled(SETTLE_S)


def suspend(scene: Scene) -> None:
    """Nobody new is answered then, so the load ends first; what is under way must be finished."""
    service = scene.service
    scene.traffic.wait_for(scene.requests)
    scene.traffic.send_no_more()
    service.patch({"suspend": True})
    until("all instances gone", lambda: not service.pods(), SETTLE_S)
    scene.traffic.stop()
    until("reported", lambda: service.condition("Ready").get("reason") == "Suspended", SETTLE_S)


def nothing(scene: Scene) -> None:
    """The companion alone: long enough for several kills, or for the upgrade."""
    service = scene.service
    time.sleep(3 * KILL_EVERY_S)
    service.wait_settled(SETTLE_S)


def _wait_replaced(service: Service, victim: Object) -> None:
    """Until as many others as there were instances are routed: while the operator is away status says nothing new."""
    name = victim["metadata"]["name"]
    wanted = sum(pool["replicas"] for pool in service.get()["spec"]["pools"])

    def is_replaced() -> bool:
        others = [p for p in service.pods() if p["metadata"]["name"] != name]
        return len(others) == wanted and all(gate_of(p) and is_ready(p) for p in others)

    until(f"{name} replaced", is_replaced, SETTLE_S)
    service.wait_settled(SETTLE_S)


def _is_settled(service: Service) -> bool:
    try:
        return service.is_settled()
    except (OSError, BedError):
        return False


# -- what happens to the operator meanwhile ----------------------------------------------------------------------------


@contextmanager
def undisturbed(_: Product) -> Iterator[None]:
    yield


@contextmanager
def operator_kill(product: Product) -> Iterator[None]:
    """SIGKILL to the operator's containers, again and again; the first falls together with the disturbance."""
    over = threading.Event()

    def kill() -> None:
        while True:
            for pod in product.bed.api.get(f"/api/v1/namespaces/{SYSTEM}/pods")["items"]:
                if is_ready(pod):
                    kill_container(pod, "operator")
            if over.wait(KILL_EVERY_S):
                return

    killer = threading.Thread(target=kill, daemon=True)
    # Kubelets back off from restarts, minutes in the end: kills stop after the third, the row goes on without.
    limit = threading.Timer(3.5 * KILL_EVERY_S, over.set)
    killer.start()
    limit.start()
    try:
        yield
    finally:
        over.set()
        limit.cancel()
        killer.join()


@contextmanager
def operator_upgrade(product: Product) -> Iterator[None]:
    """`helm upgrade` with other defaults, beside the disturbance."""
    failed: list[Exception] = []

    def upgrade() -> None:
        try:
            install(product.target, f"podAnnotations.upgraded=at-{int(time.time())}", "config.logLevel=DEBUG")
        except Exception as error:  # told by the row's own thread
            failed.append(error)

    upgrading = threading.Thread(target=upgrade)
    upgrading.start()
    try:
        yield
    finally:
        upgrading.join()
    if failed:
        raise failed[0]


COMPANIONS: dict[str, Callable[[Product], Any]] = {
    "": undisturbed,
    "operator_kill": operator_kill,
    "operator_upgrade": operator_upgrade,
}

ROWS: tuple[Row, ...] = (
    Row("rollout", rollout),
    Row("scale_in", scale_in, a_spec(6)),
    Row("delete_pod", delete_pod),
    Row("evict", evict, a_spec(2, rollout={"maxSurge": 1, "maxUnavailable": 1})),
    Row("node_drain", node_drain),
    Row("router_rolling", router_rolling),
    Row("suspend", suspend),
    Row("quiet", nothing),
)


def restore_operator(product: Product) -> None:
    """Two new pods, both Ready, so that the next row starts from the same place: kubelets make a container that was
    killed often wait for minutes."""
    for pod in product.bed.api.get(f"/api/v1/namespaces/{SYSTEM}/pods")["items"]:
        name = pod["metadata"]["name"]
        product.bed.api.request("DELETE", f"/api/v1/namespaces/{SYSTEM}/pods/{name}", {"gracePeriodSeconds": 0})
    path = f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/sluice-operator"
    product.bed.api.patch(path, {"spec": {"replicas": 2}}, content_type=MERGE)

    def is_back() -> bool:
        pods = product.bed.api.get(f"/api/v1/namespaces/{SYSTEM}/pods")["items"]
        return len(pods) == 2 and all(is_ready(pod) and not restarts([pod], "operator") for pod in pods)

    until("operator back", is_back, 300)
