"""The life of a played pod: which status a kubelet would report next. Pure.

Used by the player of the fake cluster and by the one of a real API server, so that both show the same life:
bound -> address -> running -> ready -> (deletion: preStop waits for in-flight 0 or the end of grace) -> gone.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sluice.api import names
from tests.played.world import PlayedEngine, PlayedRouter, World

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What the kubelet does next with one pod; at most one of the two."""

    status: Object | None = None
    """Strategic merge for `pods/<name>/status`."""
    remove: bool = False
    """Delete with grace 0: all containers have ended."""


def is_engine(pod: Object) -> bool:
    return bool(_labels(pod).get(names.LABEL_COMPONENT) == names.COMPONENT_ENGINE)


def is_router(pod: Object) -> bool:
    return bool(_labels(pod).get(names.LABEL_COMPONENT) == names.COMPONENT_ROUTER)


def next_step(pod: Object, world: World, now: float) -> Step | None:
    """None while there is nothing to report; the pod must be bound to a node."""
    meta, status = pod["metadata"], pod.get("status") or {}
    uid = meta["uid"]
    if "deletionTimestamp" in meta:
        return Step(remove=True) if _has_ended(pod, world, now) else None
    if status.get("phase") in ("Failed", "Succeeded"):
        return None
    ip = status.get("podIP")
    if not ip:
        return Step(status=_report(pod, _played(pod, world, world.new_ip()), world, now))
    program = world.engines.get(uid) or world.routers.get(uid)
    if program is None:  # the player was restarted: go on with the address that the API has
        program = _played(pod, world, ip)
    wanted = _report(pod, program, world, now)
    return None if _is_reported(wanted, status) else Step(status=wanted)


def _labels(pod: Object) -> dict[str, str]:
    return pod["metadata"].get("labels") or {}


def _played(pod: Object, world: World, ip: str) -> PlayedEngine | PlayedRouter:
    meta = pod["metadata"]
    if is_router(pod):
        return world.start_router(meta["name"], meta["uid"], ip)
    return world.start_engine(_labels(pod).get(names.LABEL_INSTANCE) or meta["name"], meta["uid"], ip)


def _has_ended(pod: Object, world: World, now: float) -> bool:
    """preStop: the engine is told to drain, and ends at in-flight 0 or when the grace is over."""
    meta = pod["metadata"]
    engine = world.engines.get(meta["uid"])
    if engine is None:
        return True
    with world.lock:
        if not engine.draining:
            engine.draining = True
            world.changed()
    return engine.in_flight == 0 or now >= _epoch(meta["deletionTimestamp"])


def _is_ready(program: PlayedEngine | PlayedRouter, world: World, now: float) -> bool:
    """What the containers' readiness probes say."""
    if isinstance(program, PlayedRouter):
        return world.is_open(program, now)
    return now >= program.started_at + program.load_s


def _report(pod: Object, program: PlayedEngine | PlayedRouter, world: World, now: float) -> Object:
    ready = _is_ready(program, world, now)
    gates = [g["conditionType"] for g in pod["spec"].get("readinessGates") or []]
    present = {c["type"]: c["status"] for c in (pod.get("status") or {}).get("conditions") or []}
    open_gates = all(present.get(gate) == "True" for gate in gates)
    run = program.run if isinstance(program, PlayedEngine) else 0
    uid = pod["metadata"]["uid"]

    def containers(group: str) -> list[Object]:
        return [
            {
                "name": c["name"],
                "image": c["image"],
                "imageID": "",
                "ready": ready,
                "started": True,
                "restartCount": run,
                "containerID": f"played://{uid}/{c['name']}/{run}",
                "state": {"running": {"startedAt": _time(world.clock())}},
            }
            for c in pod["spec"].get(group) or []
        ]

    conditions = {
        "Initialized": True,
        "PodScheduled": True,
        "ContainersReady": ready,
        "Ready": ready and open_gates,
    }
    return {
        "phase": "Running",
        "podIP": program.ip,
        "podIPs": [{"ip": program.ip}],
        "hostIP": "127.0.0.1",
        "startTime": _time(now),
        "conditions": [
            {"type": kind, "status": "True" if holds else "False", "lastTransitionTime": _time(now)}
            for kind, holds in conditions.items()
        ],
        "containerStatuses": containers("containers"),
        "initContainerStatuses": containers("initContainers"),
    }


def _is_reported(wanted: Object, status: Object) -> bool:
    """Same but for times."""
    have = {c["type"]: c["status"] for c in status.get("conditions") or []}
    if any(have.get(c["type"]) != c["status"] for c in wanted["conditions"]):
        return False
    if (wanted["phase"], wanted["podIP"]) != (status.get("phase"), status.get("podIP")):
        return False
    seen = [(c["name"], c["ready"], c["restartCount"]) for c in status.get("containerStatuses") or []]
    return seen == [(c["name"], c["ready"], c["restartCount"]) for c in wanted["containerStatuses"]]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
