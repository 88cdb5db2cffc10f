"""`kubectl sluice` as a program on a real API server: kubectl runs it, RBAC limits it, the operator answers it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from sluice.api import names
from sluice.runtime import kinds
from tests.api.support import Stage

Object = dict[str, Any]

BIN = Path(sys.executable).parent
RUN_S = 60.0
CHART_ROLES = Path(__file__).parents[2] / "manifests" / "base" / "operator.yaml"


def sluice(kubeconfig: Path, *arguments: str, through_kubectl: bool = False) -> subprocess.CompletedProcess[str]:
    """The program with $KUBECONFIG, as a user has it."""
    program = [str(BIN / "kubectl"), "sluice"] if through_kubectl else [str(BIN / "kubectl-sluice")]
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": "/nonexistent", "KUBECONFIG": str(kubeconfig)}
    return subprocess.run(
        [*program, *arguments], env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
    )


def admin(stage: Stage, *arguments: str, through_kubectl: bool = False) -> subprocess.CompletedProcess[str]:
    return sluice(stage.cluster.bed.kubeconfig, *arguments, "-n", stage.namespace, through_kubectl=through_kubectl)


def test_kubectl_finds_the_plugin_and_status_matches_the_cluster(stage: Stage) -> None:
    stage.serve(replicas=2)
    done = admin(stage, "status", "s", "-o", "json", through_kubectl=True)
    assert (done.returncode, done.stderr) == (0, ""), done
    found = json.loads(done.stdout)
    pods = {pod["metadata"]["name"]: pod for pod in stage.pods()}
    assert {i["name"] for i in found["instances"]} == set(pods)
    for instance in found["instances"]:
        assert instance["phase"] == "Serving"
        assert instance["node"] == pods[instance["name"]]["spec"]["nodeName"]
        # The API server refuses to reach pods at loopback addresses, so nobody counted: unknown, not zero.
        assert instance["inFlight"] is None
    table = admin(stage, "status", "s")
    assert table.returncode == 0
    assert "IN-FLIGHT -: the API server does not reach the agents." in table.stdout


def test_explain_reads_the_operators_events(stage: Stage) -> None:
    stage.serve()
    stage.until("the Event is written", lambda: "Created instance" in admin(stage, "explain", "s").stdout, 30)
    assert admin(stage, "explain", "s").stdout.startswith(f"{stage.namespace}/s is Ready")


def test_drain_is_carried_out_by_the_operator_and_followed_to_the_end(stage: Stage) -> None:
    stage.serve(replicas=2)
    victim = stage.pods()[0]
    done = admin(stage, "drain", victim["metadata"]["name"], "--wait", "--timeout", "60s")
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-1].endswith(": gone")
    assert victim["metadata"]["uid"] not in stage.pod_uids()
    stage.until("two serve again", stage.is_ready)
    assert len(stage.pods()) == 2


def test_drain_is_taken_back_while_it_runs_and_the_instance_serves_again(stage: Stage) -> None:
    stage.serve(replicas=1)
    (pod,) = stage.pods()
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    stage.engine(pod).in_flight = 3
    stage.cluster.world.changed()
    assert admin(stage, "drain", name).returncode == 0

    def drains() -> bool:
        live = stage.api.get(stage.path(kinds.POD, name))
        return names.ANNOTATION_DRAIN_STARTED_AT in live["metadata"]["annotations"]

    stage.until("the drain has begun", drains)
    assert f"{name}: draining" in admin(stage, "status", "s").stdout
    done = admin(stage, "undrain", name, "--wait", "--timeout", "60s")
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-1].endswith(": serves")
    assert uid in stage.pod_uids()
    stage.engine(pod).in_flight = 0
    stage.cluster.world.changed()


def test_cordon_marks_the_node(stage: Stage) -> None:
    stage.serve()
    (pod,) = stage.pods()
    node = pod["spec"]["nodeName"]
    done = admin(stage, "drain", f"node/{node}", "--cordon")
    try:
        assert done.returncode == 0, done
        assert stage.api.get(f"/api/v1/nodes/{node}")["spec"]["unschedulable"] is True
    finally:
        stage.api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": None}})
    stage.until("the instance moved", lambda: pod["metadata"]["uid"] not in stage.pod_uids() and stage.is_ready())


def bind(stage: Stage, user: str, *roles: str) -> Path:
    """A user with these shipped ClusterRoles in the stage's namespace; the kubeconfig."""
    shipped = {
        o["metadata"]["name"]: o for o in yaml.safe_load_all(CHART_ROLES.read_text()) if o["kind"] == "ClusterRole"
    }
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    for role in roles:
        own = f"{stage.namespace}-{role}"
        stage.api.create(f"{rbac}/clusterroles", {"metadata": {"name": own}, "rules": shipped[role]["rules"]})
        subject = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}
        reference = {"kind": "ClusterRole", "apiGroup": "rbac.authorization.k8s.io", "name": own}
        body = {"metadata": {"name": own}, "roleRef": reference, "subjects": [subject]}
        stage.api.create(f"{rbac}/namespaces/{stage.namespace}/rolebindings", body)
    return stage.cluster.bed.user_kubeconfig(user)


def test_shipped_roles_are_just_enough(stage: Stage) -> None:
    """sluice-view reads and may not drain; with sluice-drain it may."""
    stage.serve()
    (pod,) = stage.pods()
    stage.engine(pod).in_flight = 1  # so that its drain lasts
    stage.cluster.world.changed()
    name, where = pod["metadata"]["name"], ("-n", stage.namespace)
    viewer = bind(stage, f"viewer-{stage.namespace}", "sluice-view")
    status = sluice(viewer, "status", "s", *where)
    assert (status.returncode, status.stderr) == (0, ""), status
    assert "you lack the right `get pods/proxy`" in status.stdout
    explained = sluice(viewer, "explain", "s", *where)
    assert "may not list events" not in explained.stdout
    assert sluice(viewer, "status", *where).returncode == 0
    refused = sluice(viewer, "drain", name, *where)
    assert refused.returncode == 1
    assert f"you may not patch pods {stage.namespace}/{name}" in refused.stderr
    bind(stage, f"viewer-{stage.namespace}", "sluice-drain")
    stage.until("the role is in force", lambda: sluice(viewer, "drain", name, *where).returncode == 0, 30)
    assert sluice(viewer, "undrain", name, *where).returncode == 0


def test_nobody_known_is_three(stage: Stage, tmp_path: Path) -> None:
    text = stage.cluster.bed.kubeconfig.read_text()
    config = yaml.safe_load(text)
    for user in config["users"]:
        user["user"] = {"token": "nobody"}
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    done = sluice(file, "status")
    assert done.returncode == 3
    assert "log in again" in done.stderr
