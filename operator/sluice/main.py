"""Start and end of the operator process.

Start: probes' server -> Lease -> schema and permission checks -> first LIST of everything -> workers -> kopf.
End on SIGTERM: no new passes, running ones get ten seconds, the Lease is released (the next operator takes over in two
seconds), then the server and kopf stop. Nothing that matters lives in this process: SIGKILL at any line is survivable.
"""

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from kubernetes.aio.config import ConfigException
from prometheus_client import disable_created_metrics

from sluice import __version__, kopfapp
from sluice.api import config as operator_config
from sluice.api import names
from sluice.api.config import OperatorConfig
from sluice.plan.planner import plan
from sluice.plan.status import compute_status
from sluice.runtime import kinds, kube
from sluice.runtime.checks import check
from sluice.runtime.errors import KubeError
from sluice.runtime.events import Recorder
from sluice.runtime.executor import CreationLog, Executor
from sluice.runtime.keys import SigningKeys, keep_fresh, refresh
from sluice.runtime.kinds import Kind
from sluice.runtime.lease import Lease
from sluice.runtime.metrics import Metrics, StateCollector
from sluice.runtime.observer import Agents, Follower
from sluice.runtime.podhttp import PodHttp
from sluice.runtime.queue import Key, Lane, Queue
from sluice.runtime.reconciler import Reconciler
from sluice.runtime.resync import Resync
from sluice.runtime.routers import Routers, Sender, Token
from sluice.runtime.server import Health, Server, watch_lag
from sluice.runtime.store import Store

log = logging.getLogger("sluice")

T = TypeVar("T")

DRAIN_S: Final = 10.0
HARD_EXIT_S: Final = 20.0
CHECK_PERIOD_S: Final = 5.0
MANY: Final = (kinds.NODE, kinds.ACCELERATOR_PROFILE)
"""Kinds whose change concerns many services at once: their keys wait behind those of single ones."""


@dataclass(frozen=True, slots=True)
class Options:
    config: OperatorConfig
    kubeconfig: Path | None
    context: str | None
    host: str
    port: int
    identity: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    try:
        options = parse(arguments)
    except (OSError, ValueError) as error:
        print(f"sluice-operator: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=options.config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client leaves it untyped
    try:
        return asyncio.run(run(options))
    except (ConfigException, OSError) as error:
        print(f"sluice-operator: {error}", file=sys.stderr)
        return 2


def parse(arguments: Sequence[str] | None) -> Options:
    """Raises: OSError or ValueError for a bad configuration file, SystemExit for bad arguments."""
    parser = argparse.ArgumentParser(prog="sluice-operator", description="Operator for InferenceService objects.")
    parser.add_argument("--config", type=Path, help="configuration file (YAML); default: built-in defaults")
    parser.add_argument(
        "--kubeconfig", type=Path, help="kubeconfig; without it the pod's ServiceAccount (never $KUBECONFIG)"
    )
    parser.add_argument("--context", help="context in --kubeconfig; default: its current-context")
    parser.add_argument("--host", default="0.0.0.0", help="address of probes and metrics (default: all)")
    parser.add_argument("--port", type=int, default=names.PORT_OPERATOR, help="port of probes and metrics; 0: any")
    parser.add_argument(
        "--identity",
        default=f"{os.environ.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(4)}",
        help="Lease holder; a process that restarts under the same identity need not wait for its own Lease to expire",
    )
    parser.add_argument("--version", action="version", version=__version__)
    given = parser.parse_args(arguments)
    if given.context and not given.kubeconfig:
        parser.error("--context needs --kubeconfig")
    config = operator_config.load(given.config) if given.config else OperatorConfig()
    return Options(config, given.kubeconfig, given.context, given.host, given.port, given.identity)


async def run(options: Options) -> int:
    """The whole life of the process; 0 after SIGTERM or SIGINT, 1 if kopf ended by itself."""
    stop = asyncio.Event()
    handle_signals(stop)
    metrics, health = Metrics(), Health()
    server = Server(health, metrics)
    port = await server.start(options.host, options.port)
    log.info("sluice-operator %s: probes and metrics on port %d", __version__, port)
    async with (
        kube.connect(options.kubeconfig, options.context, on_request=metrics.requested) as client,
        background(watch_lag(health, metrics)),
    ):
        lease = Lease(
            client, namespace=options.config.lease_namespace, name=names.OPERATOR_LEASE, identity=options.identity
        )
        health.waiting_for = ""  # a standby is ready
        try:
            if not await unless(stop, lease.acquire()):
                return 0
            health.waiting_for = "waiting for the API server"
            metrics.leader.set(1)
            async with background(keep_or_die(lease)):
                try:
                    return await lead(options, client, lease, metrics, health, stop, server)
                finally:
                    await lease.release()
        finally:
            await server.stop()


async def lead(
    options: Options,
    client: kube.Client,
    lease: Lease,
    metrics: Metrics,
    health: Health,
    stop: asyncio.Event,
    server: Server,
) -> int:
    """Work as the leader until `stop`."""
    config = options.config
    watched = await unless(stop, wait_until_allowed(client, config, health))
    if not watched:
        return 0
    parts = Parts(options, client, lease, metrics, watched)
    health.waiting_for = "reading the cluster's state"
    if not await unless(stop, parts.load()):
        return 0
    health.waiting_for = ""
    health.checks.append(parts.resync.problem)
    try:
        return await parts.work(stop, server)
    finally:
        await parts.close()


class Parts:
    """The leader's parts, wired together."""

    def __init__(
        self, options: Options, client: kube.Client, lease: Lease, metrics: Metrics, watched: tuple[Kind, ...]
    ) -> None:
        config = options.config
        self.config = config
        self.client = client
        self.lease = lease
        self.metrics = metrics
        self.watched = watched
        self.store = Store()
        for kind in set(kinds.WATCHED) - set(watched):
            self.store.mark_absent(kind)
        self.queue = Queue()
        self.queue.on_start = metrics.waited
        self.keys = SigningKeys()
        self.http = PodHttp()
        self.agents = Follower(Agents(self.http), self.queue.add, on_poll=lambda ok: metrics.polled("agent", ok))
        routers = Routers(self.http, Token(config.router_token_file))
        self.routers = Follower(routers, self.queue.add, on_poll=lambda ok: metrics.polled("router", ok))
        self.recorder = Recorder(client, reporter=options.identity)
        creations = CreationLog()
        executor = Executor(
            client,
            self.store,
            Sender(routers, self.routers),
            lease,
            creations=creations,
            creation_limit=config.limits.creations_per_service_and_minute,
        )
        self.reconciler = Reconciler(
            store=self.store,
            queue=self.queue,
            executor=executor,
            client=client,
            agents=self.agents,
            routers=self.routers,
            recorder=self.recorder,
            metrics=metrics,
            creations=creations,
            keys=self.keys,
            config=config,
            plan=plan,
            compute_status=compute_status,
        )
        self.resync = Resync(client, self.store, watched, self.enqueue, namespaces=config.namespaces)
        metrics.show(StateCollector(self.queue, self.store, self.recorder, self.resync.ages))

    def enqueue(self, keys: set[Key], lane: Lane) -> None:
        for key in keys:
            self.queue.add(key, lane)

    def on_event(self, kind: Kind, event: str | None, obj: dict[str, Any]) -> None:
        """What kopf tells."""
        self.metrics.watched(kind.name, event)
        self.resync.saw_event(kind, event)
        self.enqueue(self.store.apply(event, obj), Lane.RESYNC if kind in MANY else Lane.EVENT)

    def on_new_keys(self) -> None:
        self.enqueue(set(self.store.services()), Lane.RESYNC)

    async def load(self) -> bool:
        """The start barrier: the whole state, and the signing keys."""
        await self.resync.first()
        try:
            await refresh(self.client, self.keys)
        except KubeError as error:
            log.warning("signing keys for the routers: %s (tried again every 15 s)", error)
        return True

    async def work(self, stop: asyncio.Event, server: Server) -> int:
        """Workers, then kopf, until `stop` or until kopf gives up."""
        workers = [asyncio.create_task(self.reconciler.work()) for _ in range(self.config.workers)]
        self.enqueue(set(self.store.services()), Lane.RESYNC)
        kopf_stop, kopf_ready = asyncio.Event(), asyncio.Event()
        async with (
            background(self.resync.run()),
            background(self.recorder.run()),
            background(keep_fresh(self.client, self.keys, self.on_new_keys)),
        ):
            watching = asyncio.create_task(
                kopfapp.run(
                    self.client,
                    self.watched,
                    self.on_event,
                    namespaces=self.config.namespaces,
                    stop=kopf_stop,
                    ready=kopf_ready,
                )
            )
            stopped = await self._until_stop(stop, kopf_ready, watching)
            await self._drain(workers)
        # Open connections to our server would hold kopf's end up for five seconds.
        await self.close()
        await self.lease.release()
        await server.stop()
        kopf_stop.set()
        await asyncio.gather(watching, return_exceptions=True)
        return 0 if stopped else 1

    async def _until_stop(self, stop: asyncio.Event, ready: asyncio.Event, watching: asyncio.Task[None]) -> bool:
        """False if kopf ended first."""
        stopping = asyncio.create_task(stop.wait())
        readying = asyncio.create_task(ready.wait())
        await asyncio.wait({readying, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
        handle_signals(stop)  # kopf put its own handlers in; its way out takes five seconds
        await asyncio.wait({stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
        readying.cancel()
        stopping.cancel()
        if not stop.is_set():
            error = None if watching.cancelled() else watching.exception()
            log.error("the watches ended: %s", error or "for no stated reason")
        return stop.is_set()

    async def _drain(self, workers: Sequence[asyncio.Task[None]]) -> None:
        asyncio.get_running_loop().call_later(HARD_EXIT_S, os._exit, 1)
        self.queue.close()
        _, late = await asyncio.wait(workers, timeout=DRAIN_S)
        for task in late:
            log.warning("a pass did not end within %.0f s and is stopped", DRAIN_S)
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def close(self) -> None:
        await self.agents.close()
        await self.routers.close()
        await self.http.close()


async def wait_until_allowed(client: kube.Client, config: OperatorConfig, health: Health) -> tuple[Kind, ...]:
    """Check until nothing is missing; what is goes to the log and to /readyz. Returns the kinds to watch."""
    while True:
        try:
            findings = await check(client, config.namespaces)
        except KubeError as error:
            problem = str(error)
        else:
            problem = " | ".join(findings.problems)
            if not problem:
                return findings.watchable
        if problem != health.waiting_for:
            log.error("can't start yet: %s", problem)
            health.waiting_for = problem
        await asyncio.sleep(CHECK_PERIOD_S)


async def keep_or_die(lease: Lease) -> None:
    """Renew the Lease; end the process at once when it is lost, because a drain would be work of two leaders."""
    reason = await lease.keep()
    if not reason:
        return
    log.critical("lost the Lease (%s): exiting", reason)
    logging.shutdown()
    os._exit(1)


def handle_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None (and `work` is cancelled) if `stop` comes first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` beside the block and cancel it at the block's end; its own failure is a bug and goes to the log."""
    task = asyncio.create_task(work)
    task.add_done_callback(_tell_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("a background task died", exc_info=task.exception())
        logging.shutdown()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
