"""The operator dies at each of its writes in turn: nothing is made twice, and the next life always converges.

The parts are the real ones over HTTP (`live`). The last test kills the real process with SIGKILL.
"""

import time
from pathlib import Path

import pytest
import yaml

from sluice.api import names
from tests.fakeapi.live import Killer, Stage
from tests.played.process import OperatorProcess

pytestmark = pytest.mark.asyncio
MAX_WRITES = 60
"""More than any of the stories below has; a story that never ends is a bug."""
PROCESS_S = 60.0
QUIET_S = 3.0
"""Long enough for a fresh operator to look at everything twice."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_at_every_write_on_the_way_to_serving(
    stage: Stage, after: bool, request: pytest.FixtureRequest
) -> None:
    kills = 0
    for number in range(1, MAX_WRITES):
        stage.create_service(replicas=2)
        mark = len(stage.created_engine_pods())
        died = await stage.run_and_die(Killer(number, after), stage.is_converged)
        async with stage.life() as life:
            await stage.run(life, stage.is_converged)
        created = stage.created_engine_pods()[mark:]
        assert len(created) == 2, f"killed at write {number}: created {created}"
        kills += died
        if not died:
            await stage.writes_nothing()
            break
        _reset(stage)
    assert kills >= 12, "every write of the story is a place to die"
    request.node.user_properties.append(("kills", kills))


async def test_killed_at_every_write_of_a_scale_in(stage: Stage) -> None:
    stage.create_service(replicas=2)
    async with stage.life() as life:
        await stage.run(life, stage.is_converged)
    kills = 0
    for number in range(1, MAX_WRITES):
        _scale(stage, 1)
        died = await stage.run_and_die(Killer(number), stage.is_converged)
        async with stage.life() as life:
            await stage.run(life, stage.is_converged)
            before = len(stage.created_engine_pods())
            _scale(stage, 2)
            await stage.run(life, stage.is_converged)
        assert len(stage.created_engine_pods()) == before + 1
        kills += died
        if not died:
            break
    assert kills >= 4
    await stage.writes_nothing()


async def test_killed_process_leaves_nothing_double(stage: Stage, tmp_path: Path) -> None:
    """The real program, with kopf, killed by SIGKILL after 4, 9 and 12 writes."""
    operator = _process(stage, tmp_path)

    def play() -> None:
        stage.machinery.round()
        time.sleep(0.002)  # the operator works in another process: leave it the processor

    stage.create_service(replicas=3)
    for writes in (4, 9, 12):

        def enough(count: int = writes) -> bool:
            return len(_writes(stage)) >= count

        with operator:
            operator.wait_for(f"{writes} writes", enough, play, PROCESS_S)
            operator.kill()
    with operator:
        operator.wait_for("a serving service", stage.is_converged, play, PROCESS_S)
        assert len(stage.created_engine_pods()) == len(set(stage.created_engine_pods())) == 3
        mark = len(stage.cluster.audit)
        operator.kill()
    seen = len(stage.server.seen)
    with operator:
        operator.wait_for("its watches", lambda: _watches_since(stage, seen), play, PROCESS_S)
        end = time.monotonic() + QUIET_S
        operator.wait_for("a quiet while", lambda: time.monotonic() > end, play, PROCESS_S)
        written = [w for w in stage.cluster.writes(since=mark, changed=False) if _is_operators(w.manager, w.plural)]
        assert not written, written
        assert operator.stop() == 0


def _watches_since(stage: Stage, position: int) -> bool:
    """The operator opened a watch of pods after this position of the server's log."""
    recent = list(stage.server.seen)[position:]
    return any(seen.path == "/api/v1/pods" and seen.query.get("watch") for seen in recent)


def _process(stage: Stage, folder: Path) -> OperatorProcess:
    kubeconfig, config = folder / "kubeconfig", folder / "config.yaml"
    kubeconfig.write_text(yaml.safe_dump(_kubeconfig(stage.server.url)))
    config.write_text(yaml.safe_dump({"routerTokenFile": str(stage.token_file)}))
    return OperatorProcess(kubeconfig, config, folder / "operator.log")


def _kubeconfig(url: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "fake", "user": {"token": "fake"}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        "current-context": "fake",
    }


def _is_operators(manager: str, plural: str) -> bool:
    return manager == names.FIELD_MANAGER and plural not in ("leases", "events")


def _writes(stage: Stage) -> list[object]:
    return [w for w in stage.cluster.writes() if _is_operators(w.manager, w.plural)]


def _scale(stage: Stage, replicas: int) -> None:
    stage.edit({"pools": [{"name": "default", "replicas": replicas}]})


def _reset(stage: Stage) -> None:
    """Delete the service and all that hangs on it, at once."""
    resource = stage.cluster.resource(names.GROUP, names.SERVICE_PLURAL)
    stage.cluster.delete(resource, "t", "s")
    stage.machinery.settle()
    assert not stage.engine_pods()
