"""The engine core: carries the scheduler's steps out in real time and tells waiting requests about their tokens.

Invariants: one step at a time; a request aborted (client gone, shutdown) gives its slot and blocks back at once, not at
the end of the step; while paused no step ends and no transfer is booked, so no token, counter or histogram moves;
what a request says is planned when all of its prompt has KV, from that KV alone.
"""

import asyncio
from contextlib import suppress
from typing import Final

from sluice_sim.clock import Clock
from sluice_sim.config import Config
from sluice_sim.kv import KvCache, model_root
from sluice_sim.metrics import Gauges, Metrics
from sluice_sim.protocol import Inference
from sluice_sim.scheduler import Pace, Scheduler, Sequence, Step
from sluice_sim.text import Answer, Voice, plan_answer, token_id
from sluice_sim.transfer import Leg, TransferError

_MAX_LAG_S: Final = 0.05
"""How much time lost to late wake-ups is made up for by the next steps; more is forgotten."""


class Ticket:
    """One request in the engine, as its HTTP handler sees it."""

    __slots__ = (
        *("_answer", "_loading", "_waiter", "_wakes_per_token", "error", "finish_reason", "last_token_at", "leg"),
        *("produced", "sequence"),
    )

    def __init__(self, sequence: Sequence, leg: Leg, *, wakes_per_token: bool) -> None:
        self.sequence = sequence
        self.leg = leg
        self.produced = 0
        """Tokens ready."""
        self.finish_reason: str | None = None
        """`stop`, `length`, `abort` or `error`; null while more may come."""
        self.error: str | None = None
        """Why it ended with `error`, unless the whole engine died."""
        self.last_token_at = sequence.arrived_at
        self._answer: Answer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._wakes_per_token = wakes_per_token
        self._waiter: asyncio.Future[None] | None = None

    def text(self, start: int, end: int) -> str:
        """Visible text of tokens `start` .. `end` - 1, all of them produced."""
        return "" if self._answer is None else self._answer.text(start, end)

    def plan(self, answer: Answer) -> None:
        """The prompt has KV: this is what the model says."""
        self._answer = answer
        self.sequence.target = answer.length
        self.sequence.next_token = lambda index: token_id(answer.voice.piece(index))

    @property
    def planned_reason(self) -> str:
        """Why the answer ends where it does."""
        assert self._answer is not None, "a token was produced before the answer was planned"
        return self._answer.finish_reason

    async def more(self, seen: int) -> None:
        """Return when more than `seen` tokens are ready, or when it is finished; plain answers: only when finished."""
        while self.finish_reason is None and not (self._wakes_per_token and self.produced > seen):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def notify(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self._wakes_per_token or self.finish_reason is not None):
            waiter.set_result(None)


class Engine:
    def __init__(self, config: Config, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._root = model_root(config.model)
        self.kv = KvCache(config.num_blocks, config.block_size)
        self._scheduler = Scheduler(config.limits, self.kv, config.time_model, self._root)
        self._tickets: dict[Sequence, Ticket] = {}
        self.outputs = 0
        """Tokens produced since the start."""
        self._work = asyncio.Event()
        self._runs = asyncio.Event()
        self._runs.set()

    @property
    def gauges(self) -> Gauges:
        scheduler = self._scheduler
        return Gauges(scheduler.running, scheduler.waiting, scheduler.loading, self.kv.usage)

    @property
    def in_flight(self) -> int:
        """Running and waiting."""
        return len(self._tickets)

    @property
    def is_paused(self) -> bool:
        return not self._runs.is_set()

    def pause(self) -> None:
        self._runs.clear()

    def resume(self) -> None:
        self._runs.set()

    async def runs(self) -> None:
        """Return when the engine is not paused."""
        await self._runs.wait()

    def submit(self, request: Inference, pace: Pace, leg: Leg, *, arrived_at: float, wakes_per_token: bool) -> Ticket:
        """Queue the request; `arrived_at`: steady clock."""
        sequence = Sequence(
            prompt=request.prompt,
            target=request.rules.max_tokens,
            next_token=lambda _: 0,
            arrived_at=arrived_at,
            pace=pace,
            is_remote=leg.pulls,
            keeps_blocks=leg.keeps,
        )
        ticket = Ticket(sequence, leg, wakes_per_token=wakes_per_token)
        sequence.on_prompt = lambda digest: ticket.plan(plan_answer(Voice(digest, request.seed), request.rules))
        self._scheduler.add(sequence)
        self._tickets[sequence] = ticket
        self._metrics.arrived()
        self._work.set()
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """The client is gone: free slot and blocks now. Such a request is in no outcome counter, as in vLLM."""
        if self._tickets.pop(ticket.sequence, None) is not None:
            if ticket._loading is not None:
                ticket._loading.cancel()
            self._scheduler.abort(ticket.sequence)
            self._work.set()  # what it held may let others go on

    def release(self, blocks: list[int]) -> None:
        """Give back blocks that were kept for another engine."""
        self.kv.release(blocks)
        self._work.set()

    def end_all(self, reason: str) -> None:
        """Every request ends now: `abort` at shutdown, `error` when the model crashed."""
        for ticket in list(self._tickets.values()):
            self.abort(ticket)
            self._end(ticket, reason)

    def _end(self, ticket: Ticket, reason: str) -> None:
        ticket.finish_reason = reason
        self._metrics.finished(reason, ticket.produced, None)
        ticket.notify()

    async def run(self) -> None:
        """Step for ever; cancel to stop."""
        free_at = self._clock.now()
        while True:
            await self._runs.wait()
            now = self._clock.now()
            step = self._scheduler.begin(now)
            for sequence, first in self._scheduler.take_loads():
                ticket = self._tickets[sequence]
                ticket._loading = asyncio.create_task(self._load(ticket, first))
            if step is None:
                await self._idle(now)
                free_at = self._clock.now()
                continue
            free_at = max(free_at, now - _MAX_LAG_S) + step.duration_s
            await self._clock.sleep_until(free_at)
            await self._runs.wait()
            self._finish(step)

    async def _idle(self, now: float) -> None:
        held_until = self._scheduler.held_until()
        self._work.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._work.wait(), None if held_until is None else max(0.0, held_until - now))

    async def _load(self, ticket: Ticket, first: int) -> None:
        """Fetch the prompt's KV from block `first` on, beside the steps."""
        try:
            contents = await ticket.leg.pull(first)
        except TransferError as error:
            await self._runs.wait()
            ticket._loading = None
            ticket.error = str(error)
            self.abort(ticket)
            self._end(ticket, "error")
            return
        await self._runs.wait()
        if contents is None:
            self._scheduler.not_loaded(ticket.sequence)
        else:
            self._scheduler.loaded(ticket.sequence, contents)
        self._work.set()

    def _finish(self, step: Step) -> None:
        produced = self._scheduler.end(step, self._clock.now())
        now = self._clock.now()
        metrics = self._metrics
        metrics.stepped(sum(count for _, count in step.work), len(produced), step.preemptions)
        self.outputs += len(produced)
        for sequence in step.admitted:
            if sequence.admitted_at is not None:
                metrics.admitted(len(sequence.prompt), sequence.cached, sequence.admitted_at - sequence.arrived_at)
        for sequence in produced:
            ticket = self._tickets.get(sequence)
            if ticket is None:
                continue
            self._count_token(ticket, now)
            if sequence.is_done:
                del self._tickets[sequence]
                if sequence.keeps_blocks:
                    ticket.leg.keep(self._scheduler.take_blocks(sequence))
                ticket.finish_reason = ticket.planned_reason
                metrics.finished(ticket.finish_reason, ticket.produced, now - sequence.arrived_at)
            ticket.notify()

    def _count_token(self, ticket: Ticket, now: float) -> None:
        metrics, sequence = self._metrics, ticket.sequence
        if ticket.produced == 0:
            metrics.first_token(len(sequence.prompt), sequence.cached, sequence.external, now - sequence.arrived_at)
        else:
            metrics.next_token(now - ticket.last_token_at)
        ticket.produced += 1
        ticket.last_token_at = now
