"""What breaks: engines that hang, crash or never start, routers and nodes that die. Counts are asserted; times are
recorded by `make bench-lifecycle`. Short form: the rows in `SHORT`; `SLUICE_E2E=full`: all."""

import os

import pytest

from e2e.bench.figures import BARS
from e2e.chaos.faults import ROWS, Fault
from e2e.product import Product, Service

TIMED = "_s"
SHORT = ("hang_busy", "saturation", "engine_kill9", "bad_image", "crash_first_request")
CHOSEN = [row for row in ROWS if os.environ.get("SLUICE_E2E") == "full" or row.name in SHORT]


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.name)
def test_damage_is_bounded(row: Fault, product: Product, namespace: str) -> None:
    service = Service.create(product.bed, namespace, row.name.replace("_", "-"), row.spec)
    service.wait_settled(180)
    result = row.run(product, service)
    for name, value in result.figures.items():
        bar = BARS[f"lifecycle.{row.name}.{name}"]
        assert name.endswith(TIMED) or bar.holds(value), f"{name} = {value:g}, bar {bar.text}: {result.details}"
