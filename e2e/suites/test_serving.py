"""What users of a service see while instances come, go, fail and change: real kubelets, real router, real traffic.

Each disturbance runs under continuous load, half of it streams, and every request is accounted for. Short form: at
least 200 requests a row; `SLUICE_E2E=full`: 2,000.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.bed.errors import BedError
from e2e.bed.local import LocalBed
from e2e.chaos.observe import a_spec, gate_of, inject, is_ready, names_of, restarts
from e2e.product import Product, Service, Traffic, kill_container, until

REQUESTS = 2000 if os.environ.get("SLUICE_E2E") == "full" else 200


@pytest.fixture
def make(product: Product, namespace: str) -> Iterator[Any]:
    """`make(name, spec)`: a service of this test, settled."""

    def create(name: str, spec: dict[str, Any]) -> Service:
        service = Service.create(product.bed, namespace, name, spec)
        service.wait_settled()
        return service

    yield create


@contextmanager
def under_load(service: Service) -> Iterator[Traffic]:
    """Load from before the block until enough requests ended after it; nothing may be lost."""
    with service.traffic() as traffic:
        traffic.wait_for(1)
        yield traffic
        traffic.wait_for(REQUESTS)
    assert traffic.lost == 0, traffic.result


def test_s079_ready_means_that_every_instance_answered_and_is_routed(make: Any) -> None:
    service: Service = make("hello", a_spec(2))
    assert service.get()["status"]["summary"]["serving"] == "2/2"
    assert all(gate_of(pod) for pod in service.pods())
    with under_load(service):
        pass


def test_s017_a_loading_instance_gets_no_request(make: Any) -> None:
    service: Service = make("slow", a_spec(1))
    with under_load(service):
        # A new revision whose engines load for six seconds: only the old one may be asked meanwhile.
        (old,) = service.pods()
        service.patch({"engine": {"type": "Simulated", "args": ["--load-seconds=6"]}})
        until("surge", lambda: len(service.pods()) == 2, 30)
        new = next(pod for pod in service.pods() if pod["metadata"]["name"] != old["metadata"]["name"])
        until("engine container runs", lambda: is_running(service, new), 30)
        assert not any(gate_of(p) for p in service.pods() if p["metadata"]["name"] == new["metadata"]["name"])
        service.wait_settled()


def is_running(service: Service, pod: dict[str, Any]) -> bool:
    found = [p for p in service.pods() if p["metadata"]["name"] == pod["metadata"]["name"]]
    statuses = found[0]["status"].get("containerStatuses") or [] if found else []
    return any("running" in c["state"] for c in statuses)


def test_a_crashed_engine_is_verified_again_before_it_is_routed(make: Any) -> None:
    service: Service = make("crash", a_spec(2))
    (victim, *_) = service.pods()
    inject(service, victim, "exit", {"afterSeconds": 1}, code=1)
    until("unrouted", lambda: not service.is_settled(), 30)
    service.wait_settled()
    restarted = next(p for p in service.pods() if p["metadata"]["name"] == victim["metadata"]["name"])
    assert restarted["status"]["containerStatuses"][0]["restartCount"] >= 1
    with under_load(service):
        pass


def test_s015_a_hung_engine_is_unrouted_and_restarted(make: Any) -> None:
    service: Service = make("hang", a_spec(2))
    (victim, *_) = service.pods()
    inject(service, victim, "hang")

    def pod() -> dict[str, Any]:
        return next(p for p in service.pods() if p["metadata"]["name"] == victim["metadata"]["name"])

    until("gate closed", lambda: not gate_of(pod()), 15 + 5 + 10)
    with under_load(service):  # the other one serves; nothing reaches the hung one
        pass
    until("restarted", lambda: pod()["status"]["containerStatuses"][0]["restartCount"] >= 1, 120)
    service.wait_settled()


def test_s064_a_restarted_router_finds_its_workers_while_the_operator_is_away(make: Any, product: Product) -> None:
    service: Service = make("router", a_spec(2, routing={"replicas": 1}))
    product.scale_operator(0)
    try:
        (router,) = service.pods("router")
        kill_container(router, "smg")
        until("smg restarted", lambda: restarts(service.pods("router"), "smg") >= 1, 60)
        until("ready", lambda: is_ready(service.pods("router")[0]), 60)
        with under_load(service):
            pass
    finally:
        product.scale_operator(2)


def test_s099_api_server_away_under_traffic(make: Any, local_bed: LocalBed) -> None:
    service: Service = make("outage", a_spec(2))
    before = names_of(service.pods())
    with under_load(service) as traffic:
        local_bed.stop("apiserver")
        traffic.wait_for(REQUESTS)
        local_bed.start("apiserver")
        until("API server answers", lambda: answers(service), 60)
    service.wait_settled()
    assert names_of(service.pods()) == before


def answers(service: Service) -> bool:
    try:
        return bool(service.get())
    except (OSError, BedError):
        return False


def test_s088_deletion_ends_without_the_operator(make: Any, product: Product) -> None:
    service: Service = make("orphan", a_spec(1))
    product.scale_operator(0)
    try:
        service.bed.api.delete(service.path)

        def is_empty() -> bool:
            pods = service.bed.api.get(f"/api/v1/namespaces/{service.namespace}/pods")["items"]
            return not pods

        until("everything gone", is_empty, 150)
    finally:
        product.scale_operator(2)


def test_s002_a_foreign_service_in_the_way_is_a_condition(product: Product, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/services"
    foreign = {"metadata": {"name": "taken"}, "spec": {"ports": [{"port": 81}]}}
    made = product.bed.api.create(path, foreign)
    service = Service.create(product.bed, namespace, "taken", a_spec(1))
    until("conflict told", lambda: service.condition("Ready").get("reason") == "NameConflict", 60)
    live = product.bed.api.get(f"{path}/taken")
    assert live["metadata"]["uid"] == made["metadata"]["uid"]
    assert live["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    product.bed.api.delete(service.path)
    assert product.bed.api.get(f"{path}/taken")["metadata"]["uid"] == made["metadata"]["uid"]
