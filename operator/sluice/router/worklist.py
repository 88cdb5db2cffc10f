"""Which workers smg's manifest lists, and what is said about each: pure.

Invariants:
- only wanted workers are listed (the sidecar never adds), and the last one that smg has ready until a wanted one is: a
  router that became Ready with the old list only has its new workers pending, and answers 503 if the old leave first;
- a worker whose agent speaks against it is not listed; a silent agent alone changes nothing;
- a worker whose agent *and* engine can't be reached is not listed while this router reaches another one. That can't hit
  the wrong one: a crashed agent leaves the engine's port open, a busy or frozen engine still takes connections (the
  kernel does), a router that is itself cut off or was stopped reaches nobody and keeps all. It is listed again as soon
  as either answers;
- an address enters the manifest only when smg has no worker at it any more. smg keeps a removed worker for 5 s and
  drops it then even if it was listed again meanwhile (measured), and an address may belong to another instance now;
- what is reported as routed is what smg itself says, whatever the manifest says.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from urllib.parse import urlsplit

from sluice.api.agent import AgentState, EnginePhase
from sluice.api.router import UNREACHABLE, RoutedWorker, Worker, WorkerList, WorkerStatus

WITHHOLDING_PHASES = frozenset({EnginePhase.SUSPECT, EnginePhase.HUNG, EnginePhase.DRAINING})


class Reach(StrEnum):
    """What became of asking smg for its workers."""

    ANSWERED = "answered"
    DOWN = "down"
    """Connection refused: no process, so it has no workers and will read the manifest when it starts."""
    UNKNOWN = "unknown"


class DataPath(StrEnum):
    """The way from this router to an instance, as last tried; an instance that was not tried yet has none."""

    ANSWERS = "answers"
    """The agent answered its last poll."""
    CONNECTS = "connects"
    """The agent did not, but the engine's port takes connections."""
    UNREACHABLE = "unreachable"
    """Neither: two polls of the agent in a row failed, and so did a connection to the engine."""


NOTHING_TRIED: Mapping[str, DataPath] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SmgWorker:
    id: str | None
    """Our instance name as smg gives it back (label `smg.ai/discovery-id`); None if it did not come from a manifest."""
    url: str
    status: WorkerStatus


@dataclass(frozen=True, slots=True)
class SmgView:
    reach: Reach
    workers: tuple[SmgWorker, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One worker in the manifest."""

    id: str
    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Manifest:
    entries: tuple[Entry, ...]
    """In the order of the wanted list."""
    left_out: Mapping[str, str]
    """Instance to the reason why it is wanted and not listed."""
    withheld: frozenset[str]
    """Those of `left_out` that their agents speak against or that can't be reached; the others only wait for smg."""
    kept: frozenset[str] = frozenset()
    """Those of `entries` that nobody wants any more and that stay until a wanted one is ready."""


def refuse_list(wanted: WorkerList) -> str | None:
    """What is wrong with a list beyond its schema, or None."""
    for label, values in (("id", [w.id for w in wanted.workers]), ("url", [w.url for w in wanted.workers])):
        twice = next((v for v in values if values.count(v) > 1), None) if len(set(values)) < len(values) else None
        if twice is not None:
            return f"workers: {label} {twice!r} stands in the list twice; each must be unique"
    for worker in wanted.workers:
        for label, url in (("url", worker.url), ("agentUrl", worker.agent_url)):
            parts = urlsplit(url)
            if parts.scheme != "http" or not parts.hostname or parts.path or parts.query:
                return f"worker {worker.id!r}: {label} {url!r} must be http://<address>:<port>"
    return None


def speaks_against(worker: Worker, state: AgentState | None) -> str | None:
    """Why the worker must not get requests, by its agent's last word; None for a good word or none at all."""
    if state is None:
        return None
    if state.instance != worker.id:
        return f"AnotherInstance: {state.instance} is at its address"
    if state.engine_id != worker.engine_id:
        return "AnotherEngineRun: its engine restarted and is not verified yet"
    if state.phase in WITHHOLDING_PHASES:
        return str(state.phase)
    return None


def lost_paths(wanted: WorkerList, paths: Mapping[str, DataPath]) -> frozenset[str]:
    """Agent URLs of the workers that this router can't reach, none if it reaches no worker at all."""
    found = {worker.agent_url: paths.get(worker.agent_url) for worker in wanted.workers}
    if not any(path in (DataPath.ANSWERS, DataPath.CONNECTS) for path in found.values()):
        return frozenset()
    return frozenset(url for url, path in found.items() if path is DataPath.UNREACHABLE)


def plan_manifest(
    wanted: WorkerList,
    agents: Mapping[str, AgentState],
    smg: SmgView,
    listed: Sequence[Entry],
    paths: Mapping[str, DataPath] = NOTHING_TRIED,
    leaving: Sequence[Worker] = (),
) -> Manifest:
    """The manifest to write next; `agents` maps agent URL to the last word, `listed` is what the manifest has now,
    `paths` maps agent URL to the way there (absent: not tried yet), `leaving` are workers of earlier lists."""
    lost = lost_paths(wanted, paths)
    in_manifest = {(entry.id, entry.url) for entry in listed}
    in_smg = {worker.url for worker in smg.workers}
    entries: list[Entry] = []
    left_out: dict[str, str] = {}
    withheld: set[str] = set()
    for worker in wanted.workers:
        if (reason := speaks_against(worker, agents.get(worker.agent_url))) is not None:
            left_out[worker.id] = reason
            withheld.add(worker.id)
        elif worker.agent_url in lost:
            left_out[worker.id] = f"{UNREACHABLE}: neither its agent nor its engine can be reached from this router"
            withheld.add(worker.id)
        elif (worker.id, worker.url) not in in_manifest and smg.reach is Reach.UNKNOWN:
            left_out[worker.id] = "SmgUnknown: smg does not say which workers it has"
        elif (worker.id, worker.url) not in in_manifest and worker.url in in_smg:
            left_out[worker.id] = "AddressInUse: smg still has a removed worker at this address"
        else:
            entries.append(_entry(worker))
    kept = [_entry(w) for w in _kept(wanted, leaving, smg, entries, listed) if _is_well(w, agents, paths)]
    return Manifest((*entries, *kept), left_out, frozenset(withheld), frozenset(entry.id for entry in kept))


def _kept(
    wanted: WorkerList, leaving: Sequence[Worker], smg: SmgView, entries: Sequence[Entry], listed: Sequence[Entry]
) -> Sequence[Worker]:
    """Workers that are to go and are all that smg has ready, while others are on their way in (or held back).

    An explicit zero takes all at once.
    """
    ready = {(worker.id, worker.url) for worker in smg.workers if worker.status is WorkerStatus.READY}
    if not wanted.workers or smg.reach is Reach.DOWN or any((entry.id, entry.url) in ready for entry in entries):
        return ()
    ids, urls = {worker.id for worker in wanted.workers}, {worker.url for worker in wanted.workers}
    return [
        worker
        for worker in leaving
        if worker.id not in ids and worker.url not in urls and _entry(worker) in listed
        # smg that is too slow to say what it has may have just these
        if smg.reach is Reach.UNKNOWN or (worker.id, worker.url) in ready
    ]


def _is_well(worker: Worker, agents: Mapping[str, AgentState], paths: Mapping[str, DataPath]) -> bool:
    """Whether its agent says so now; silence is not enough to keep what the operator took away."""
    state = agents.get(worker.agent_url)
    answers = state is not None and paths.get(worker.agent_url) is DataPath.ANSWERS
    return answers and speaks_against(worker, state) is None


def _entry(worker: Worker) -> Entry:
    return Entry(id=worker.id, url=worker.url, model=worker.model)


def render(entries: Sequence[Entry]) -> str:
    """smg's manifest; any field that it does not know fails the whole file, so there are no others."""
    workers = [{"id": e.id, "url": e.url, "worker_type": "regular", "model_id": e.model} for e in entries]
    return json.dumps({"version": 1, "workers": workers}, indent=1) + "\n"


def parse(text: str) -> tuple[Entry, ...]:
    """The entries of a manifest of ours.

    Raises:
        ValueError: the text is not such a manifest.
    """
    try:
        return tuple(Entry(id=w["id"], url=w["url"], model=w["model_id"]) for w in json.loads(text)["workers"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a manifest of ours: {error!r}") from error


def report_workers(wanted: WorkerList | None, manifest: Manifest, smg: SmgView) -> list[RoutedWorker]:
    """Every wanted worker with smg's own word on it, then what smg has and nobody wants."""
    if smg.reach is not Reach.ANSWERED:
        return []
    present = {(worker.id, worker.url): worker for worker in smg.workers}
    told = []
    for worker in wanted.workers if wanted else []:
        reason = manifest.left_out.get(worker.id, "")
        found = present.pop((worker.id, worker.url), None)
        if found is not None:
            status = found.status
        else:
            status = WorkerStatus.WITHHELD if worker.id in manifest.withheld else WorkerStatus.ABSENT
        told.append(
            RoutedWorker(id=worker.id, url=worker.url, engine_id=worker.engine_id, status=status, reason=reason)
        )
    return told + [
        RoutedWorker(
            id=ghost.id or "",
            url=ghost.url,
            engine_id=None,
            status=ghost.status,
            reason="LastReady: kept until a wanted worker is ready" if ghost.id in manifest.kept else "NotWanted",
        )
        for ghost in present.values()
    ]
