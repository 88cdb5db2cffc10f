"""Fixtures of the end-to-end suites: one cluster for the session, chosen by ``CLUSTER`` (default: local).

Nothing is skipped: a missing need is an error that names the cure. A test that needs what the chosen backend can never
give (``@pytest.mark.needs(Cap.POWER)``) is deselected before the run, and the number of those is printed.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from e2e.bed import owner
from e2e.bed.cluster import Cluster
from e2e.bed.errors import BedError
from e2e.bed.existing import Existing, backend_from_environment
from e2e.bed.local import LocalBed
from e2e.product import Product

BACKENDS: dict[str, type[LocalBed] | type[Existing]] = {"local": LocalBed, "existing": Existing}
DUMPS = Path(__file__).resolve().parents[2] / "build" / "e2e"


def _backend() -> type[LocalBed] | type[Existing]:
    chosen = backend_from_environment()
    if chosen not in BACKENDS:
        raise pytest.UsageError(
            f"CLUSTER={chosen}: these suites need real pods; choose CLUSTER=local or CLUSTER=existing CONTEXT=<name>"
        )
    return BACKENDS[chosen]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "needs(*caps): abilities of the cluster that the test uses (bed.cluster.Cap)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the chosen backend can never run, and say so."""
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        caps = {cap for marker in item.iter_markers("needs") for cap in marker.args}
        (dropped if caps and not caps <= _backend().caps else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        print(f"\nCLUSTER={backend_from_environment()}: {len(dropped)} tests need what this cluster does not have")
        items[:] = kept


def _start() -> Cluster:
    try:
        if _backend() is Existing:
            return Existing(os.environ.get("CONTEXT", ""))
        say = functools.partial(print, flush=True)
        owner.prepare(say)
        return LocalBed(name=os.environ.get("SLUICE_BED_NAME", "test"), audit=True, say=say)
    except BedError as error:
        pytest.exit(f"the cluster can't be had: {error}", returncode=3)


@pytest.fixture(scope="session")
def bed() -> Iterator[Cluster]:
    """The session's cluster: ``.kubeconfig``, ``.nodes``, ``.caps``, ``.in_network()``; see ``bed.cluster.Cluster``."""
    cluster = _start()
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def local_bed(bed: Cluster) -> LocalBed:
    """The same, for tests marked with needs that only the local bed meets."""
    if not isinstance(bed, LocalBed):
        raise BedError("this test uses the local bed: mark it with @pytest.mark.needs(...)")
    return bed


@pytest.fixture(scope="session")
def product(local_bed: LocalBed) -> Product:
    """Sluice from this checkout, installed once for the session."""
    return Product.install(local_bed)


@pytest.fixture
def namespace(local_bed: LocalBed) -> Iterator[str]:
    """A namespace of the test's own, with its default ServiceAccount; deleted without waiting."""
    name = f"t-{secrets.token_hex(4)}"
    local_bed.add_namespace(name)
    yield name
    local_bed.api.delete(f"/api/v1/namespaces/{name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """On failure, keep daemon logs, container logs, pods and events below build/e2e/<test>."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("bed")
    if report.failed and call.when == "call" and cluster is not None:
        target = DUMPS / re.sub(r"[^\w.-]+", "_", item.name)
        cluster.dump(target)
        report.sections.append(("cluster", f"logs and objects: {target}"))
    return report
