"""The bed's own smoke test: what the other suites take for granted. Runs in about a minute."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from typing import Any

import pytest

from e2e.bed import base, images
from e2e.bed.api import Object
from e2e.bed.cluster import Cap
from e2e.bed.existing import find_kubectl
from e2e.bed.local import LocalBed
from e2e.bed.process import wait_for

pytestmark = pytest.mark.needs(Cap.REAL_PODS, Cap.REGISTRY)

IMAGE = "registry.example.com/bed/python:1"
SERVE = (
    "mkdir /tmp/www; echo hello from $(cat /etc/hostname) > /tmp/www/hello; exec python3 -m http.server -d /tmp/www "
)
POD_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def image(local_bed: LocalBed) -> str:
    """An image with Python and a shell, under a name of a registry that does not exist."""
    kept = images.cache()
    base.python_base(kept)
    local_bed.images.copy_from(kept, base.NAME, IMAGE)
    return IMAGE


def a_pod(name: str, image: str, command: str, *, node: str = "", port: int = 0, **container: Any) -> Object:
    """A pod with one container that runs a shell command; with a ``port`` it gets a readiness probe."""
    main: Object = {"name": "main", "image": image, "command": ["sh", "-c", command], **container}
    if port:
        main["readinessProbe"] = {"httpGet": {"path": "/hello", "port": port}, "periodSeconds": 1, "timeoutSeconds": 3}
    spec: Object = {"containers": [main], "terminationGracePeriodSeconds": 1, "restartPolicy": "Never"}
    if node:
        spec["nodeName"] = node
    return {"metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def create_pod(bed: LocalBed, namespace: str, pod: Object) -> None:
    bed.api.create(f"/api/v1/namespaces/{namespace}/pods", pod)


def pod_status(bed: LocalBed, namespace: str, name: str) -> Object:
    status: Object = bed.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")["status"]
    return status


def is_pod_ready(bed: LocalBed, namespace: str, name: str) -> bool:
    conditions = pod_status(bed, namespace, name).get("conditions", ())
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def wait_pods_ready(bed: LocalBed, namespace: str, *names: str) -> None:
    for name in names:
        wait_for(f"pod {name} ready", lambda name=name: is_pod_ready(bed, namespace, name), POD_TIMEOUT_S)  # type: ignore[misc]  # a lambda's default


def phase_of(bed: LocalBed, namespace: str, name: str) -> str:
    return str(pod_status(bed, namespace, name).get("phase"))


def log_of(bed: LocalBed, namespace: str, name: str) -> str:
    return str(bed.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}/log"))


def main_state(bed: LocalBed, namespace: str, name: str) -> Object:
    statuses = pod_status(bed, namespace, name).get("containerStatuses", [])
    return dict(statuses[0]["state"]) if statuses else {}


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode()).strip()


def run_to_end(bed: LocalBed, namespace: str, pod: Object) -> str:
    """Run a pod that ends; its log. Fails with the log when it failed."""
    create_pod(bed, namespace, pod)
    name = pod["metadata"]["name"]
    wait_for(f"pod {name} ended", lambda: phase_of(bed, namespace, name) in ("Succeeded", "Failed"), POD_TIMEOUT_S)
    log = log_of(bed, namespace, name)
    assert phase_of(bed, namespace, name) == "Succeeded", log
    return log


def test_two_ready_nodes_come_up_within_15_seconds(local_bed: LocalBed) -> None:
    assert len(local_bed.nodes) == 2
    assert all(local_bed.is_node_ready(node) for node in local_bed.nodes)
    assert local_bed.startup_s < 15


def test_openapi_is_sound_so_kubectl_apply_and_helm_work(local_bed: LocalBed, namespace: str) -> None:
    """Built with a wrong Go version, Kubernetes serves a broken document (kubernetes/kubernetes#139159)."""
    assert '"Extensions"' not in json.dumps(local_bed.api.get("/openapi/v2"))
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "applied"}, "data": {"key": "value"}}
    command = [find_kubectl(), "--kubeconfig", str(local_bed.kubeconfig), "-n", namespace, "apply", "-f", "-"]
    done = subprocess.run(command, input=json.dumps(manifest), capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "configmap/applied created", done.stderr


def test_pod_with_native_sidecar_and_readiness_probe_runs(local_bed: LocalBed, namespace: str, image: str) -> None:
    pod = a_pod("web", image, SERVE + "8080", port=8080)
    sidecar = {"name": "side", "image": image, "command": ["sleep", "1000"], "restartPolicy": "Always"}
    pod["spec"]["initContainers"] = [sidecar]
    create_pod(local_bed, namespace, pod)
    wait_pods_ready(local_bed, namespace, "web")
    status = pod_status(local_bed, namespace, "web")
    assert [entry["ready"] for entry in (*status["initContainerStatuses"], *status["containerStatuses"])] == [
        True,
        True,
    ]


def test_images_come_from_the_registry_under_their_real_names(local_bed: LocalBed, namespace: str, image: str) -> None:
    ref = "quay.example.org/team/app:7"
    local_bed.images.copy_from(local_bed.images, image, ref)
    assert run_to_end(local_bed, namespace, a_pod("pulled", ref, "echo it runs")).strip() == "it runs"
    assert local_bed.registry.pulls(ref) == 1


def test_missing_image_is_an_image_pull_error(local_bed: LocalBed, namespace: str) -> None:
    create_pod(local_bed, namespace, a_pod("missing", "quay.example.org/no/such:1", "true"))

    def reason() -> bool:
        waiting = main_state(local_bed, namespace, "missing").get("waiting", {})
        return waiting.get("reason") in ("ErrImagePull", "ImagePullBackOff")

    wait_for("ErrImagePull", reason, POD_TIMEOUT_S)


def test_service_answers_by_name_from_pods_and_by_address_from_here(
    local_bed: LocalBed, namespace: str, image: str
) -> None:
    """DNS and kube-proxy from both nodes (so from the server's own node too), from the hub and from outside."""
    create_pod(local_bed, namespace, a_pod("server", image, SERVE + "8080", node="n1", port=8080))
    service = {
        "metadata": {"name": "hi"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    address = local_bed.api.create(f"/api/v1/namespaces/{namespace}/services", service)["spec"]["clusterIP"]
    wait_pods_ready(local_bed, namespace, "server")
    script = "python3 -c \"import urllib.request as u; print(u.urlopen('http://hi/hello', timeout=5).read().decode())\""
    retried = f"for i in 1 2 3 4 5 6 7 8 9 10; do {script} && exit 0; sleep 0.5; done; exit 1"
    for node in local_bed.nodes:
        log = run_to_end(local_bed, namespace, a_pod(f"client-{node}", image, retried, node=node))
        assert log.strip().endswith("hello from server")
    with local_bed.in_network():
        assert fetch(f"http://{address}/hello") == "hello from server"
    assert fetch(f"http://127.0.0.1:{local_bed.forward(address, 80)}/hello") == "hello from server"


def test_pod_reaches_the_api_server_with_its_service_account(local_bed: LocalBed, namespace: str, image: str) -> None:
    script = """python3 - <<'END'
import json, ssl, urllib.request
directory = "/var/run/secrets/kubernetes.io/serviceaccount"
request = urllib.request.Request("https://kubernetes.default.svc/version")
request.add_header("Authorization", "Bearer " + open(directory + "/token").read())
context = ssl.create_default_context(cafile=directory + "/ca.crt")
print(json.load(urllib.request.urlopen(request, context=context, timeout=10))["gitVersion"])
END"""
    log = run_to_end(local_bed, namespace, a_pod("in-cluster", image, script))
    assert log.strip() == local_bed.version


def test_exec_reaches_a_running_container(local_bed: LocalBed, namespace: str, image: str) -> None:
    create_pod(local_bed, namespace, a_pod("shell", image, SERVE + "8080", port=8080))
    wait_pods_ready(local_bed, namespace, "shell")
    command = [find_kubectl(), "--kubeconfig", str(local_bed.kubeconfig), "-n", namespace]
    done = subprocess.run(
        [*command, "exec", "shell", "--", "cat", "/etc/hostname"], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "shell", done.stderr


def test_container_over_its_memory_limit_is_killed(local_bed: LocalBed, namespace: str, image: str) -> None:
    limit = {"limits": {"memory": "48Mi"}, "requests": {"memory": "16Mi"}}
    pod = a_pod("greedy", image, "exec python3 -c 'bytearray(200_000_000)'", resources=limit)
    create_pod(local_bed, namespace, pod)
    wait_for("the pod failed", lambda: phase_of(local_bed, namespace, "greedy") == "Failed", POD_TIMEOUT_S)
    ended = main_state(local_bed, namespace, "greedy")["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_pod_that_asks_for_gpus_waits_for_a_node_that_has_them(local_bed: LocalBed, namespace: str, image: str) -> None:
    asked = {"limits": {"nvidia.com/gpu": "2"}}
    create_pod(local_bed, namespace, a_pod("gpu", image, "sleep 100", resources=asked))
    wait_for("unschedulable", lambda: "conditions" in pod_status(local_bed, namespace, "gpu"), POD_TIMEOUT_S)
    local_bed.set_gpus("n2", 2)
    wait_for("the pod runs", lambda: phase_of(local_bed, namespace, "gpu") == "Running", POD_TIMEOUT_S)
    assert local_bed.api.get(f"/api/v1/namespaces/{namespace}/pods/gpu")["spec"]["nodeName"] == "n2"
    local_bed.set_gpus("n2", 0)


def test_writes_are_counted_by_who_wrote(local_bed: LocalBed, namespace: str) -> None:
    mark = local_bed.audit.mark()
    local_bed.api.create(f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": "counted"}})
    local_bed.api.get(f"/api/v1/namespaces/{namespace}/configmaps/counted")
    mine = [
        write for write in local_bed.audit.since(mark) if write.user == "sluice-bed" and write.namespace == namespace
    ]
    assert [(write.verb, write.resource, write.name, write.code) for write in mine] == [
        ("create", "configmaps", "counted", 201)
    ]


@pytest.mark.needs(Cap.DAEMONS)
def test_restarted_daemons_leave_pods_alone(local_bed: LocalBed, namespace: str, image: str) -> None:
    create_pod(local_bed, namespace, a_pod("steady", image, SERVE + "8080", node="n1", port=8080))
    wait_pods_ready(local_bed, namespace, "steady")
    before = pod_status(local_bed, namespace, "steady")["containerStatuses"][0]
    for daemon in ("etcd", "apiserver", "kcm", "scheduler"):
        local_bed.restart(daemon)
    for daemon in ("containerd", "kubelet", "kube-proxy"):
        local_bed.restart(daemon, "n1")
    local_bed.wait_node_ready("n1")
    marker = a_pod("after", image, "true", node="n1")
    run_to_end(local_bed, namespace, marker)
    after = pod_status(local_bed, namespace, "steady")["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before["containerID"], 0)


@pytest.mark.needs(Cap.POWER)
def test_node_without_power_comes_back_with_its_pods(local_bed: LocalBed, namespace: str, image: str) -> None:
    pod = a_pod("survivor", image, SERVE + "8080", node="n2", port=8080)
    pod["spec"]["restartPolicy"] = "Always"
    create_pod(local_bed, namespace, pod)
    wait_pods_ready(local_bed, namespace, "survivor")
    local_bed.power_off("n2")
    local_bed.power_on("n2")

    def restarted() -> bool:
        statuses = pod_status(local_bed, namespace, "survivor")["containerStatuses"]
        return bool(statuses[0]["restartCount"] >= 1 and statuses[0]["ready"])

    wait_for("the pod serves again", restarted, POD_TIMEOUT_S)
    local_bed.wait_node_ready("n2")


@pytest.mark.needs(Cap.PARTITION)
def test_cut_node_is_not_ready_until_its_link_returns(local_bed: LocalBed) -> None:
    local_bed.partition("n2")
    try:
        wait_for("n2 NotReady", lambda: not local_bed.is_node_ready("n2"), 120.0)
    finally:
        local_bed.heal("n2")
    local_bed.wait_node_ready("n2")


def test_api_server_can_stay_away_and_return(local_bed: LocalBed, namespace: str) -> None:
    local_bed.stop("apiserver")
    assert not local_bed.api.is_ready()
    started = time.monotonic()
    local_bed.start("apiserver")
    assert local_bed.api.get(f"/api/v1/namespaces/{namespace}")["metadata"]["name"] == namespace
    assert time.monotonic() - started < 60
