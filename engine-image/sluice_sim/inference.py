"""One inference request over HTTP, from arrival to its ending in the ledger.

Invariants: every request that arrives is in the ledger with exactly one ending; when the client goes, slot and blocks
are free at once (the server cancels the handler, `finally` aborts the ticket).
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from aiohttp import web

from sluice_sim.config import Flavor
from sluice_sim.effects import Effects
from sluice_sim.engine import Ticket
from sluice_sim.ledger import Ending, Record
from sluice_sim.protocol import ApiError, Inference, Reply, error_body, parse_inference, parse_json
from sluice_sim.scheduler import Pace
from sluice_sim.state import Phase, Sim
from sluice_sim.transfer import Leg, TransferError

REQUEST_ID: Final = web.RequestKey("request_id", str)

_SSE_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_DONE: Final = b"data: [DONE]\n\n"
_CRASHED: Final = "The engine core died; see its log for the cause."
_REFUSED_REASON: Final = "max_num_queued_reqs"

Gate = Callable[[web.Request], web.Response | None]


class InferenceApi:
    def __init__(self, sim: Sim, effects: Effects, gate: Gate) -> None:
        """`gate` answers requests that are turned away whatever they ask (API key, `status` fault)."""
        self._sim = sim
        self._effects = effects
        self._gate = gate

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, is_chat=False)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, is_chat=True)

    async def _serve(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        sim = self._sim
        record = sim.ledger.open(
            request_id=request[REQUEST_ID],
            path=request.path,
            user_agent=request.headers.get("User-Agent", ""),
            now=sim.clock.wall(),
        )
        sim.request_entered()
        try:
            sim.faults.request_arrived(sim.clock.now())
            self._effects.apply()
            return await self._answer(request, record, is_chat=is_chat)
        except TransferError as error:
            body = error_body(500, str(error))
            return await self._send_json(request, record, 500, body, Ending.FAILED, str(error))
        except ApiError as error:
            ending = Ending.FAILED if error.message == _CRASHED else Ending.REFUSED
            return await self._send_json(request, record, error.status, error.body(), ending, error.message)
        except web.HTTPException as error:  # aiohttp's own refusals, such as a body that is too large
            record.status = error.status
            self._close(record, Ending.REFUSED, error.reason)
            raise
        except ConnectionResetError:
            self._lost(record)
            return web.Response()
        except asyncio.CancelledError:
            self._lost(record)
            raise
        finally:
            sim.request_left()

    async def _answer(self, request: web.Request, record: Record, *, is_chat: bool) -> web.StreamResponse:
        sim = self._sim
        arrived_at = sim.clock.now()
        raw = await request.read()
        refusal = self._gate(request)
        if refusal is not None:
            return await self._send(request, record, refusal, Ending.REFUSED, "API key or status fault")
        body = parse_json(raw)
        record.stream = bool(body.get("stream"))
        if sim.phase is Phase.DEAD:
            raise ApiError(500, _CRASHED)
        if sim.phase is Phase.LOADING:
            raise ApiError(503, "The model is not loaded yet.")
        if sim.phase is not Phase.SERVING and sim.config.flavor is Flavor.VLLM:  # SGLang goes on taking requests
            raise ApiError(500, "The engine is shutting down.")
        inference = parse_inference(body, is_chat=is_chat, limits=sim.request_limits)
        record.prompt_tokens = len(inference.prompt)
        record.max_tokens = inference.rules.max_tokens
        crash = sim.faults.take("crashFirst", arrived_at)
        if crash is not None:
            self._effects.crash_model(crash["seconds"], "crashFirst")
            raise ApiError(500, _CRASHED)
        if sim.is_broken:
            self._effects.crash_of_lost_rank()
            raise ApiError(500, _CRASHED)
        broken = sim.faults.take("errorBody", arrived_at)
        if broken is not None:
            return await self._send_error_in_200(request, record, error_body(500, broken["message"]), Ending.FAILED)
        limit = sim.config.max_num_queued_reqs
        if limit is not None and sim.engine.in_flight >= limit:
            sim.metrics.rejected(_REFUSED_REASON)
            message = f"{sim.engine.in_flight} requests are running or waiting; --max-num-queued-reqs is {limit}."
            if not inference.stream:
                raise ApiError(503, message)
            return await self._send_error_in_200(request, record, error_body(503, message), Ending.REFUSED)
        leg = Leg()
        if sim.transfer is not None:
            leg = await sim.transfer.open(body, inference, request[REQUEST_ID])
        try:
            return await self._generate(request, record, inference, arrived_at, leg)
        finally:
            leg.close()

    async def _generate(
        self, request: web.Request, record: Record, inference: Inference, arrived_at: float, leg: Leg
    ) -> web.StreamResponse:
        sim = self._sim
        if leg.max_tokens is not None:
            inference = replace(inference, rules=replace(inference.rules, max_tokens=leg.max_tokens, min_tokens=0))
        half = sim.faults.take("halfStream", arrived_at)
        cut_after = None if half is None else int(half["tokens"])
        ticket = sim.engine.submit(
            inference,
            self._pace(arrived_at),
            leg,
            arrived_at=arrived_at,
            wakes_per_token=inference.stream or cut_after is not None,
        )
        kind = "chatcmpl" if inference.is_chat else "cmpl"
        reply = Reply(inference, f"{kind}-{request[REQUEST_ID]}", int(sim.clock.wall()))
        try:
            if inference.stream:
                return await self._stream(request, record, reply, ticket, cut_after)
            return await self._whole(request, record, reply, ticket, cut_after)
        finally:
            record.cached_tokens = ticket.sequence.cached
            record.external_tokens = ticket.sequence.external
            sim.engine.abort(ticket)

    def _pace(self, now: float) -> Pace:
        first = self._sim.faults.take("slowFirstToken", now)
        tokens = self._sim.faults.take("slowTokens", now)
        stall = self._sim.faults.take("stall", now)
        return Pace(
            first_token_factor=1.0 if first is None else first["factor"],
            token_factor=1.0 if tokens is None else tokens["factor"],
            stall_after=None if stall is None else stall["afterTokens"],
            stall_s=0.0 if stall is None else stall["seconds"],
        )

    async def _whole(
        self, request: web.Request, record: Record, reply: Reply, ticket: Ticket, cut_after: int | None
    ) -> web.StreamResponse:
        while ticket.finish_reason is None and (cut_after is None or ticket.produced < cut_after):
            await ticket.more(ticket.produced)
        reason = ticket.finish_reason
        if reason is None:
            return self._cut(request, record, "halfStream")
        if reason == "error":
            if ticket.error is not None:
                raise TransferError(ticket.error)
            raise ApiError(500, _CRASHED)
        if reason == "abort" and self._breaks_stream():
            return self._cut(request, record, "shutdown")
        more = await ticket.leg.settle() if reason != "abort" else {}
        tokens = ticket.produced
        body = {**reply.whole(ticket.text(0, tokens), tokens, reason), **more}
        ending = Ending.ABORTED if reason == "abort" else Ending.COMPLETE
        response = await self._send_json(request, record, 200, body, ending)
        record.tokens_sent = tokens
        return response

    async def _stream(
        self, request: web.Request, record: Record, reply: Reply, ticket: Ticket, cut_after: int | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_SSE_HEADERS)
        await response.prepare(request)
        record.status = 200
        opening = reply.opening()
        if opening is not None:
            await response.write(_event(opening))
        sent = 0
        while True:
            if cut_after is not None and sent >= cut_after:
                return self._cut(request, record, "halfStream", response)
            await ticket.more(sent)
            reason, ready = ticket.finish_reason, ticket.produced
            if cut_after is not None and ready > cut_after:
                reason, ready = None, cut_after
            if reason == "error":
                message = ticket.error or _CRASHED
                return await self._end_with_error(response, record, error_body(500, message), Ending.FAILED)
            if reason in ("stop", "length"):
                try:
                    await ticket.leg.settle()
                except TransferError as error:
                    return await self._end_with_error(response, record, error_body(500, str(error)), Ending.FAILED)
            if reason == "abort" and self._breaks_stream():
                return self._cut(request, record, "shutdown", response)
            await response.write(_event(reply.piece(ticket.text(sent, ready), ready, reason)))
            record.tokens_sent = sent = ready
            if reason is not None:
                break
        closing = reply.closing(sent)
        await response.write(_DONE if closing is None else _event(closing) + _DONE)
        await response.write_eof()
        self._close(record, Ending.ABORTED if reason == "abort" else Ending.COMPLETE)
        return response

    def _breaks_stream(self) -> bool:
        """How vLLM's shutdown ends a stream varies: a broken stream, or `abort` and `[DONE]`, which looks whole."""
        return self._sim.rng.random() < 0.5

    def _cut(
        self, request: web.Request, record: Record, why: str, response: web.StreamResponse | None = None
    ) -> web.StreamResponse:
        self._close(record, Ending.CUT, why)
        if request.transport is not None:
            request.transport.abort()
        return response or web.Response()

    async def _send_error_in_200(
        self, request: web.Request, record: Record, body: Mapping[str, Any], ending: Ending
    ) -> web.StreamResponse:
        """vLLM's trap: the error is inside an answer with status 200."""
        if not record.stream:
            return await self._send_json(request, record, 200, body, ending, "error in a 200")
        response = web.StreamResponse(headers=_SSE_HEADERS)
        await response.prepare(request)
        record.status = 200
        return await self._end_with_error(response, record, body, ending)

    async def _end_with_error(
        self, response: web.StreamResponse, record: Record, body: Mapping[str, Any], ending: Ending
    ) -> web.StreamResponse:
        await response.write(_event(body) + _DONE)
        await response.write_eof()
        self._close(record, ending, body["error"]["message"])
        return response

    async def _send_json(
        self,
        request: web.Request,
        record: Record,
        status: int,
        body: Mapping[str, Any],
        ending: Ending,
        detail: str = "",
    ) -> web.StreamResponse:
        return await self._send(request, record, web.json_response(body, status=status), ending, detail)

    async def _send(
        self, request: web.Request, record: Record, response: web.Response, ending: Ending, detail: str
    ) -> web.StreamResponse:
        """Write the answer before its ending is booked, so that `complete` means written."""
        await response.prepare(request)
        await response.write_eof()
        record.status = response.status
        self._close(record, ending, detail)
        return response

    def _lost(self, record: Record) -> None:
        """The connection ended under the handler: by us only when the port was closed for good."""
        self._close(record, Ending.CUT if self._sim.phase is Phase.STOPPED else Ending.CLIENT_GONE)

    def _close(self, record: Record, ending: Ending, detail: str = "") -> None:
        self._sim.ledger.close(record, ending, now=self._sim.clock.wall(), detail=detail)


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
