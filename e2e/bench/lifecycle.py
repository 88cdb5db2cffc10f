"""`lifecycle.*`: requests lost, and times, for every disturbance of `e2e.chaos`, on the real bed."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.bed import owner
from e2e.bed.errors import BedError
from e2e.bed.local import LocalBed
from e2e.bench.figures import Recorder
from e2e.chaos import faults, lossless
from e2e.product import Product, Service

REQUESTS = 2000


def run() -> None:
    """Record the group. A row that does not come to its end is told, has no figure, and the others go on.

    Raises:
        SystemExit: a row did not come to its end.
    """
    figures = Recorder("lifecycle")
    owner.prepare()
    broken: list[str] = []
    with LocalBed(name=os.environ.get("SLUICE_BED_NAME", "bench")) as bed:
        product = Product.install(bed)
        for companion in lossless.COMPANIONS:
            broken += _lossless(product, figures, companion)
        for row in faults.ROWS:
            broken += _fault(product, figures, row)
    figures.write()
    if broken:
        raise SystemExit(f"without figures: {', '.join(broken)}")


def _lossless(product: Product, figures: Recorder, companion: str) -> list[str]:
    """All rows with this companion, which has the sum over them as its own figures; those that broke."""
    sent = lost = 0
    broken: list[str] = []
    for row in lossless.ROWS:
        name = f"{row.name} {companion}".strip()
        with _told(name, broken), _service(product.bed, name, row.spec) as service:
            outcome = lossless.run_row(row, product, service, REQUESTS, companion)
            sent, lost = sent + outcome.sent, lost + outcome.lost
            if not companion:
                _record(figures, row.name, outcome.sent, outcome.lost, outcome.resent)
            print(f"    {name}: {outcome.sent} sent, {outcome.lost} lost in {outcome.seconds:.0f} s", flush=True)
            if outcome.lost:
                print(f"    {outcome.details}", flush=True)
            if companion:
                lossless.restore_operator(product)
    if companion and not broken:
        _record(figures, companion, sent, lost)
    return broken


def _record(figures: Recorder, row: str, sent: int, lost: int, resent: int | None = None) -> None:
    figures.record(f"lifecycle.{row}.failed", lost)
    figures.record(f"lifecycle.{row}.sent", sent)
    if resent is not None:
        figures.record(f"lifecycle.{row}.resent", resent)


def _fault(product: Product, figures: Recorder, row: faults.Fault) -> list[str]:
    broken: list[str] = []
    with _told(row.name, broken), _service(product.bed, row.name, row.spec) as service:
        for name, value in row.run(product, service).figures.items():
            figures.record(f"lifecycle.{row.name}.{name}", value)
    return broken


@contextmanager
def _told(name: str, broken: list[str]) -> Iterator[None]:
    try:
        yield
    except (AssertionError, BedError, OSError, subprocess.SubprocessError) as error:
        print(f"    {name} broke off: {type(error).__name__}: {error}", flush=True)
        broken.append(name)


@contextmanager
def _service(bed: LocalBed, row: str, spec: dict[str, object]) -> Iterator[Service]:
    """A settled service in a namespace of its own, deleted at the end."""
    name = row.replace("_", "-").replace(" ", "-")
    bed.add_namespace(name)
    service = Service.create(bed, name, name, spec)
    try:
        service.wait_settled(180)
        yield service
    finally:
        bed.api.delete(service.path)
