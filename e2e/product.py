"""Sluice on a local bed: images, charts and services, for the end-to-end suites and measurements."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.bed import build, images
from e2e.bed.local import LocalBed
from e2e.target import ROOT, SYSTEM, Target, install

API = "/apis/serving.sluice.dev/v1alpha1"
CRD_API = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
PLURALS = ("inferenceservices", "acceleratorprofiles")
MERGE = "application/merge-patch+json"
Object = dict[str, Any]


def until(what: str, check: Callable[[], Any], deadline_s: float, *, every_s: float = 0.2) -> Any:
    """The first true answer of `check`.

    Raises:
        TimeoutError: none within the deadline; says what was waited for and the last answer.
    """
    end = time.monotonic() + deadline_s
    while not (found := check()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {deadline_s:g} s (last: {found!r})")
        time.sleep(every_s)
    return found


def install_crds(api: Any, directory: Path = ROOT / "crds") -> None:
    """Create our CRDs and wait until they are served; `api` is a bed's synchronous client."""
    for path in sorted(directory.glob("*.yaml")):
        crd = yaml.safe_load(path.read_text())
        api.create(CRD_API, crd)

    def is_served(plural: str) -> bool:
        status, _ = api.request("GET", f"{API}/{plural}")  # 404, then 429 while the storage starts, then 200
        return bool(status == 200)

    until("CRDs served", lambda: all(is_served(plural) for plural in PLURALS), 30)


def fetch(bed: LocalBed, url: str, *, method: str = "GET", body: Any = None, timeout_s: float = 10) -> str:
    """One HTTP request from inside the bed's network; the answer's text."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    with bed.in_network(), urllib.request.urlopen(request, timeout=timeout_s) as answer:
        text: str = answer.read().decode()
        return text


def bound_claim(bed: LocalBed, namespace: str, directory: Path) -> str:
    """Make a claim `models`, bound to a directory of this machine; its name. The volume goes with the bed."""
    size = {"storage": "1Mi"}
    bed.api.create(
        "/api/v1/persistentvolumes",
        {
            "metadata": {"name": namespace},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadOnlyMany"],
                "hostPath": {"path": str(directory), "type": "Directory"},
                "claimRef": {"namespace": namespace, "name": "models"},
            },
        },
    )
    spec = {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeName": namespace}
    bed.api.create(
        f"/api/v1/namespaces/{namespace}/persistentvolumeclaims",
        {"metadata": {"name": "models"}, "spec": {**spec, "resources": {"requests": size}}},
    )
    return "models"


def kill_container(pod: Object, container: str) -> None:
    """SIGKILL to the processes of one container of a pod on the local bed, found by its ID in their control groups."""
    statuses = [*pod["status"].get("containerStatuses", []), *pod["status"].get("initContainerStatuses", [])]
    container_id = next(c["containerID"] for c in statuses if c["name"] == container).rsplit("/", 1)[1]
    for entry in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            inside = container_id in entry.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if inside:
            os.kill(int(entry.parent.name), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Product:
    """Sluice, installed by Helm with the images of this checkout."""

    bed: LocalBed
    target: Target

    @classmethod
    def install(cls, bed: LocalBed, *settings: str) -> "Product":
        images.build_images(bed.images)
        target = Target(kubeconfig=bed.kubeconfig, context=None, helm=build.build(("helm",))["helm"] / "helm")
        install(target, *settings)
        return cls(bed, target)

    def scale_operator(self, replicas: int) -> None:
        """Set the operator's size and wait until its pods are as many."""
        path = f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/sluice-operator"
        self.bed.api.patch(path, {"spec": {"replicas": replicas}}, content_type=MERGE)

        def settled() -> bool:
            pods = self.bed.api.get(f"/api/v1/namespaces/{SYSTEM}/pods")["items"]
            ready = self.bed.api.get(path).get("status", {}).get("readyReplicas", 0)
            return len(pods) == replicas and ready == replicas

        until(f"operator has {replicas} pods", settled, 60)


@dataclass(frozen=True, slots=True)
class Service:
    """One InferenceService on a bed, and what a user sees of it."""

    bed: LocalBed
    namespace: str
    name: str

    @classmethod
    def create(cls, bed: LocalBed, namespace: str, name: str, spec: Object) -> "Service":
        body = {
            "apiVersion": "serving.sluice.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }
        bed.api.create(f"{API}/namespaces/{namespace}/inferenceservices", body)
        return cls(bed, namespace, name)

    @property
    def path(self) -> str:
        return f"{API}/namespaces/{self.namespace}/inferenceservices/{self.name}"

    def get(self) -> Object:
        found: Object = self.bed.api.get(self.path)
        return found

    def patch(self, spec: Object) -> None:
        self.bed.api.patch(self.path, {"spec": spec}, content_type=MERGE)

    def condition(self, kind: str) -> Object:
        """The condition of this type; {} while there is none."""
        conditions = (self.get().get("status") or {}).get("conditions") or []
        return next((c for c in conditions if c["type"] == kind), {})

    def is_settled(self) -> bool:
        """Ready for the present generation and nothing under way, as kstatus sees it."""
        service = self.get()
        status = service.get("status") or {}
        states = {c["type"]: c["status"] for c in status.get("conditions") or []}
        return (
            status.get("observedGeneration") == service["metadata"]["generation"]
            and states.get("Ready") == "True"
            and states.get("Reconciling") == "False"
        )

    def wait_settled(self, deadline_s: float = 120) -> None:
        try:
            until(f"{self.name} settled", self.is_settled, deadline_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{json.dumps(self.get().get('status'), indent=1)}") from error

    def pods(self, component: str = "engine") -> list[Object]:
        """Pods of the service that nobody deleted yet."""
        uid = self.get()["metadata"]["uid"]
        selector = f"serving.sluice.dev/service-uid={uid},app.kubernetes.io/component={component}"
        found = self.bed.api.get(f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={selector}")["items"]
        return [p for p in found if not p["metadata"].get("deletionTimestamp")]

    def delete_pod(self, pod: Object, **options: Any) -> None:
        self.bed.api.request("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}", options)

    def url(self) -> str:
        """Address of the service inside the bed's network."""
        service = self.bed.api.get(f"/api/v1/namespaces/{self.namespace}/services/{self.name}")
        return f"http://{service['spec']['clusterIP']}:80"

    @contextmanager
    def traffic(
        self,
        *,
        model: str | None = None,
        count: int = 100_000,
        concurrency: int = 8,
        reconnects: int = 0,
        prompt_words: int = 40,
    ) -> Iterator["Traffic"]:
        """Continuous load through the router; `Traffic.result` after the block says what became of each request."""
        command = [sys.executable, "-m", "e2e.traffic", "--url", self.url(), "--model", model or self.name]
        command += ["--count", str(count), "--concurrency", str(concurrency), "--seconds", "900", "--pause", "0.02"]
        command += ["--reconnects", str(reconnects), "--prompt-words", str(prompt_words)]
        with self.bed.in_network():
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        run = Traffic(process)
        try:
            yield run
        finally:
            run.stop()


class Traffic:
    """A running load; see `e2e.traffic.driver` for what is counted."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._last = "0"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.result: Object = {}

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last = line

    @property
    def ended(self) -> int:
        """Requests that were answered or lost so far."""
        return int(self.result["sent"] if self.result else self._last)

    def wait_for(self, more: int, deadline_s: float = 300) -> None:
        """Until so many more requests have ended."""
        wanted = self.ended + more
        until(f"{more} more requests", lambda: self.ended >= wanted, deadline_s)

    @property
    def is_over(self) -> bool:
        return bool(self.result)

    def send_no_more(self) -> None:
        """No new requests from now on; those in flight go on."""
        self._process.terminate()

    def stop(self) -> None:
        """No new requests; those in flight end, then the result is there."""
        if self.result:
            return
        self._process.terminate()
        self._process.wait(timeout=180)
        self._reader.join(timeout=10)
        self.result = json.loads(self._last)

    @property
    def lost(self) -> int:
        """Requests that were not answered in full."""
        return int(self.result["sent"]) - int(self.result["complete"])
