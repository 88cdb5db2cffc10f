"""How Flux, Helm and cli-utils judge an object of ours (kstatus rules), so that tests see what such tools see."""

from collections.abc import Mapping
from typing import Any


def kstatus(obj: Mapping[str, Any]) -> str:
    """`Terminating`, `InProgress`, `Failed` or `Current`; the first rule that matches wins.

    An object without any of the three conditions is Current for those tools. Ours must never look like that before the
    operator saw it: hence the default `status.observedGeneration: -1`.
    """
    metadata, status = obj["metadata"], obj.get("status") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    if "observedGeneration" in status and status["observedGeneration"] != metadata.get("generation"):
        return "InProgress"
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    return "Current" if conditions.get("Ready", "True") == "True" else "InProgress"
