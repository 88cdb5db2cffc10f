"""How fast the operator turns declarations into objects, on a real API server with fake nodes.

`converge`: from the first apply until every engine pod and every other child exists and each status has seen its
generation. The yardstick of the same run is a bare client that creates copies of the very same objects, 8 at once.
`replace`: from sending the deletion of an engine pod until the watch shows its replacement.
"""

import asyncio
import contextlib
import random
import time
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

from e2e.bed.api_only import ApiOnly
from e2e.bench import services
from e2e.bench.client import BareClient, Object, at_once, until
from e2e.bench.figures import Recorder
from e2e.bench.operator import OperatorProcess

REPLICAS = 4
DELETIONS = 200
# (collection below the namespace, kind's API root): everything the operator makes for a service.
CHILDREN = (
    ("/api/v1", "pods"),
    ("/api/v1", "services"),
    ("/api/v1", "configmaps"),
    ("/apis/apps/v1", "deployments"),
    ("/apis/apps/v1", "controllerrevisions"),
    ("/apis/policy/v1", "poddisruptionbudgets"),
    ("/apis/networking.k8s.io/v1", "networkpolicies"),
)


async def converge(api: BareClient, prefix: str, count: int) -> tuple[float, list[Object]]:
    """Seconds from the first apply to convergence, and the services."""
    objects = services.fleet(prefix, count, REPLICAS)
    await services.make_namespaces(api, objects)
    is_set_up = asyncio.Event()
    done = asyncio.create_task(_convergence(api, prefix, count, is_set_up))
    await is_set_up.wait()
    start = time.monotonic()
    await services.apply_all(api, objects)
    await asyncio.wait_for(done, timeout=count * 0.5 + 60)
    return time.monotonic() - start, objects


async def _convergence(api: BareClient, prefix: str, count: int, is_set_up: asyncio.Event) -> None:
    """Until every pod was created and every service's status has seen its generation."""
    current: set[str] = set()
    pods: set[str] = set()
    is_done = asyncio.Event()

    def is_mine(obj: Object) -> bool:
        return str(obj["metadata"].get("namespace", "")).startswith(f"{prefix}-")

    def check() -> None:
        if len(current) >= count and len(pods) >= count * REPLICAS:
            is_done.set()

    async def follow_services() -> None:
        async for _, service in api.watch(f"{services.API}/inferenceservices"):
            status = service.get("status") or {}
            if is_mine(service) and status.get("observedGeneration") == service["metadata"]["generation"]:
                current.add(service["metadata"]["uid"])
                check()

    async def follow_pods() -> None:
        async for kind, pod in api.watch(f"/api/v1/pods?{services.ENGINES}", metadata_only=True):
            if kind == "ADDED" and is_mine(pod):
                pods.add(pod["metadata"]["uid"])
                check()

    watches = [asyncio.create_task(follow_services()), asyncio.create_task(follow_pods())]
    await asyncio.sleep(0.5)  # both watches are open; nothing is measured before
    is_set_up.set()
    await is_done.wait()
    for watch in watches:
        watch.cancel()


async def children(api: BareClient, prefix: str) -> list[tuple[str, Object]]:
    """(collection path in a twin namespace, body without server fields and owners) of all children of the fleet."""
    copies = []
    for root, plural in CHILDREN:
        for item in await api.items(f"{root}/{plural}?{services.SELECTOR}"):
            namespace = item["metadata"]["namespace"]
            if not namespace.startswith(f"{prefix}-") or _is_made_by_kubernetes(item):
                continue
            copies.append((f"{root}/namespaces/bare{namespace}/{plural}", _bare(item, f"bare{namespace}")))
    return copies


def _is_made_by_kubernetes(item: Object) -> bool:
    return any(o["kind"] == "ReplicaSet" for o in item["metadata"].get("ownerReferences", []))


def _bare(item: Object, namespace: str) -> Object:
    meta = {k: v for k, v in item["metadata"].items() if k in ("name", "labels", "annotations")}
    body: Object = {k: v for k, v in item.items() if k not in ("metadata", "status")}
    spec: dict[str, Any] = dict(body.get("spec") or {})
    for assigned in ("clusterIP", "clusterIPs", "nodeName"):
        if spec.get(assigned) != "None":  # a headless Service declares "None" itself
            spec.pop(assigned, None)
    return {**body, **({"spec": spec} if spec else {}), "metadata": {**meta, "namespace": namespace}}


async def bare_create(api: BareClient, prefix: str) -> float:
    """Seconds that a bare client needs for the same objects."""
    copies = await children(api, prefix)
    for namespace in sorted({body["metadata"]["namespace"] for _, body in copies}):
        await api.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    start = time.monotonic()
    await at_once(8, [partial(api.call, "POST", path, body) for path, body in copies])
    return time.monotonic() - start


async def quiet(api: BareClient, *, quiet_s: float = 5, deadline_s: float = 300) -> None:
    """Until no pod of ours changed for `quiet_s`: scheduler and controllers have caught up."""
    loop = asyncio.get_running_loop()
    last, end = loop.time(), loop.time() + deadline_s

    async def follow() -> None:
        nonlocal last
        async for _ in api.watch(f"/api/v1/pods?{services.SELECTOR}", metadata_only=True):
            last = loop.time()

    following = asyncio.create_task(follow())
    try:
        while loop.time() - last < quiet_s:
            if loop.time() > end:
                raise TimeoutError(f"pods still change after {deadline_s:g} s")
            await asyncio.sleep(0.5)
    finally:
        following.cancel()


async def replace(api: BareClient, prefix: str, seed: int) -> list[float]:
    """Milliseconds from deletion to replacement, one per deletion, one after the other."""
    order = random.Random(seed)
    times: list[float] = []
    added: asyncio.Queue[tuple[float, str]] = asyncio.Queue()

    async def listen() -> None:
        async for kind, pod in api.watch(f"/api/v1/pods?{services.ENGINES}"):
            if kind == "ADDED":
                added.put_nowait((time.monotonic(), pod["metadata"]["labels"]["serving.sluice.dev/service-uid"]))

    listener = asyncio.create_task(listen())
    await asyncio.sleep(0.5)  # let the watch settle; nothing is measured before it
    victims = await services.engine_pods(api, prefix)
    for victim in order.sample(victims, min(DELETIONS, len(victims))):
        meta = victim["metadata"]
        start = time.monotonic()
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        await api.call("DELETE", path, {"gracePeriodSeconds": 0})
        while True:
            seen, uid = await asyncio.wait_for(added.get(), timeout=30)
            if uid == meta["labels"]["serving.sluice.dev/service-uid"]:
                times.append((seen - start) * 1000)
                break
    listener.cancel()
    return times


async def bare_replace(api: BareClient, prefix: str, seed: int) -> list[float]:
    """The same with a bare client that creates a copy when the watch shows the deletion: what the API server costs."""
    order = random.Random(seed)
    events: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()

    async def listen() -> None:
        async for kind, pod in api.watch(f"/api/v1/pods?{services.ENGINES}"):
            events.put_nowait((kind, pod))

    async def shown(name: str, *, deleted: bool) -> None:
        while True:
            kind, pod = await asyncio.wait_for(events.get(), timeout=30)
            goes = kind == "DELETED" or bool(pod["metadata"].get("deletionTimestamp"))
            if pod["metadata"]["name"] == name and goes == deleted:
                return

    listener = asyncio.create_task(listen())
    await asyncio.sleep(0.5)
    times: list[float] = []
    victims = await services.engine_pods(api, f"bare{prefix}")
    for number, victim in enumerate(order.sample(victims, min(DELETIONS, len(victims)))):
        meta = victim["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods"
        copy = _bare(victim, meta["namespace"])
        copy["metadata"]["name"] = f"copy-{number}"
        start = time.monotonic()
        deletion = asyncio.create_task(api.call("DELETE", f"{path}/{meta['name']}", {"gracePeriodSeconds": 0}))
        await shown(meta["name"], deleted=True)
        creation = asyncio.create_task(api.call("POST", path, copy))
        await shown(f"copy-{number}", deleted=False)
        times.append((time.monotonic() - start) * 1000)
        await asyncio.gather(deletion, creation)
    listener.cancel()
    return times


async def run(bed: ApiOnly, workdir: Path, *, large: bool = True) -> None:
    """Record the group; the API server and the CRDs are there already."""
    figures = Recorder("reconcile")
    async with BareClient(bed.kubeconfig) as api:
        with OperatorProcess(bed.kubeconfig, workdir) as operator:
            await converge(api, "warm", 5)  # first use of every code path and connection
            took, objects = await converge(api, "small", 200)
            figures.record("converge.200x4_s", took)
            pods = await services.engine_pods(api, "small")
            figures.record("converge.duplicate_pods", services.duplicates(pods, REPLICAS))
            await quiet(api)
            times = await replace(api, "small", seed=1)
            figures.record("replace.p50_ms", quantiles(times, n=100)[49])
            figures.record("replace.p99_ms", quantiles(times, n=100)[98])
            figures.record("converge.vs_bare_create", took / await bare_create(api, "small"))
            await quiet(api)
            bare = await bare_replace(api, "small", seed=1)
            figures.record("replace.bare_p50_ms", quantiles(bare, n=100)[49])
            if large:
                await _remove(api, "small", objects)
                await _remove_namespaces(api, "baresmall")
                large_s, _ = await converge(api, "large", 1000)
                figures.record("converge.1000x4_s", large_s)
                figures.record("converge.1000_vs_200_per_service", (large_s / 1000) / (took / 200))
                figures.record("operator.rss_mb_4000_pods", operator.rss_mb())
    figures.write()


async def _remove(api: BareClient, prefix: str, objects: list[Object]) -> None:
    await at_once(8, [partial(api.call, "DELETE", services.service_path(o)) for o in objects])
    await _remove_pods(api, prefix)


async def _remove_pods(api: BareClient, prefix: str) -> None:
    """By force: fake nodes have no kubelet that would end them."""

    async def gone() -> bool:
        pods = [p["metadata"] for p in await api.items(f"/api/v1/pods?{services.SELECTOR}")]
        left = [f"/api/v1/namespaces/{m['namespace']}/pods/{m['name']}" for m in pods if _is_of(m, prefix)]
        await at_once(8, [partial(_delete_now, api, path) for path in left])
        return not left

    await until(f"pods of {prefix} gone", gone, deadline_s=300, every_s=0.5)


def _is_of(meta: Object, prefix: str) -> bool:
    return str(meta["namespace"]).startswith(f"{prefix}-")


async def _delete_now(api: BareClient, path: str) -> None:
    with contextlib.suppress(RuntimeError):  # gone already
        await api.call("DELETE", path, {"gracePeriodSeconds": 0})


async def _remove_namespaces(api: BareClient, prefix: str) -> None:
    for namespace in await api.items("/api/v1/namespaces"):
        if namespace["metadata"]["name"].startswith(f"{prefix}-"):
            await api.call("DELETE", f"/api/v1/namespaces/{namespace['metadata']['name']}")
    await _remove_pods(api, prefix)  # in a namespace that goes, their Deployments make no new ones

    async def gone() -> bool:
        names = [n["metadata"]["name"] for n in await api.items("/api/v1/namespaces")]
        return not any(n.startswith(f"{prefix}-") for n in names)

    await until(f"namespaces {prefix} gone", gone, deadline_s=300, every_s=1)
