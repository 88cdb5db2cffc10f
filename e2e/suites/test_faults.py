"""What breaks: engines that hang, crash or never start, routers and nodes that die. Counts are asserted; times are
recorded by `make bench-lifecycle`."""

import pytest

from e2e.bench.figures import BARS
from e2e.chaos.faults import ROWS, Fault
from e2e.product import Product, Service

TIMED = "_s"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_damage_is_bounded(row: Fault, product: Product, namespace: str) -> None:
    service = Service.create(product.bed, namespace, row.name.replace("_", "-"), row.spec)
    service.wait_settled(180)
    result = row.run(product, service)
    for name, value in result.figures.items():
        bar = BARS[f"lifecycle.{row.name}.{name}"]
        assert name.endswith(TIMED) or bar.holds(value), f"{name} = {value:g}, bar {bar.text}: {result.details}"
