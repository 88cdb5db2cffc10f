"""Holds the wanted list and keeps smg's manifest in step with it, with the agents and with smg itself.

Invariants: the list is on disk before a PUT is answered; the manifest is written only when it changes; without a list
nothing is written (an empty manifest would take all workers from smg: only an explicit zero, or agents that speak
against all workers, may do that).
"""

import asyncio
import contextlib
import logging
import time

from sluice.api.router import RouterState, SidecarConfig, Worker, WorkerList
from sluice.router.agents import AgentWatch
from sluice.router.files import HeldList, RunDir
from sluice.router.siblings import fetch_newest
from sluice.router.smg import UNKNOWN_VIEW, Smg
from sluice.router.worklist import Manifest, Reach, SmgView, plan_manifest, refuse_list, report_workers

log = logging.getLogger(__name__)

ROUND_S = 1.0
SIBLING_PAUSE_S = 2.0
KEPT_S = 60.0
"""Seconds for which the last ready worker is kept after the operator gave it up. A router on which the others don't get
ready by then is cut off from them: without a worker it leaves the Service, and its siblings take the requests."""
NO_MANIFEST = Manifest(entries=(), left_out={}, withheld=frozenset())


class Sidecar:
    """The list of one router pod."""

    def __init__(self, config: SidecarConfig, run_dir: RunDir, smg: Smg, *, own_ip: str | None) -> None:
        self.config = config
        self._run_dir = run_dir
        self._smg = smg
        self._own_ip = own_ip
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()
        self._agents = AgentWatch(self._news.set)
        self._manifest = NO_MANIFEST
        self._listed = run_dir.load_manifest()
        self._leaving: dict[str, tuple[Worker, float]] = {}
        """Of earlier lists, by instance, while they stand in the manifest; with when they were given up (monotonic)."""
        self.view: SmgView = UNKNOWN_VIEW
        self.held: HeldList | None = run_dir.load_wanted()
        if self.held is not None:
            log.info("resumed with list %s of %d workers", self.held.wanted.generation, len(self.held.wanted.workers))
            self._follow()

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    async def close(self) -> None:
        await self._agents.close()

    async def run(self) -> None:
        """Keep smg's manifest right: each second, and at once when an agent has news. Ends only by cancellation."""
        sibling = asyncio.create_task(self._ask_siblings())
        try:
            while True:
                async with self._lock:
                    try:
                        await self._reconcile()
                    except OSError as error:  # a full disk: smg serves on with what it has; ending would stop that too
                        log.error("the shared volume can't be written, smg's list stays as it is: %s", error)
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ROUND_S):
                        await self._news.wait()
        finally:
            sibling.cancel()

    async def put(self, wanted: WorkerList) -> None:
        """Take over a list from the operator; smg's manifest is right when this returns.

        Raises:
            ValueError: the list contradicts itself; the old one stays.
            OSError: the shared volume can't be written; the old list stays.
        """
        if (wrong := refuse_list(wanted)) is not None:
            raise ValueError(wrong)
        async with self._lock:
            self._hold(HeldList(wanted=wanted, received_at=round(time.time(), 3)))
            await self._reconcile()

    async def state(self) -> RouterState:
        """What is wanted and what smg has, read from smg now."""
        view = await self._smg.view()
        held = self.held
        return RouterState(
            generation=held.wanted.generation if held else None,
            open=held.wanted.open if held else True,
            smg_reachable=view.reach is Reach.ANSWERED,
            workers=report_workers(held.wanted if held else None, self._manifest, view),
            wanted=held.wanted if held else None,
            wanted_at=held.received_at if held else None,
        )

    async def why_not_ready(self) -> str | None:
        """Why the pod must not get requests, or None if it may.

        Without a listed worker smg answers 404 `model_not_found`, which clients take as final. Not ready, the pod
        leaves the Service and a connection is refused, which clients retry. So an explicit zero is not ready either.
        """
        if self.held is None:
            return "no worker list yet, neither from the operator nor from a sibling"
        if not self.held.wanted.open:
            return "closed by the operator"
        if not self._manifest.entries:
            return f"no worker to route to: {len(self.held.wanted.workers)} wanted, all left out"
        if not await self._smg.is_ready():
            return "smg has no healthy worker, is starting or is stopping"
        return None

    def _hold(self, held: HeldList) -> None:
        self._run_dir.save_wanted(held)
        ids = {worker.id for worker in held.wanted.workers}
        now = time.monotonic()
        before = {worker.id: (worker, now) for worker in self.held.wanted.workers} if self.held else {}
        self._leaving = {name: w for name, w in (before | self._leaving).items() if name not in ids}
        if self.held is None or self.held.wanted.generation != held.wanted.generation:
            log.info("list %s: %d workers, open=%s", held.wanted.generation, len(held.wanted.workers), held.wanted.open)
        self.held = held
        self._follow()

    def _follow(self) -> None:
        if self.held is not None:
            followed = (*(worker for worker, _ in self._leaving.values()), *self.held.wanted.workers)
            self._agents.follow({worker.agent_url: worker.url for worker in followed})

    async def _reconcile(self) -> None:
        self.view = await self._smg.view()
        if self.held is None:
            return
        manifest = plan_manifest(
            self.held.wanted,
            self._agents.heard,
            self.view,
            self._listed or (),
            self._agents.paths,
            [worker for worker, since in self._leaving.values() if time.monotonic() - since < KEPT_S],
        )
        if manifest.entries != self._listed:
            self._run_dir.save_manifest(manifest.entries)
            self._listed = manifest.entries
            log.info("manifest: %s", [entry.id for entry in manifest.entries])
        if manifest.left_out != self._manifest.left_out:
            log.info("left out: %s", dict(manifest.left_out))
        self._manifest = manifest
        if self._leaving.keys() - manifest.kept:
            self._leaving = {name: entry for name, entry in self._leaving.items() if name in manifest.kept}
            self._follow()

    async def _ask_siblings(self) -> None:
        """Until there is a list: a new pod must serve also while the operator is away."""
        while self.config.sibling_host is not None and self.held is None:
            found = await fetch_newest(self.config.sibling_host, self.config.port, self._own_ip)
            async with self._lock:
                if found is not None and self.held is None:
                    log.info("taking over a sibling's list %s", found.wanted.generation)
                    try:
                        self._hold(found)
                    except OSError as error:
                        log.error("the shared volume can't be written, a sibling's list is not taken over: %s", error)
                    self._news.set()
            await asyncio.sleep(SIBLING_PAUSE_S)
