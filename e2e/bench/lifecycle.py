"""`lifecycle.*`: requests lost, and times, for every disturbance of `e2e.chaos`, on the real bed."""

import os

from e2e.bed import owner
from e2e.bed.local import LocalBed
from e2e.bench.figures import Recorder
from e2e.chaos import faults, lossless
from e2e.product import Product, Service

REQUESTS = 2000


def run() -> None:
    """Record the group; a row that fails is told and the others go on."""
    figures = Recorder("lifecycle")
    owner.prepare()
    with LocalBed(name=os.environ.get("SLUICE_BED_NAME", "bench")) as bed:
        product = Product.install(bed)
        for number, row in enumerate(lossless.ROWS):
            service = _service(bed, f"row-{number}", row.name, row.spec)
            outcome = lossless.run_row(row, product, service, REQUESTS)
            figures.record(f"lifecycle.{row.name}.failed", outcome.lost)
            figures.record(f"lifecycle.{row.name}.sent", outcome.sent)
            _tell(outcome.lost, outcome.details)
            bed.api.delete(service.path)
        for number, fault in enumerate(faults.ROWS):
            service = _service(bed, f"fault-{number}", fault.name, fault.spec)
            result = fault.run(product, service)
            for name, value in result.figures.items():
                figures.record(f"lifecycle.{fault.name}.{name}", value)
            bed.api.delete(service.path)
    figures.write()


def _service(bed: LocalBed, namespace: str, name: str, spec: dict[str, object]) -> Service:
    bed.add_namespace(namespace)
    service = Service.create(bed, namespace, name.replace("_", "-"), spec)
    service.wait_settled(180)
    return service


def _tell(lost: int, details: dict[str, object]) -> None:
    if lost:
        print(f"    {details}", flush=True)
