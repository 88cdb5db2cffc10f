"""InferenceServices for measurements: many small ones, spread over namespaces as tenants would be."""

from functools import partial
from typing import Any

from e2e.bench.client import BareClient, Object, at_once

API = "/apis/serving.sluice.dev/v1alpha1"
SELECTOR = "labelSelector=app.kubernetes.io/managed-by%3Dsluice"
ENGINES = f"{SELECTOR},app.kubernetes.io/component%3Dengine"
PER_NAMESPACE = 50


def a_service(name: str, namespace: str, replicas: int) -> Object:
    return {
        "apiVersion": "serving.sluice.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"uri": "hf://example/model"},
            "engine": {"type": "Simulated"},
            "pools": [{"name": "default", "replicas": replicas}],
        },
    }


def fleet(prefix: str, services: int, replicas: int) -> list[Object]:
    return [a_service(f"{prefix}{i}", f"{prefix}-{i // PER_NAMESPACE}", replicas) for i in range(services)]


async def make_namespaces(api: BareClient, objects: list[Object]) -> None:
    names = sorted({o["metadata"]["namespace"] for o in objects})
    for name in names:
        await api.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})


async def apply_all(api: BareClient, objects: list[Object]) -> None:
    """Create the services, 8 at once."""
    await at_once(8, [partial(api.call, "POST", collection_path(o), o) for o in objects])


def collection_path(obj: Object) -> str:
    return f"{API}/namespaces/{obj['metadata']['namespace']}/inferenceservices"


def service_path(obj: Object) -> str:
    return f"{collection_path(obj)}/{obj['metadata']['name']}"


async def engine_pods(api: BareClient, prefix: str) -> list[Object]:
    pods = await api.items(f"/api/v1/pods?{ENGINES}")
    return [p for p in pods if p["metadata"]["namespace"].startswith(f"{prefix}-")]


def duplicates(pods: list[Object], replicas: int) -> int:
    """Live pods beyond `replicas` per service and pool: what a crash or a stale view must never leave."""
    counts: dict[tuple[Any, ...], int] = {}
    for pod in pods:
        if pod["metadata"].get("deletionTimestamp"):
            continue
        labels = pod["metadata"]["labels"]
        key = (pod["metadata"]["namespace"], labels["serving.sluice.dev/service-uid"])
        counts[key] = counts.get(key, 0) + 1
    return sum(max(0, count - replicas) for count in counts.values())
