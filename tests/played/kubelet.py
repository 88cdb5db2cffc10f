"""Plays pods on a real API server: what kubelets would report, for all pods of ours on fake nodes.

Scheduler, controllers and garbage collector are real there; only the nodes are not. Runs in its own thread and loop;
the world's attributes may be changed from any thread.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from sluice.kopfapp import new_session
from sluice.runtime import kinds, kube
from sluice.runtime.errors import KubeError, NotFound, Stale
from tests.played import pods
from tests.played.world import World

Object = dict[str, Any]

TICK_S = 0.05
AT_ONCE = 16
START_TIMEOUT_S = 20.0


class PlayedKubelets:
    """`with PlayedKubelets(kubeconfig, world):` plays until the block ends."""

    def __init__(self, kubeconfig: Path, world: World) -> None:
        self.world = world
        self._kubeconfig = kubeconfig
        self._pods: dict[str, Object] = {}
        self._restless: set[str] = set()
        self._busy: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._listed = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="played-kubelets", daemon=True)

    def __enter__(self) -> "PlayedKubelets":
        """Raises: TimeoutError, the pods could not be listed."""
        self._thread.start()
        if not self._listed.wait(START_TIMEOUT_S):
            raise TimeoutError("the played kubelets did not start") from self._error
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._play())
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._loop.close()

    async def _play(self) -> None:
        async with kube.connect(self._kubeconfig) as client:
            tasks = [
                asyncio.create_task(work)
                for work in (self._keep_trying(lambda: self._follow(client)), self._tick(client))
            ]
            stopping = asyncio.create_task(self._stop.wait())
            self.world.on_change.append(self._wake)
            try:
                await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.world.on_change.remove(self._wake)
                for task in [stopping, *tasks]:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._look_at_all)

    def _look_at_all(self) -> None:
        self._restless.update(self._pods)

    async def _keep_trying(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except (KubeError, aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.5)

    async def _follow(self, client: kube.Client) -> None:
        """LIST, then WATCH until the stream ends."""
        found = await client.list(kinds.POD)
        self._pods = {pod["metadata"]["uid"]: pod for pod in found.items}
        self._look_at_all()
        self._listed.set()
        query = {"watch": "true", "labelSelector": kinds.OURS, "resourceVersion": found.resource_version}
        async with (
            new_session(client) as session,
            session.get(f"{client.server}/api/v1/pods", params=query, timeout=_STREAM) as stream,
        ):
            async for line in stream.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                self._take(event["type"], event["object"])

    def _take(self, kind: str, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if kind == "DELETED":
            self._pods.pop(uid, None)
            self.world.stop(uid)
        else:
            self._pods[uid] = pod
            self._restless.add(uid)

    async def _tick(self, client: kube.Client) -> None:
        slots = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            while True:
                for uid in list(self._restless - self._busy):
                    pod = self._pods.get(uid)
                    if pod is None or not pod["spec"].get("nodeName"):
                        self._restless.discard(uid)
                        continue
                    step = pods.next_step(pod, self.world, self.world.clock())
                    if step is not None:
                        self._busy.add(uid)
                        tasks.create_task(self._report(client, pod, step, slots))
                    elif not self._will_change(pod):
                        self._restless.discard(uid)
                await asyncio.sleep(TICK_S)

    def _will_change(self, pod: Object) -> bool:
        """Whether time alone changes what the kubelet reports: loading, or waiting for the end."""
        engine = self.world.engines.get(pod["metadata"]["uid"])
        loading = engine is not None and engine.next_change(self.world.clock()) is not None
        return loading or "deletionTimestamp" in pod["metadata"]

    async def _report(self, client: kube.Client, pod: Object, step: pods.Step, slots: asyncio.Semaphore) -> None:
        meta = pod["metadata"]
        try:
            async with slots:
                if step.remove:
                    await client.delete(kinds.POD, meta["namespace"], meta["name"], uid=meta["uid"], grace_s=0)
                    self.world.stop(meta["uid"])
                else:
                    status = {"status": step.status}
                    live = await client.patch(
                        kinds.POD,
                        meta["namespace"],
                        meta["name"],
                        status,
                        uid=meta["uid"],
                        subresource="status",
                        strategic=True,
                    )
                    self._keep_newer(live)
        except (NotFound, Stale):
            self._pods.pop(meta["uid"], None)
        except KubeError:
            pass  # the API server is away; the pod stays restless and is reported at the next tick
        finally:
            self._busy.discard(meta["uid"])

    def _keep_newer(self, live: Object) -> None:
        """The watch may have told a later version than the answer to our own write."""
        known = self._pods.get(live["metadata"]["uid"])
        if known and int(known["metadata"]["resourceVersion"]) < int(live["metadata"]["resourceVersion"]):
            self._pods[live["metadata"]["uid"]] = live


_STREAM = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
