"""What an operator must not do: write while nothing changes, roll on a restart, double or forget after a kill.

All three run on a real API server; writes are counted in its audit log by user.
"""

import asyncio
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path

from e2e.bed.api_only import ApiOnly
from e2e.bench import services
from e2e.bench.client import BareClient, Object, until
from e2e.bench.figures import Recorder
from e2e.bench.operator import OperatorProcess
from e2e.bench.reconcile import converge

OPERATOR = "sluice-operator"
MERGE = "application/merge-patch+json"
INDEX = "serving.sluice.dev/index"
SERVICE_UID = "serving.sluice.dev/service-uid"


def operator_kubeconfig(bed: ApiOnly) -> Path:
    return bed.user_kubeconfig(OPERATOR, groups=["system:masters"])


async def idle(bed: ApiOnly, workdir: Path, *, count: int = 200, seconds: float = 300) -> None:
    """`idle.writes`: what the operator writes in `seconds` without any change, the Lease left out."""
    figures = Recorder("idle")
    async with BareClient(bed.kubeconfig) as api:
        with OperatorProcess(operator_kubeconfig(bed), workdir):
            await converge(api, "idle", count)
            await _quiet(bed)
            mark = bed.audit.mark()
            await asyncio.sleep(seconds)
            writes = [w for w in bed.audit.since(mark) if w.user == OPERATOR and w.resource != "leases"]
    for write in writes[:20]:
        print(f"    {write}")
    figures.record("idle.writes", len(writes))
    figures.write()


async def _quiet(bed: ApiOnly, *, quiet_s: float = 10, deadline_s: float = 180) -> None:
    """Until the operator wrote nothing but its Lease for `quiet_s`."""
    end = time.monotonic() + deadline_s
    while True:
        mark = bed.audit.mark()
        await asyncio.sleep(quiet_s)
        if not [w for w in bed.audit.since(mark) if w.user == OPERATOR and w.resource != "leases"]:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"the operator still writes after {deadline_s:g} s")


async def restart(bed: ApiOnly, workdir: Path, *, count: int = 50) -> None:
    """`restart.pods_rolled`: pods made or gone after a kill and restart, and after a start with other defaults."""
    figures = Recorder("restart")
    config = operator_kubeconfig(bed)
    async with BareClient(bed.kubeconfig) as api:
        with OperatorProcess(config, workdir) as operator:
            await converge(api, "restart", count)
            await _quiet(bed)
            before = await _uids(api)
            operator.kill()
        with OperatorProcess(config, workdir):
            await _quiet(bed)
            after_restart = await _uids(api)
        changed = {
            "images": {"engine": "sluice-engine:next", "vllm": "vllm/vllm-openai:next", "router": "sluice-router:next"},
            "engineDefaults": {"simulatedArgs": ["--max-num-seqs=32"]},
        }
        with OperatorProcess(config, workdir, **changed):
            await _quiet(bed)
            after_change = await _uids(api)
    figures.record("restart.pods_rolled", len(before ^ after_restart) + len(before ^ after_change))
    figures.write()


async def _uids(api: BareClient) -> set[str]:
    return {p["metadata"]["uid"] for p in await services.engine_pods(api, "restart")}


async def crash(bed: ApiOnly, workdir: Path, *, kills: int = 50, seed: int = 1) -> None:
    """`crash.*`: SIGKILL at random moments while services come, change and lose pods.

    A duplicate is a second live pod at one index of a pool; it is looked for after each kill and at the end.
    """
    figures = Recorder("crash")
    draw = random.Random(seed)
    duplicates, not_converged = 0, 0
    operator = OperatorProcess(operator_kubeconfig(bed), workdir)
    async with BareClient(bed.kubeconfig) as api:
        await services.make_namespaces(api, [services.a_service("x", "crash-0", 1)])
        wanted: dict[str, Object] = {}
        for number in range(kills):
            operator.start()
            operator.wait_ready()
            await _disturb(api, draw, wanted, number)
            await asyncio.sleep(draw.uniform(0, 0.4))
            operator.kill()
            duplicates += _doubled(await services.engine_pods(api, "crash"))
            if number % 10 == 9:  # let it finish now and then, so that every phase gets its share of kills
                not_converged += await _finish(api, operator, wanted)
        not_converged += await _finish(api, operator, wanted)
        duplicates += _doubled(await services.engine_pods(api, "crash"))
    figures.record("crash.duplicate_pods", duplicates)
    figures.record("crash.not_converged", not_converged)
    figures.write()


async def _disturb(api: BareClient, draw: random.Random, wanted: dict[str, Object], number: int) -> None:
    """One new service, one changed size, one deleted pod."""
    made = services.a_service(f"crash{number}", "crash-0", draw.randint(1, 4))
    await api.call("POST", services.collection_path(made), made)
    wanted[made["metadata"]["name"]] = made
    other = draw.choice(list(wanted.values()))
    size = draw.randint(0, 4)
    other["spec"]["pools"][0]["replicas"] = size
    patch = {"spec": {"pools": [{"name": "default", "replicas": size}]}}
    await api.call("PATCH", services.service_path(other), patch, content=MERGE)
    pods = await services.engine_pods(api, "crash")
    if pods:
        meta = draw.choice(pods)["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        await api.call("DELETE", path, {"gracePeriodSeconds": 0})


async def _finish(api: BareClient, operator: OperatorProcess, wanted: dict[str, Object]) -> int:
    """Services that do not have exactly their pods within the deadline."""
    with operator:
        try:
            await until("services have their pods", partial(_settled, api, wanted), deadline_s=60)
        except TimeoutError:
            return len(await _unsettled(api, wanted))
    return 0


async def _settled(api: BareClient, wanted: dict[str, Object]) -> bool:
    return not await _unsettled(api, wanted)


async def _unsettled(api: BareClient, wanted: dict[str, Object]) -> list[str]:
    live = await api.items(f"{services.API}/namespaces/crash-0/inferenceservices")
    names = {s["metadata"]["uid"]: s["metadata"]["name"] for s in live}
    # Fake nodes have no kubelet, so what was deleted with grace stays Terminating: it counts for nobody.
    pods = [p for p in await services.engine_pods(api, "crash") if not p["metadata"].get("deletionTimestamp")]
    counts = Counter(names.get(p["metadata"]["labels"][SERVICE_UID]) for p in pods)
    return [name for name, service in wanted.items() if counts[name] != service["spec"]["pools"][0]["replicas"]]


def _doubled(pods: list[Object]) -> int:
    live = [p for p in pods if not p["metadata"].get("deletionTimestamp")]
    slots = Counter((p["metadata"]["labels"][SERVICE_UID], p["metadata"]["labels"][INDEX]) for p in live)
    return sum(count - 1 for count in slots.values())
