"""`outage.*`: the API server is away for five minutes under traffic; nobody may notice, and everything comes back."""

import os
import time

from e2e.bed import owner
from e2e.bed.errors import BedError
from e2e.bed.local import LocalBed
from e2e.bench.figures import Recorder
from e2e.product import Product, Service, until

NAMESPACE = "outage"
OUTAGE_S = 300.0
SPEC = {
    "model": {"uri": "hf://example/model"},
    "engine": {"type": "Simulated"},
    "pools": [{"name": "default", "replicas": 2}],
    "drain": {"timeoutSeconds": 60},
}


def run() -> None:
    """Record the group."""
    figures = Recorder("outage")
    owner.prepare()
    with LocalBed(name=os.environ.get("SLUICE_BED_NAME", "bench")) as bed:
        Product.install(bed)
        bed.add_namespace(NAMESPACE)
        service = Service.create(bed, NAMESPACE, "steady", SPEC)
        service.wait_settled()
        before = {p["metadata"]["uid"] for p in service.pods()}
        with service.traffic() as traffic:
            bed.stop("apiserver")
            time.sleep(OUTAGE_S)
            bed.start("apiserver")
            recovered = recovers(service, before)
        print(f"    {traffic.result}")
    figures.record("outage.failed_requests", traffic.lost)
    figures.record("outage.recovered", float(recovered))
    figures.write()


def recovers(service: Service, before: set[str]) -> bool:
    """The same pods serve on, and a change is carried out again."""
    until("API server answers", lambda: _answers(service), 60)
    if {p["metadata"]["uid"] for p in service.pods()} != before:
        return False
    service.patch({"pools": [{"name": "default", "replicas": 3}]})
    service.wait_settled(180)
    return before < {p["metadata"]["uid"] for p in service.pods()}


def _answers(service: Service) -> bool:
    try:
        return bool(service.get())
    except (OSError, BedError):
        return False
