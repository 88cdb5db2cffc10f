"""PodDisruptionBudgets as the eviction subresource checks them."""

from collections.abc import Iterable

from tests.fakeapi.errors import JsonObject, disruption_budget
from tests.fakeapi.selectors import match_labels


def is_ready(pod: JsonObject) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def check(pod: JsonObject, pods: Iterable[JsonObject], budgets: Iterable[JsonObject]) -> None:
    """Allow or refuse one eviction.

    Raises:
        ApiError: 429, a budget with an integer `minAvailable` would be broken.
    """
    if (pod.get("status") or {}).get("phase") != "Running" or "deletionTimestamp" in pod["metadata"]:
        return  # nothing to disrupt: pending, finished or already leaving
    labels = pod["metadata"].get("labels") or {}
    everyone = list(pods)
    for budget in budgets:
        spec = budget["spec"]
        if not match_labels(spec.get("selector") or {}, labels):
            continue
        if not is_ready(pod) and spec.get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
            continue
        healthy = [
            p
            for p in everyone
            if is_ready(p)
            and "deletionTimestamp" not in p["metadata"]
            and match_labels(spec.get("selector") or {}, p["metadata"].get("labels") or {})
        ]
        if len(healthy) - is_ready(pod) < int(spec.get("minAvailable", 0)):
            raise disruption_budget(pod["metadata"]["name"], budget["metadata"]["name"])
