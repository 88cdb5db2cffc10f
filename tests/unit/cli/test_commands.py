"""Whole commands in this process against the fake API server: what is printed, written, and the exit code."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from sluice.api import names
from sluice.cli import drain
from sluice.cli.access import connect, find_place
from sluice.cli.drain import Clock, Decision, Step, Target, Wish, decide
from sluice.cli.main import main
from sluice.plan.facts import pod_facts
from tests.fakeapi import crds
from tests.fakeapi.cluster import FakeCluster
from tests.fakeapi.server import FakeServer
from tests.unit.cli.objects import NOW, a_pod, a_service, condition, moment, owner

Object = dict[str, Any]

ASKED = names.ANNOTATION_DRAIN_REQUESTED
STARTED = names.ANNOTATION_DRAIN_STARTED_AT


@dataclass(eq=False)
class Desk:
    """A fake cluster and a command line that points at it."""

    cluster: FakeCluster
    kubeconfig: Path
    capture: pytest.CaptureFixture[str]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        self.capture.readouterr()
        try:
            code = main([*arguments, "--kubeconfig", str(self.kubeconfig)])
        except SystemExit as end:  # argparse
            code = int(str(end.code))
        said = self.capture.readouterr()
        return code, said.out, said.err

    def add_service(self, body: Object | None = None) -> Object:
        body = body or a_service()
        resource = self.cluster.resource(names.GROUP, names.SERVICE_PLURAL)
        made = self.cluster.create(resource, "chat", {k: v for k, v in body.items() if k != "status"})
        status = {**body["status"], "observedGeneration": made["metadata"]["generation"]}
        name = made["metadata"]["name"]
        return self.cluster.patch(resource, "chat", name, {"status": status}, subresource="status")

    def add_pod(self, service: Object, body: Object) -> Object:
        uid = service["metadata"]["uid"]
        meta = {k: v for k, v in body["metadata"].items() if k != "uid"}
        meta["labels"] = {**meta["labels"], names.LABEL_SERVICE_UID: uid}
        meta["ownerReferences"] = [owner(uid)]
        pods = self.cluster.resource("", "pods")
        self.cluster.create(pods, "chat", {**body, "metadata": meta})
        return self.cluster.patch(pods, "chat", meta["name"], {"status": body["status"]}, subresource="status")

    def add_node(self, name: str = "n1") -> None:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {}}
        self.cluster.create(self.cluster.resource("", "nodes"), "", node)

    def pod(self, name: str = "qwen-default-0-1") -> Object:
        return self.cluster.get(self.cluster.resource("", "pods"), "chat", name)

    def node(self, name: str = "n1") -> Object:
        return self.cluster.get(self.cluster.resource("", "nodes"), "", name)

    def annotate(self, name: str, annotations: dict[str, str | None]) -> None:
        patch = {"metadata": {"annotations": annotations}}
        self.cluster.patch(self.cluster.resource("", "pods"), "chat", name, patch)

    def remove_pod(self, name: str) -> None:
        pod = self.pod(name)
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        self.cluster.delete(self.cluster.resource("", "pods"), "chat", name, body)

    def asked(self, name: str = "qwen-default-0-1") -> bool:
        return ASKED in (self.pod(name)["metadata"].get("annotations") or {})


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Desk]:
    cluster = crds.install(FakeCluster())
    cluster.create(cluster.resource("", "namespaces"), "", {"metadata": {"name": "chat"}})
    with FakeServer(cluster) as server:
        context = {"cluster": "c", "user": "u", "namespace": "chat"}
        config = {
            "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": server.url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": context}],
        }
        file = tmp_path / "kubeconfig"
        file.write_text(yaml.safe_dump(config))
        cluster.audit.clear()
        yield Desk(cluster, file, capsys)


@pytest.fixture
def serving(desk: Desk) -> Desk:
    """One service with two instances on node n1."""
    service = desk.add_service()
    desk.add_node()
    for name in ("qwen-default-0-1", "qwen-default-1-1"):
        desk.add_pod(service, a_pod(name))
    desk.cluster.audit.clear()
    return desk


def test_status_of_a_ready_service_is_zero_and_writes_nothing(serving: Desk) -> None:
    code, out, err = serving.run("status", "qwen")
    assert (code, err) == (0, "")
    assert "chat/qwen" in out
    assert out.count("Serving") >= 2
    assert not serving.cluster.writes()


def test_status_of_a_service_that_is_not_ready_is_one(desk: Desk) -> None:
    desk.add_service(a_service(condition("Ready", "False", "ImagePull", "no instance serves")))
    code, out, _ = desk.run("status", "infsvc/qwen")
    assert code == 1
    assert "no instance serves" in out


def test_status_documents_are_parsable(serving: Desk) -> None:
    code, out, _ = serving.run("status", "qwen", "-o", "json", "--no-live")
    found = json.loads(out)
    assert (code, found["ready"], len(found["instances"])) == (0, "True", 2)
    _, out, _ = serving.run("status", "-A", "-o", "yaml")
    assert [entry["name"] for entry in yaml.safe_load(out)["services"]] == ["qwen"]


def test_empty_namespace_says_so(desk: Desk) -> None:
    assert desk.run("status", "-n", "void") == (0, "No InferenceService in namespace void.\n", "")


def test_absent_service_is_named(desk: Desk) -> None:
    code, out, err = desk.run("status", "nope")
    assert (code, out) == (1, "")
    assert err.startswith("error: InferenceService nope not found in namespace chat")


def test_cluster_without_sluice_says_so(desk: Desk) -> None:
    desk.cluster.registry.remove(names.GROUP, names.SERVICE_PLURAL)
    for command in (["status"], ["status", "qwen"], ["explain", "qwen"]):
        code, _, err = desk.run(*command)
        assert code == 1
        assert "install Sluice" in err


def test_explain_tells_events_of_the_service(serving: Desk) -> None:
    service = serving.cluster.objects(names.SERVICE_PLURAL, names.GROUP)[0]
    event = {
        "metadata": {"name": "e", "namespace": "chat"},
        "involvedObject": {"uid": service["metadata"]["uid"]},
        "reason": "Created",
        "message": "Created instance x",
        "lastTimestamp": moment(5),
    }
    serving.cluster.create(serving.cluster.resource("", "events"), "chat", event)
    code, out, _ = serving.run("explain", "qwen")
    assert code == 0
    assert "Created: Created instance x." in out
    serving.cluster.forbidden.add(("list", "events"))
    assert "you may not list events" in serving.run("explain", "qwen")[1]


def test_unreachable_cluster_is_three_without_a_stack_trace(desk: Desk) -> None:
    config = yaml.safe_load(desk.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    desk.kubeconfig.write_text(yaml.safe_dump(config))
    code, out, err = desk.run("status")
    assert (code, out) == (3, "")
    assert err.startswith("error: can't reach http://127.0.0.1:9")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("frobnicate",),
        ("status", "a", "b"),
        ("status", "qwen", "-A"),
        ("status", "pod/qwen"),
        ("explain",),
        ("drain",),
        ("drain", "deployment/x"),
        ("drain", "x", "--cordon"),
        ("drain", "node/x", "--cordon", "--cancel"),
        ("drain", "x", "--timeout", "5m"),
        ("drain", "x", "--wait", "--timeout", "soon"),
        ("undrain", "node/x", "--cordon"),
    ],
)
def test_wrong_usage_is_two(desk: Desk, arguments: tuple[str, ...]) -> None:
    code, _, err = desk.run(*arguments)
    assert code == 2
    assert "usage: kubectl sluice" in err


def test_drain_asks_by_annotation_and_nothing_else(serving: Desk) -> None:
    before = serving.pod()
    code, out, _ = serving.run("drain", "pod/qwen-default-0-1")
    assert code == 0
    assert "chat/qwen-default-0-1: drain asked for" in out
    after = serving.pod()
    assert list(after["metadata"]["annotations"]) == [ASKED]
    assert (after["spec"], after["status"]) == (before["spec"], before["status"])
    assert [(w.verb, w.plural, w.manager) for w in serving.cluster.writes()] == [("patch", "pods", "kubectl-sluice")]
    assert not serving.asked("qwen-default-1-1")


def test_drain_that_is_asked_for_twice_writes_once(serving: Desk) -> None:
    serving.run("drain", "qwen-default-0-1")
    code, out, _ = serving.run("drain", "qwen-default-0-1")
    assert code == 0
    assert "was asked for already" in out
    assert len(serving.cluster.writes()) == 1


@pytest.mark.parametrize("command", [("undrain",), ("drain", "--cancel")])
def test_drain_is_taken_back(serving: Desk, command: tuple[str, ...]) -> None:
    serving.run("drain", "qwen-default-0-1")
    code, out, _ = serving.run(*command, "qwen-default-0-1")
    assert code == 0
    assert "drain cancelled" in out
    assert not serving.asked()


def test_pod_of_others_is_refused_and_untouched(serving: Desk) -> None:
    foreign = {"metadata": {"name": "db", "namespace": "chat"}, "spec": {"nodeName": "n1", "containers": []}}
    serving.cluster.create(serving.cluster.resource("", "pods"), "chat", foreign)
    serving.cluster.audit.clear()
    code, _, err = serving.run("drain", "db")
    assert code == 1
    assert "chat/db is no engine pod" in err
    assert not serving.cluster.writes()
    assert "not found in namespace chat" in serving.run("drain", "nope")[2]


def test_node_means_all_its_engine_pods_and_the_cordon_is_pointed_out(serving: Desk) -> None:
    foreign = {"metadata": {"name": "db", "namespace": "chat"}, "spec": {"nodeName": "n1", "containers": []}}
    serving.cluster.create(serving.cluster.resource("", "pods"), "chat", foreign)
    code, out, _ = serving.run("drain", "node/n1")
    assert code == 0
    assert "node n1 is not cordoned" in out
    assert "kubectl cordon n1" in out
    assert serving.asked("qwen-default-0-1")
    assert serving.asked("qwen-default-1-1")
    assert not serving.asked("db")
    assert "unschedulable" not in serving.node()["spec"]


def test_cordon_comes_before_the_requests(serving: Desk) -> None:
    code, out, _ = serving.run("drain", "node/n1", "--cordon")
    assert code == 0
    assert "node n1 cordoned" in out
    assert serving.node()["spec"]["unschedulable"] is True
    assert [w.plural for w in serving.cluster.writes()] == ["nodes", "pods", "pods"]
    _, out, _ = serving.run("undrain", "node/n1")
    assert "stays cordoned" in out
    assert not serving.asked()


def test_absent_and_empty_nodes_are_told_apart(serving: Desk) -> None:
    serving.add_node("n2")
    assert serving.run("drain", "node/n2")[:2] == (
        0,
        "node n2 is not cordoned: new pods, also the replacements, may be put on it again. Cordon it with --cordon or: "
        "kubectl cordon n2\nno engine pod of an InferenceService runs on node n2\n",
    )
    code, _, err = serving.run("drain", "node/n3")
    assert code == 1
    assert "node n3 not found" in err


def test_missing_right_is_named(serving: Desk) -> None:
    serving.cluster.forbidden.add(("patch", "pods"))
    code, _, err = serving.run("drain", "qwen-default-0-1")
    assert code == 1
    assert "you may not patch pods chat/qwen-default-0-1" in err


@dataclass(eq=False)
class Played:
    """Time that passes only while the command waits; with each wait the operator (and others) do their next step."""

    steps: list[Callable[[], None]]
    now: float = NOW

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.steps:
            self.steps.pop(0)()


def follow(
    desk: Desk, *steps: Callable[[], None], cancel: bool = False, timeout_s: float = 30
) -> tuple[int, list[str]]:
    """`drain --wait` of the first instance; (exit code, lines without the pod's name)."""
    target = Target("qwen-default-0-1", is_node=False)
    wish = Wish(target, None, cancel=cancel, cordon=False, wait=True, timeout_s=timeout_s)
    lines: list[str] = []
    time = Played(list(steps))

    async def run() -> int:
        async with connect(find_place(str(desk.kubeconfig), None, None, {})) as access:
            return await drain.run(wish, access, lines.append, Clock(lambda: time.now, time.sleep))

    code = asyncio.run(run())
    return code, [line.removeprefix("chat/qwen-default-0-1: ") for line in lines]


def test_wait_shows_progress_until_the_pod_is_gone(serving: Desk) -> None:
    marks: dict[str, str | None] = {STARTED: moment(0), names.ANNOTATION_DRAIN_REASON: "DrainRequested"}
    code, told = follow(
        serving,
        lambda: serving.annotate("qwen-default-0-1", marks),
        lambda: serving.remove_pod("qwen-default-0-1"),
    )
    assert code == 0
    assert told == [
        "drain asked for",
        "asked for; it serves on until its replacement serves, where one is needed",
        "draining (DrainRequested), requests in flight unknown, for 1s",
        "gone",
    ]


def test_wait_repeats_itself_only_now_and_then(serving: Desk) -> None:
    _, told = follow(serving, timeout_s=40)
    assert len([line for line in told if "serves on" in line]) == 3


def test_wait_gives_up_at_its_time_out_and_leaves_the_request(serving: Desk) -> None:
    code, told = follow(serving, timeout_s=3)
    assert code == 1
    assert told[-1].startswith("not done within 3s: chat/qwen-default-0-1; the drain goes on")
    assert serving.asked()


def test_wait_ends_when_somebody_else_takes_the_request_back(serving: Desk) -> None:
    code, told = follow(serving, lambda: serving.annotate("qwen-default-0-1", {ASKED: None}))
    assert code == 1
    assert told[-1] == "the request was taken back by somebody else"


def test_undrain_waits_until_it_serves_again(serving: Desk) -> None:
    serving.annotate("qwen-default-0-1", {ASKED: "x", STARTED: moment(5)})
    code, told = follow(serving, lambda: serving.annotate("qwen-default-0-1", {STARTED: None}), cancel=True)
    assert code == 0
    assert told[1:] == ["waits until the routers list it again", "serves"]


def test_undrain_that_comes_too_late_is_a_failure(serving: Desk) -> None:
    serving.annotate("qwen-default-0-1", {ASKED: "x", STARTED: moment(5)})
    code, told = follow(serving, lambda: serving.remove_pod("qwen-default-0-1"), cancel=True)
    assert (code, told[-1]) == (1, "gone")


@pytest.mark.parametrize(
    ("pod", "cancel", "step"),
    [
        (a_pod(), False, Step.ASK),
        (a_pod(annotations={ASKED: "x"}), False, Step.NOTHING),
        (a_pod(annotations={STARTED: moment(1)}), False, Step.NOTHING),
        (a_pod(deletionTimestamp=moment(-9)), False, Step.NOTHING),
        (a_pod(), True, Step.NOTHING),
        (a_pod(annotations={ASKED: "x", STARTED: moment(1)}), True, Step.TAKE_BACK),
        (a_pod(annotations={STARTED: moment(1), names.ANNOTATION_DRAIN_REASON: "ScaleIn"}), True, Step.TOO_LATE),
        (a_pod(annotations={ASKED: "x"}, deletionTimestamp=moment(-9)), True, Step.TOO_LATE),
    ],
)
def test_decision_on_one_pod(pod: Object, cancel: bool, step: Step) -> None:
    asked = ASKED in pod["metadata"]["annotations"]
    decision = decide(pod_facts(pod), is_requested=asked, cancel=cancel)
    assert decision.step is step
    assert decision.text


def test_instance_that_leaves_a_cordoned_node_is_told_to_uncordon_it() -> None:
    pod = a_pod(annotations={STARTED: moment(1), names.ANNOTATION_DRAIN_REASON: "NodeDrain"})
    decision = decide(pod_facts(pod), is_requested=False, cancel=True)
    assert decision == Decision(Step.TOO_LATE, decision.text)
    assert "kubectl uncordon n1" in decision.text
