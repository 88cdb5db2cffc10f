"""The engine core: carries the scheduler's steps out in real time and tells waiting requests about their tokens.

Invariants: one step at a time; a request aborted (client gone, shutdown) gives its slot and blocks back at once, not at
the end of the step; while paused no step ends, so no token, counter or histogram moves.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from sluice_sim.cli import Config
from sluice_sim.clock import Clock
from sluice_sim.kv import KvCache, chain_digest, model_root
from sluice_sim.metrics import Gauges, Metrics
from sluice_sim.protocol import Inference
from sluice_sim.scheduler import Pace, Scheduler, Sequence, Step
from sluice_sim.text import Answer, Voice, plan_answer, token_id

_MAX_LAG_S: Final = 0.05
"""How much time lost to late wake-ups is made up for by the next steps; more is forgotten."""


class Ticket:
    """One request in the engine, as its HTTP handler sees it."""

    __slots__ = ("_waiter", "_wakes_per_token", "answer", "finish_reason", "last_token_at", "produced", "sequence")

    def __init__(self, sequence: Sequence, answer: Answer, *, wakes_per_token: bool) -> None:
        self.sequence = sequence
        self.answer = answer
        self.produced = 0
        """Tokens ready."""
        self.finish_reason: str | None = None
        """`stop`, `length`, `abort` or `error`; null while more may come."""
        self.last_token_at = sequence.arrived_at
        self._wakes_per_token = wakes_per_token
        self._waiter: asyncio.Future[None] | None = None

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
        self._work = asyncio.Event()
        self._runs = asyncio.Event()
        self._runs.set()

    @property
    def gauges(self) -> Gauges:
        return Gauges(self._scheduler.running, self._scheduler.waiting, self.kv.usage)

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

    def submit(self, request: Inference, pace: Pace, *, arrived_at: float, wakes_per_token: bool) -> Ticket:
        """Queue the request; `arrived_at`: steady clock."""
        voice = Voice(chain_digest(self._root, request.prompt, self.kv.block_size), request.seed)
        answer = plan_answer(voice, request.rules)
        sequence = Sequence(
            prompt=request.prompt,
            target=answer.length,
            next_token=lambda index: token_id(voice.piece(index)),
            arrived_at=arrived_at,
            pace=pace,
        )
        self._scheduler.add(sequence)
        ticket = self._tickets[sequence] = Ticket(sequence, answer, wakes_per_token=wakes_per_token)
        self._work.set()
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """The client is gone: free slot and blocks now. Such a request is in no outcome counter, as in vLLM."""
        if self._tickets.pop(ticket.sequence, None) is not None:
            self._scheduler.abort(ticket.sequence)
            self._work.set()  # what it held may let others go on

    def end_all(self, reason: str) -> None:
        """Every request ends now: `abort` at shutdown, `error` when the model crashed."""
        for ticket in list(self._tickets.values()):
            self.abort(ticket)
            ticket.finish_reason = reason
            self._metrics.finished(reason)
            ticket.notify()

    async def run(self) -> None:
        """Step for ever; cancel to stop."""
        free_at = self._clock.now()
        while True:
            await self._runs.wait()
            now = self._clock.now()
            step = self._scheduler.begin(now)
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

    def _finish(self, step: Step) -> None:
        produced = self._scheduler.end(step, self._clock.now())
        now = self._clock.now()
        metrics = self._metrics
        metrics.iteration_tokens.observe(sum(count for _, count in step.work))
        if step.preemptions:
            metrics.preemptions.inc(step.preemptions)
        self._count_admitted(step.admitted)
        if produced:
            metrics.generation_tokens.inc(len(produced))
        for sequence in produced:
            ticket = self._tickets.get(sequence)
            if ticket is None:
                continue
            self._count_token(ticket, now)
            if sequence.is_done:
                del self._tickets[sequence]
                ticket.finish_reason = ticket.answer.finish_reason
                metrics.finished(ticket.finish_reason)
                metrics.e2e.observe(now - sequence.arrived_at)
            ticket.notify()

    def _count_admitted(self, admitted: Iterable[Sequence]) -> None:
        for sequence in admitted:
            self._metrics.cache_queries.inc(len(sequence.prompt))
            self._metrics.cache_hits.inc(sequence.cached)
            if sequence.admitted_at is not None:
                self._metrics.queue_time.observe(sequence.admitted_at - sequence.arrived_at)

    def _count_token(self, ticket: Ticket, now: float) -> None:
        metrics, sequence = self._metrics, ticket.sequence
        if ticket.produced == 0:
            metrics.ttft.observe(now - sequence.arrived_at)
            metrics.prompt_tokens.inc(len(sequence.prompt))
            metrics.cached_tokens.inc(sequence.cached)
            metrics.hit_here.inc(sequence.cached)
            metrics.computed_here.inc(len(sequence.prompt) - sequence.cached)
        else:
            metrics.token_gap.observe(now - ticket.last_token_at)
        ticket.produced += 1
        ticket.last_token_at = now
