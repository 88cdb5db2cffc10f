"""Request and answer bodies of the OpenAI API as vLLM 0.32 speaks it. Pure.

Fields that change only how a real model samples (temperature, top_p, penalties...) are read and have no effect, since
the simulated model has one answer per prompt; fields that would change the shape of the answer and are not
imitated (`n` > 1, logprobs, tools...) are refused. Unknown fields are ignored, as vLLM does.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sluice_sim.text import StopRules, tokenize, tokenize_chat

_DEFAULT_COMPLETION_TOKENS: Final = 16
_UNSUPPORTED: Final = ("logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "tools", "use_beam_search")


class ApiError(Exception):
    """An answer that is an error, in vLLM's shape."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param)


_ERROR_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request is checked against."""

    served_names: tuple[str, ...]
    max_model_len: int
    kv_tokens: int
    """Tokens that one request alone can hold in the KV cache."""


@dataclass(frozen=True, slots=True)
class Inference:
    """A valid request for an answer."""

    is_chat: bool
    model: str
    prompt: list[int]
    rules: StopRules
    stream: bool
    include_usage: bool
    continuous_usage: bool
    seed: int | None
    """Sampling seed; null: none given, or temperature 0, which makes it meaningless."""


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as an object.

    Raises:
        ApiError: 400, it is none.
    """
    try:
        data = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return data


def parse_inference(body: Mapping[str, Any], *, is_chat: bool, limits: RequestLimits) -> Inference:
    """Check a completion or chat completion.

    Raises:
        ApiError: 404 for an unknown model, 400 for everything else; the message names the field.
    """
    model = check_model(body, limits)
    for name in _UNSUPPORTED:
        if body.get(name):
            raise ApiError(400, f"{name} is not supported by the simulated engine.", name)
    if _integer(body, "n", 1, minimum=1) != 1:
        raise ApiError(400, "n must be 1 for the simulated engine.", "n")
    prompt = _chat_prompt(body) if is_chat else _completion_prompt(body)
    max_tokens = _max_tokens(body, len(prompt), is_chat=is_chat, limits=limits)
    temperature = body.get("temperature")
    seed = None if temperature == 0 else _integer(body, "seed", None)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object.", "stream_options")
    return Inference(
        is_chat=is_chat,
        model=model,
        prompt=prompt,
        rules=StopRules(
            max_tokens=max_tokens,
            min_tokens=min(_integer(body, "min_tokens", 0, minimum=0) or 0, max_tokens),
            ignore_eos=bool(body.get("ignore_eos")),
            stop=_stop(body),
        ),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        seed=seed,
    )


def check_model(body: Mapping[str, Any], limits: RequestLimits) -> str:
    """The model asked for; without one the engine's own.

    Raises:
        ApiError: 404, not served here.
    """
    model = body.get("model")
    if not model:
        return limits.served_names[0]
    if model not in limits.served_names:
        raise ApiError(404, f"The model `{model}` does not exist.", "model")
    return str(model)


def parse_tokenize(body: Mapping[str, Any], limits: RequestLimits) -> list[int]:
    """Token ids for `/tokenize`, of `prompt` or `messages`.

    Raises:
        ApiError: as `parse_inference`.
    """
    check_model(body, limits)
    if "messages" in body:
        return _chat_prompt(body)
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise ApiError(400, "prompt must be a string.", "prompt")
    return tokenize(prompt)


def _completion_prompt(body: Mapping[str, Any]) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids = tokenize(prompt)
    elif isinstance(prompt, list) and all(_is_token(item) for item in prompt):
        ids = prompt
    else:
        raise ApiError(400, "prompt must be one string or one list of token ids.", "prompt")
    if not ids:
        raise ApiError(400, "prompt must not be empty.", "prompt")
    return ids


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**32


def _chat_prompt(body: Mapping[str, Any]) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message.", "messages")
    return tokenize_chat([_message(message, index) for index, message in enumerate(messages)])


def _message(message: object, index: int) -> tuple[str, str]:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} must be an object with a role.", where)
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ApiError(400, f"{where}.content: only text parts are supported.", where)
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be text.", where)
    return message["role"], content


def _max_tokens(body: Mapping[str, Any], prompt_tokens: int, *, is_chat: bool, limits: RequestLimits) -> int:
    room = limits.max_model_len - prompt_tokens
    asked = _integer(body, "max_completion_tokens", None, minimum=1) if is_chat else None
    if asked is None:
        default = None if is_chat else _DEFAULT_COMPLETION_TOKENS
        asked = _integer(body, "max_tokens", default, minimum=1)
    if room < 1 or (asked is not None and asked > room):
        wanted = f"{prompt_tokens + (asked or 1)} tokens ({prompt_tokens} in the prompt, {asked or 1} for the answer)"
        raise ApiError(
            400,
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested {wanted}. "
            "Please reduce the length of the prompt or of the answer.",
            "max_tokens" if room >= 1 else "prompt",
        )
    # The last token needs no KV. A real engine with too few blocks for one request computes it for ever.
    kv_room = limits.kv_tokens - prompt_tokens + 1
    if kv_room < 1:
        raise ApiError(
            400, f"The prompt of {prompt_tokens} tokens exceeds the KV cache of {limits.kv_tokens}.", "prompt"
        )
    return min(room if asked is None else asked, kv_room)


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    words = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise ApiError(400, "stop must be a text or a list of texts, none empty.", "stop")
    return tuple(words)


def _integer(body: Mapping[str, Any], name: str, default: int | None, *, minimum: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ApiError(400, f"{name} must be an integer, got {value!r}.", name)
    if minimum is not None and value < minimum:
        raise ApiError(400, f"{name} must be at least {minimum}, got {value}.", name)
    return value


@dataclass(frozen=True, slots=True)
class Reply:
    """Builds the bodies of one answer."""

    request: Inference
    id: str
    created: int
    """Seconds since the epoch."""

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        prompt = len(self.request.prompt)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": None,
        }

    def whole(self, text: str, tokens: int, finish_reason: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        if self.request.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.request.is_chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": self.usage(tokens)}

    def opening(self) -> dict[str, Any] | None:
        """Chunk before the first token; completions have none."""
        if not self.request.is_chat:
            return None
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._chunk([choice], 0)

    def piece(self, text: str, tokens: int, finish_reason: str | None) -> dict[str, Any]:
        """Chunk with the next text; `tokens`: sent so far, this chunk included."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.request.is_chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        if finish_reason is not None:
            choice["stop_reason"] = None
        return self._chunk([choice], tokens)

    def closing(self, tokens: int) -> dict[str, Any] | None:
        """Chunk with the usage after the last token, if the client asked for it."""
        if not self.request.include_usage:
            return None
        return {**self._chunk([], tokens), "usage": self.usage(tokens)}

    def _chunk(self, choices: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.request.is_chat else "text_completion"
        chunk = {**self._head(kind), "choices": choices}
        if self.request.continuous_usage and self.request.include_usage:
            chunk["usage"] = self.usage(tokens)
        return chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}
