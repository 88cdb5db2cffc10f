"""What is missing before the start is said in one sentence that names the fix."""

import asyncio
from typing import Any

import pytest

from sluice.api import names
from sluice.api.kinds import SCHEMA_VERSION
from sluice.runtime import kinds
from sluice.runtime.checks import check
from sluice.runtime.errors import Forbidden
from sluice.runtime.kinds import Kind
from sluice.runtime.metrics import Metrics
from sluice.runtime.server import Health, Server
from tests.unit.runtime.builders import Object


class Cluster:
    """Answers the questions of the checks."""

    def __init__(self) -> None:
        self.denied: set[tuple[str, str, str]] = set()
        """(verb, resource, namespace)."""
        self.unserved: set[str] = set()
        self.schema_version: str | None = str(SCHEMA_VERSION)
        self.crds_readable = True

    async def is_allowed(self, verb: str, kind: Kind, namespace: str = "", subresource: str = "") -> bool:
        resource = f"{kind.resource}/{subresource}" if subresource else kind.resource
        return (verb, resource, namespace) not in self.denied

    async def api_resources(self, group: str, version: str) -> set[str]:
        served = {kind.plural for kind in kinds.WATCHED if (kind.group, kind.version) == (group, version)}
        return served - self.unserved

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        if not self.crds_readable:
            raise Forbidden("get", kind.resource, name, 403, "Forbidden", "no")
        stamped = {} if self.schema_version is None else {names.ANNOTATION_SCHEMA_VERSION: self.schema_version}
        return {"metadata": {"name": name, "namespace": namespace, "annotations": stamped}}

    def look(self, *namespaces: str) -> tuple[str, tuple[Kind, ...]]:
        client: Any = self
        findings = asyncio.run(check(client, namespaces))
        return " | ".join(findings.problems), findings.watchable


def test_complete_cluster_has_no_problem_and_everything_is_watched() -> None:
    assert Cluster().look() == ("", kinds.WATCHED)


@pytest.mark.parametrize("right", [("list", "pods", ""), ("patch", "pods/status", ""), ("create", "services", "")])
def test_missing_right_is_named(right: tuple[str, str, str]) -> None:
    cluster = Cluster()
    cluster.denied = {right}
    problem, _ = cluster.look()
    assert f"missing permissions: {right[0]} {right[1]} (" in problem


def test_missing_right_in_one_of_several_namespaces_names_it() -> None:
    cluster = Cluster()
    cluster.denied = {("create", "pods", "b")}
    assert "create pods in b" in cluster.look("a", "b")[0]


def test_missing_crd_says_what_to_install() -> None:
    cluster = Cluster()
    cluster.unserved = {names.SERVICE_PLURAL}
    assert "inferenceservices.serving.sluice.dev (v1alpha1) is not served: install the CRDs" in cluster.look()[0]


@pytest.mark.parametrize(("version", "found"), [("0", "0"), (None, "none"), ("new", "new")])
def test_older_schema_says_to_upgrade_the_crds_first(version: str | None, found: str) -> None:
    cluster = Cluster()
    cluster.schema_version = version
    problem, _ = cluster.look()
    assert f"has schema version {found}, this operator needs {SCHEMA_VERSION}: upgrade the CRDs" in problem


def test_newer_schema_and_unreadable_crds_are_no_problem() -> None:
    cluster = Cluster()
    cluster.schema_version = str(SCHEMA_VERSION + 1)
    assert cluster.look()[0] == ""
    cluster.crds_readable = False
    assert cluster.look()[0] == ""


@pytest.mark.parametrize("lacking", ["served", "watch right"])
def test_optional_kind_that_is_missing_is_not_watched_and_no_problem(lacking: str) -> None:
    cluster = Cluster()
    if lacking == "served":
        cluster.unserved = {names.PROFILE_PLURAL}
    else:
        cluster.denied = {("watch", kinds.ACCELERATOR_PROFILE.resource, "")}
    problem, watched = cluster.look()
    assert problem == ""
    assert set(kinds.WATCHED) - set(watched) == {kinds.ACCELERATOR_PROFILE}


# Probes


async def get(port: int, path: str) -> tuple[int, str]:
    """(status, body) over a plain socket."""
    async with asyncio.timeout(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        text = (await reader.read()).decode()
        writer.close()
    return int(text.split()[1]), text.split("\r\n\r\n", 1)[1]


async def test_probes_tell_why() -> None:
    health = Health()
    server = Server(health, Metrics())
    port = await server.start("127.0.0.1", 0)
    assert await get(port, "/readyz") == (503, "starting")
    assert await get(port, "/healthz") == (200, "ok")
    health.waiting_for = ""
    assert await get(port, "/readyz") == (200, "ok")
    health.checks.append(lambda: "the watch of pods is silent")
    assert await get(port, "/healthz") == (500, "the watch of pods is silent")
    health.lag_s = 11.0
    assert await get(port, "/healthz") == (500, "the event loop lags 11.0 s")
    code, text = await get(port, "/metrics")
    assert code == 200 and "sluice_leader 0.0" in text
    await server.stop()
