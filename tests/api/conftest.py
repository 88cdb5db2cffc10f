"""One real API server (with scheduler and controllers, no kubelet) for all tests of this level.

Tests share it through namespaces of their own. A missing need is an error that names the cure.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.bed.api_only import ApiOnly


@pytest.fixture(scope="session")
def api_bed() -> Iterator[ApiOnly]:
    """A fresh API-level bed with an audit log of writes: ``.kubeconfig``, ``.api``, ``.fake_nodes``, ``.audit``."""
    with ApiOnly(audit=True) as bed:
        yield bed
