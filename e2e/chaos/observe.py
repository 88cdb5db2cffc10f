"""What is looked at while a service is disturbed: gates, routers' lists, restarts."""

import json
import time
from collections.abc import Callable
from typing import Any

from e2e.product import Object, Service, fetch, until

GATE = "serving.sluice.dev/routable"


def a_spec(replicas: int, *args: str, **fields: Any) -> Object:
    """A simulated service with short health and drain times: rows wait for them."""
    return {
        "model": {"uri": "hf://example/model"},
        "engine": {"type": "Simulated", "args": list(args)},
        "pools": [{"name": "default", "replicas": replicas}],
        "health": {"selfTestPeriodSeconds": 2, "hangTimeoutSeconds": 15},
        "drain": {"timeoutSeconds": 60},
        **fields,
    }


def gate_of(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any(c["type"] == GATE and c["status"] == "True" for c in conditions)


def is_ready(pod: Object) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or [])


def names_of(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def restarts(pods: list[Object], container: str = "engine") -> int:
    statuses = [c for p in pods for c in p["status"].get("containerStatuses") or [] if c["name"] == container]
    return sum(c["restartCount"] for c in statuses)


def inject(service: Service, pod: Object, fault: str, when: Any = "now", **args: Any) -> None:
    """Switch a fault of the simulated engine on."""
    body = [{"name": fault, "args": args, "when": when}]
    fetch(service.bed, f"http://{pod['status']['podIP']}:9876/sim/faults", method="PUT", body=body)


def heal(service: Service, pod: Object) -> None:
    fetch(service.bed, f"http://{pod['status']['podIP']}:9876/sim/faults", method="DELETE")


class Routes:
    """The routers' own lists, asked directly: also with the API server or the operator away."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.addresses = [p["status"]["podIP"] for p in service.pods("router")]

    def instances(self) -> set[str]:
        """Instances that some router still sends requests to; a router that does not answer counts for none."""
        found: set[str] = set()
        for address in self.addresses:
            try:
                state = json.loads(fetch(self._service.bed, f"http://{address}:9910/workers"))
            except OSError:
                continue
            found |= {w["id"] for w in state["workers"] if w["status"] == "ready"}
        return found

    def seconds_until_without(self, name: str, since: float, deadline_s: float) -> float:
        """Seconds from `since` (monotonic) until no router sends requests to the instance."""
        until(f"{name} unrouted", lambda: name not in self.instances(), deadline_s, every_s=0.1)
        return time.monotonic() - since


def steadily(check: Callable[[], bool], seconds: float) -> bool:
    """True if the check held all the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not check():
            return False
        time.sleep(0.3)
    return True
