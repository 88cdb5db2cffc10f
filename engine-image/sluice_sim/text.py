"""Tokens and answers: what the simulated model reads and says.

One token is four characters. What the model says is a pure function of the KV of the prompt (`kv.chain_digest`),
so every replica gives the same answer to the same prompt, and an answer from other KV shows as different text.
Generated pieces are exactly one token long, so that an answer sent back in the next turn of a chat has the same
tokens and hits the prefix cache.
"""

import hashlib
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CHARS_PER_TOKEN: Final = 4

_PROSE: Final = (
    "the sea ran out and its old fog hid all our dry oak but one red fox saw how far any owl can fly ere "
    "sky had lit two big elm ash fir bay ice dew sun air day eve low tin cup pen ink map key jar lid cut "
    "dig sow tie mix add try ask say hum row sit nap run hop bow aim act use own pay win law art war"
)
WORDS: Final = tuple(f"{word} " for word in re.findall("[a-z]{3}", _PROSE))
"""Vocabulary of the answers: three letters and a space make one token."""

_PIECES_PER_DIGEST: Final = 32
_SHORTEST_ANSWER: Final = 16
_ANSWER_SPREAD: Final = 240


def token_id(piece: str) -> int:
    """Id of one token (0 .. 2**32-1); equal pieces have equal ids in every process."""
    return zlib.crc32(piece.encode("utf-8", "surrogatepass"))


def tokenize(text: str) -> list[int]:
    """Token ids of a text, `ceil(len / 4)` of them; none for the empty text."""
    return [token_id(text[i : i + CHARS_PER_TOKEN]) for i in range(0, len(text), CHARS_PER_TOKEN)]


def tokenize_chat(messages: Sequence[tuple[str, str]]) -> list[int]:
    """Token ids of (role, content) pairs and the opening of the answer.

    Each message is framed by two special tokens, as in real chat templates; so its content is cut into tokens from
    its own start and a longer conversation begins with exactly the tokens of the shorter one.
    """
    ids: list[int] = []
    for role, content in messages:
        ids.append(token_id(f"<|{role}|>"))
        ids.extend(tokenize(content))
        ids.append(token_id("<|end|>"))
    ids.append(token_id("<|assistant|>"))
    return ids


class Voice:
    """The endless text that follows one prompt; `piece(i)` is its i-th token."""

    __slots__ = ("_digest", "_digest_at", "_key")

    def __init__(self, prompt_digest: bytes, seed: int | None = None) -> None:
        """`seed` is the request's sampling seed; None (greedy) and every seed give different texts."""
        salt = b"" if seed is None else str(seed).encode()
        self._key = hashlib.blake2b(prompt_digest + salt, digest_size=16).digest()
        self._digest = b""
        self._digest_at = -1

    def piece(self, index: int) -> str:
        page, offset = divmod(index, _PIECES_PER_DIGEST)
        if page != self._digest_at:
            self._digest = hashlib.blake2b(self._key + page.to_bytes(8, "big"), digest_size=64).digest()
            self._digest_at = page
        return WORDS[int.from_bytes(self._digest[2 * offset : 2 * offset + 2], "big") % len(WORDS)]

    def natural_length(self) -> int:
        """Tokens after which the model would end by itself: 16 .. 255."""
        return _SHORTEST_ANSWER + int.from_bytes(self._key[:4], "big") % _ANSWER_SPREAD


@dataclass(frozen=True, slots=True)
class StopRules:
    """When an answer ends: `max_tokens` >= 1; a stop string counts only after `min_tokens` tokens and is not shown."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, known before its first token is due: `length` tokens, at most `shown_chars` characters."""

    voice: Voice
    length: int
    finish_reason: str
    """`stop` (the model's end or a stop string) or `length`."""
    shown_chars: int

    def text(self, start: int, end: int) -> str:
        """Visible text of tokens `start` .. `end` - 1; a stop string and what follows it are cut off."""
        whole = "".join(self.voice.piece(i) for i in range(start, end))
        return whole[: max(0, self.shown_chars - start * CHARS_PER_TOKEN)]


def plan_answer(voice: Voice, rules: StopRules) -> Answer:
    """Decide where the answer ends; possible up front because the text follows from the prompt alone."""
    natural = max(voice.natural_length(), rules.min_tokens)
    ends_by_itself = not rules.ignore_eos and natural <= rules.max_tokens
    length = natural if ends_by_itself else rules.max_tokens
    reason = "stop" if ends_by_itself else "length"
    hit = _first_stop(voice, length, rules)
    if hit is None:
        return Answer(voice, length, reason, length * CHARS_PER_TOKEN)
    start, end = hit
    return Answer(voice, -(-end // CHARS_PER_TOKEN), "stop", start)


def _first_stop(voice: Voice, length: int, rules: StopRules) -> tuple[int, int] | None:
    """Start and end (characters) of the stop string that is complete first, or None."""
    if not rules.stop:
        return None
    whole = "".join(voice.piece(i) for i in range(length))
    hits = []
    for word in rules.stop:
        start = whole.find(word, max(0, rules.min_tokens * CHARS_PER_TOKEN - len(word) + 1))
        if start >= 0:
            hits.append((start + len(word), start))
    if not hits:
        return None
    end, start = min(hits)
    return start, end
