"""`kubectl sluice drain` and `undrain`: ask the operator to drain engine pods, take it back, and follow it.

The request is one annotation on the pod; what follows (replacement first, routers, waiting for requests, deletion) is
the operator's work. Nothing is deleted or evicted here, so Ctrl-C at any moment loses nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sluice.api import names
from sluice.api.conditions import Reason
from sluice.cli.access import Access, MissingError, RefusedError
from sluice.cli.overview import Progress, drain_progress
from sluice.cli.report import InstanceReport, ServiceReport, is_drain_requested, is_engine_pod, report
from sluice.cli.text import duration
from sluice.plan.facts import pod_facts
from sluice.plan.snapshot import PodFacts
from sluice.plan.times import format_moment

Object = dict[str, Any]
Say = Callable[[str], None]

POLL_S: Final = 1.0
REPEAT_S: Final = 15.0
"""A progress line is repeated with its new times at most so often; a change is told at once."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the user named."""

    name: str
    is_node: bool

    @classmethod
    def parse(cls, text: str) -> "Target":
        """`NAME`, `pod/NAME`, `instance/NAME` or `node/NAME`. Raises: ValueError."""
        prefix, slash, name = text.rpartition("/")
        if not name or (slash and prefix not in ("pod", "instance", "node", "pods", "nodes", "po", "no")):
            raise ValueError(f"{text!r} is not NAME, pod/NAME, instance/NAME or node/NAME")
        return cls(name, prefix in ("node", "nodes", "no"))


@dataclass(frozen=True, slots=True)
class Wish:
    """The command line."""

    target: Target
    namespace: str | None
    """As given with -n; None: not given. A node's pods are looked for in all namespaces then."""
    cancel: bool
    cordon: bool
    wait: bool
    timeout_s: float | None
    """Of waiting; None: no limit."""


class Step(StrEnum):
    ASK = "Ask"
    TAKE_BACK = "TakeBack"
    NOTHING = "Nothing"
    """It is already as wished."""
    TOO_LATE = "TooLate"
    """Can't be done any more, or not this way."""


@dataclass(frozen=True, slots=True)
class Decision:
    step: Step
    text: str
    """What to tell once it is done."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Time as a parameter."""

    now: Callable[[], float]
    """Seconds since the epoch."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


def decide(pod: PodFacts, *, is_requested: bool, cancel: bool) -> Decision:
    """What to do with one of our engine pods."""
    why = f" ({pod.drain_reason})" if pod.drain_reason else ""
    if cancel:
        if pod.deletion_at is not None:
            return Decision(Step.TOO_LATE, "is being deleted already: its drain can't be cancelled any more")
        if is_requested:
            return Decision(Step.TAKE_BACK, "drain cancelled: it serves on, or again as soon as the routers list it")
        if pod.drain_reason == Reason.NODE_DRAIN:
            hint = f"its node has to be emptied; unless it goes for good, kubectl uncordon {pod.node} calls that off"
            return Decision(Step.TOO_LATE, f"drains because {hint}")
        if pod.drain_started_at is not None:
            return Decision(Step.TOO_LATE, f"drains for another cause{why}; nobody asked for it, so nothing to cancel")
        return Decision(Step.NOTHING, "no drain was asked for")
    if pod.deletion_at is not None:
        return Decision(Step.NOTHING, "is being deleted already")
    if is_requested:
        return Decision(Step.NOTHING, "drain was asked for already")
    if pod.drain_started_at is not None:
        return Decision(Step.NOTHING, f"drains already{why}")
    return Decision(Step.ASK, "drain asked for")


async def run(wish: Wish, access: Access, say: Say, clock: Clock) -> int:
    """The exit code. Raises: CliError."""
    if wish.target.is_node:
        pods = await _pods_on_node(wish, access, say)
    else:
        pods = [await _one_pod(wish, access)]
    failed, followed = False, []
    for pod in pods:
        decision = decide(pod_facts(pod), is_requested=is_drain_requested(pod), cancel=wish.cancel)
        if decision.step is Step.ASK:
            await access.annotate_pod(pod, names.ANNOTATION_DRAIN_REQUESTED, format_moment(clock.now()))
        elif decision.step is Step.TAKE_BACK:
            await access.annotate_pod(pod, names.ANNOTATION_DRAIN_REQUESTED, None)
        failed |= decision.step is Step.TOO_LATE
        followed += [] if decision.step is Step.TOO_LATE else [pod]
        say(f"{_label(pod)}: {decision.text}")
    if wish.wait and followed:
        done = await Follow(access, clock, say, cancel=wish.cancel).until_done(followed, wish.timeout_s)
        return 0 if done and not failed else 1
    if followed and not wish.cancel:
        say(
            f"Follow it with: kubectl sluice status {_where(followed)}; take it back with: "
            f"kubectl sluice undrain {_target_text(wish)}"
        )
    return 1 if failed else 0


async def _one_pod(wish: Wish, access: Access) -> Object:
    namespace = wish.namespace or access.place.namespace
    pod = await access.pod(namespace, wish.target.name)
    if pod is None:
        raise MissingError(
            f"pod {wish.target.name} not found in namespace {namespace}; "
            "list instances with: kubectl sluice status SERVICE"
        )
    if not is_engine_pod(pod):
        raise RefusedError(
            f"pod {namespace}/{wish.target.name} is no engine pod of an InferenceService; only those are drained here"
        )
    return pod


async def _pods_on_node(wish: Wish, access: Access, say: Say) -> list[Object]:
    """Cordons first, if asked to: otherwise the scheduler may put the replacements on the same node."""
    name = wish.target.name
    node = await access.node(name)
    if node is None:
        raise MissingError(f"node {name} not found; list nodes with: kubectl get nodes")
    is_cordoned = (node.get("spec") or {}).get("unschedulable") is True
    if wish.cordon and not is_cordoned:
        await access.cordon(node)
        say(f"node {name} cordoned; undo with: kubectl uncordon {name}")
    elif not wish.cancel and not is_cordoned:
        say(
            f"node {name} is not cordoned: new pods, also the replacements, may be put on it again. "
            f"Cordon it with --cordon or: kubectl cordon {name}"
        )
    elif wish.cancel and is_cordoned:
        say(f"node {name} stays cordoned, so its instances are moved away all the same, until: kubectl uncordon {name}")
    found = await access.engine_pods(wish.namespace or "", node=name)
    pods = sorted(filter(is_engine_pod, found), key=_label)
    if not pods:
        say(f"no engine pod of an InferenceService runs on node {name}")
    return pods


@dataclass(slots=True)
class Follow:
    """Watches pods until each is gone (or serves again after `cancel`), telling what changes."""

    access: Access
    clock: Clock
    say: Say
    cancel: bool

    async def until_done(self, pods: Sequence[Object], timeout_s: float | None) -> bool:
        """False at the time-out, or when somebody took a request back meanwhile. Raises: CliError."""
        left = {pod["metadata"]["uid"]: pod for pod in pods}
        told: dict[str, tuple[str, float]] = {}
        end = None if timeout_s is None else self.clock.now() + timeout_s
        complete = True
        while True:
            complete &= await self._look(left, told)
            if not left:
                return complete
            if end is not None and self.clock.now() >= end:
                rest = ", ".join(_label(pod) for pod in left.values())
                what = "cancelling" if self.cancel else "the drain"
                self.say(f"not done within {duration(timeout_s)}: {rest}; {what} goes on without this command")
                return False
            await self.clock.sleep(POLL_S)

    async def _look(self, left: dict[str, Object], told: dict[str, tuple[str, float]]) -> bool:
        """One look at all that are left; those that are done leave the map. False: a request was taken back."""
        complete = True
        for namespace, name in sorted({_service_key(pod) for pod in left.values()}):
            picture = await self._picture(namespace, name)
            seen = {i.pod.uid: i for i in picture.instances} if picture else {}
            for uid, pod in list(left.items()):
                if _service_key(pod) != (namespace, name):
                    continue
                news, is_done, is_well = self._judge(seen.get(uid), picture)
                self._tell(_label(pod), news, told)
                complete &= is_well
                if is_done:
                    del left[uid]
        return complete

    async def _picture(self, namespace: str, name: str) -> ServiceReport | None:
        """None: the service itself is gone. Agents are not asked: `status.drains` has the count."""
        try:
            service = await self.access.service(namespace, name)
        except MissingError:
            return None
        pods = await self.access.engine_pods(namespace, service_uid=service["metadata"]["uid"])
        return report(service, pods, {}, self.clock.now())

    def _judge(self, instance: InstanceReport | None, picture: ServiceReport | None) -> tuple[Progress, bool, bool]:
        """(what to tell, whether it is done, False if it came out otherwise than wished)."""
        if instance is None or picture is None:
            return Progress("gone", ""), True, not self.cancel
        if self.cancel:
            if instance.pod.deletion_at is not None:
                return Progress("is being deleted: the cancellation came too late", ""), True, False
            if instance.pod.gate and not instance.is_leaving:
                return Progress("serves", ""), True, True
            return Progress("waits until the routers list it again", ""), False, True
        if not instance.is_leaving:
            return Progress("the request was taken back by somebody else", ""), True, False
        return drain_progress(picture, instance), False, True

    def _tell(self, label: str, news: Progress, told: dict[str, tuple[str, float]]) -> None:
        """Say it when it changes; the same with new times only now and then."""
        before, at = told.get(label, ("", 0.0))
        if news.what != before or self.clock.now() - at >= REPEAT_S:
            self.say(f"{label}: {news.text}")
            told[label] = (news.what, self.clock.now())


def _service_key(pod: Object) -> tuple[str, str]:
    """(namespace, name) of the owning service; the owner reference has the whole name, the label may be cut."""
    meta = pod["metadata"]
    owner = next(o for o in meta["ownerReferences"] if o.get("controller") and o.get("kind") == names.SERVICE_KIND)
    return str(meta["namespace"]), str(owner["name"])


def _label(pod: Object) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _where(pods: Iterable[Object]) -> str:
    """Arguments of `status` that show the pods' services."""
    services = sorted({_service_key(pod) for pod in pods})
    namespace, name = services[0]
    return f"{name} -n {namespace}" if len(services) == 1 else "-A"


def _target_text(wish: Wish) -> str:
    name = f"node/{wish.target.name}" if wish.target.is_node else wish.target.name
    return f"{name} -n {wish.namespace}" if wish.namespace else name
