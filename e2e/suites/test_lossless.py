"""Every way in which instances come and go, under load: no request fails, is cut or hangs.

Short form: at least 200 requests a row, the operator killed or upgraded beside the rollout. `SLUICE_E2E=full`: 2,000
requests, and both beside every row.
"""

import os

import pytest

from e2e.chaos.lossless import ROWS, Row, restore_operator, run_row
from e2e.product import Product, Service

FULL = os.environ.get("SLUICE_E2E") == "full"
REQUESTS = 2000 if FULL else 200
COMPANIONS = ("", "operator_kill", "operator_upgrade")
CASES = [(row, companion) for row in ROWS for companion in COMPANIONS if FULL or not companion or row.name == "rollout"]


@pytest.mark.parametrize(("row", "companion"), CASES, ids=[f"{r.name}-{c or 'alone'}" for r, c in CASES])
def test_no_request_is_lost(row: Row, companion: str, product: Product, namespace: str) -> None:
    service = Service.create(product.bed, namespace, row.name.replace("_", "-"), row.spec)
    service.wait_settled(180)
    outcome = run_row(row, product, service, REQUESTS, companion)
    if companion:
        restore_operator(product)
    assert outcome.sent >= REQUESTS
    assert outcome.lost == 0, outcome.details
