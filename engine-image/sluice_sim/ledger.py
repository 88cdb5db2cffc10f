"""The ledger: every inference request that reached the engine and how it ended, the engine's side of a zero-loss proof.

Invariants: a record is opened before anything is decided about the request and closed exactly once (the first ending
wins); totals count every record ever closed, also those whose details were dropped to stay within `MAX_RECORDS`.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

MAX_RECORDS: Final = 20_000
"""About 10 MB at 500 bytes each; older records are dropped, counted in `dropped`."""


class Ending(StrEnum):
    COMPLETE = "complete"
    """The whole answer was written to the client."""
    REFUSED = "refused"
    """Turned away before any work: bad request, full queue, draining, a `status` fault."""
    FAILED = "failed"
    """Accepted and answered with an error: the model crashed, an `errorBody` fault."""
    ABORTED = "aborted"
    """Ended by the engine's shutdown with finish_reason `abort`: a client may take it for a whole answer."""
    CUT = "cut"
    """The engine broke the connection."""
    CLIENT_GONE = "client_gone"
    """The client closed the connection first."""


@dataclass(slots=True)
class Record:
    seq: int
    id: str
    """X-Request-Id of the client, or one of our own."""
    path: str
    user_agent: str
    arrived_at: float
    """Wall clock, seconds since the epoch."""
    stream: bool = False
    prompt_tokens: int | None = None
    """Null: the request was refused before it was read."""
    cached_tokens: int = 0
    external_tokens: int = 0
    """Prompt tokens whose KV came from another engine."""
    max_tokens: int | None = None
    tokens_sent: int = 0
    """Tokens written to the client, of a plain answer: all or none."""
    ended: Ending | None = None
    """Null while the request is open."""
    detail: str = ""
    status: int | None = None
    """HTTP status sent; null while none was."""
    ended_at: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "seq": self.seq,
            "id": self.id,
            "path": self.path,
            "userAgent": self.user_agent,
            "arrivedAt": self.arrived_at,
            "stream": self.stream,
            "promptTokens": self.prompt_tokens,
            "cachedTokens": self.cached_tokens,
            "externalTokens": self.external_tokens,
            "maxTokens": self.max_tokens,
            "tokensSent": self.tokens_sent,
            "ended": self.ended,
            "detail": self.detail,
            "status": self.status,
            "endedAt": self.ended_at,
        }


class Ledger:
    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._records: deque[Record] = deque()
        self._max_records = max_records
        self._next_seq = 1
        self._dropped = 0
        self._totals = dict.fromkeys(Ending, 0)
        self._open: dict[int, Record] = {}

    def open(self, *, request_id: str, path: str, user_agent: str, now: float) -> Record:
        """`now`: wall clock."""
        record = Record(self._next_seq, request_id, path, user_agent, now)
        self._next_seq += 1
        self._open[record.seq] = record
        self._records.append(record)
        if len(self._records) > self._max_records:
            self._records.popleft()
            self._dropped += 1
        return record

    def close(self, record: Record, ending: Ending, *, now: float, detail: str = "") -> bool:
        """Book the ending; False, and nothing changes, if the record already has one."""
        if record.ended is not None:
            return False
        record.ended = ending
        record.ended_at = now
        record.detail = detail
        self._totals[ending] += 1
        del self._open[record.seq]
        return True

    @property
    def open_records(self) -> list[Record]:
        return list(self._open.values())

    @property
    def totals(self) -> Mapping[str, int]:
        """Closed records by ending, and `open`."""
        return {**{str(ending): count for ending, count in self._totals.items()}, "open": len(self._open)}

    def to_json(self, after: int = 0, limit: int | None = None) -> dict[str, Any]:
        """Records with `seq` > `after`, oldest first, at most `limit`."""
        records = [record.to_json() for record in self._records if record.seq > after]
        return {
            "totals": self.totals,
            "dropped": self._dropped,
            "lastSeq": self._next_seq - 1,
            "records": records if limit is None else records[:limit],
        }
