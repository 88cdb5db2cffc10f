"""Seeded disorder: faults and edits in random order, safety after every pass, and rest at the end."""

import random

import pytest

from sluice.api.agent import EnginePhase
from tests.unit.plan.cluster import Cluster, Engine, a_service, pools


def _edit(cluster: Cluster, rng: random.Random) -> None:
    match rng.randrange(5):
        case 0:
            cluster.edit(pools=pools(rng.randrange(4)))
        case 1:
            cluster.edit(engine={"type": "Simulated", "args": [f"--seed={rng.randrange(4)}"]})
        case 2:
            cluster.edit(rollout={"maxSurge": rng.randrange(3), "maxUnavailable": 1, "paused": rng.random() < 0.3})
        case 3:
            cluster.edit(suspend=rng.random() < 0.2)
        case 4:
            cluster.service["status"] = {}


def _fault(cluster: Cluster, rng: random.Random) -> None:
    pods = [name for name in cluster.live_pods() if name in cluster.engines]
    if not pods:
        return
    name = rng.choice(pods)
    engine = cluster.engines[name]
    match rng.randrange(9):
        case 0:
            cluster.delete_pod(name)
        case 1:
            del cluster.pods[name]
        case 2:
            cluster.pods[name]["status"]["phase"] = "Failed"
        case 3:
            engine.run, engine.phase = engine.run + 1, EnginePhase.LOADING
        case 4:
            engine.phase = rng.choice([EnginePhase.SUSPECT, EnginePhase.HUNG])
        case 5:
            engine.silent = not engine.silent
        case 6:
            engine.in_flight = rng.choice([None, 0, 3])
        case 7:
            cluster.crash(name, rng.choice([1, 137]))
        case 8:
            cluster.restart(name)


@pytest.mark.parametrize("seed", range(40))
def test_no_disorder_breaks_safety_or_rest(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(a_service({"pools": pools(2), "drain": {"timeoutSeconds": 20}}))
    for _ in range(60):
        if rng.random() < 0.2:
            _edit(cluster, rng)
        if rng.random() < 0.4:
            _fault(cluster, rng)
        if rng.random() < 0.1 and cluster.lists:
            cluster.silent_routers ^= {rng.choice(sorted(cluster.lists))}
        cluster.pass_()
        if rng.random() < 0.7:
            cluster.play(rng.choice([0.5, 1, 5]))
    cluster.silent_routers = set()
    cluster.edit(suspend=False, pools=pools(2), rollout={})
    for name in cluster.engines:
        if name in cluster.pods:
            cluster.restart(name)
        cluster.engines[name] = Engine(run=cluster.engines[name].run)
    cluster.run(passes=200, seconds=2)
    assert len(cluster.engine_pods()) == 2
    assert len(cluster.listed()) == 2
    assert cluster.condition("RolloutComplete")["status"] == "True"
    assert cluster.condition("Ready")["status"] == "True"
