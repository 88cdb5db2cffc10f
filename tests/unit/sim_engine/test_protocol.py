from typing import Any

import pytest

from sluice_sim.protocol import ApiError, Inference, Reply, RequestLimits, parse_inference, parse_json, parse_tokenize
from sluice_sim.text import tokenize

LIMITS = RequestLimits(("m", "alias"), max_model_len=100, kv_tokens=1600)
HELLO = {"model": "m", "prompt": "hello"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def parsed(body: dict[str, Any], limits: RequestLimits = LIMITS) -> Inference:
    return parse_inference(body, is_chat="messages" in body, limits=limits)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "other"}, 404, "The model `other` does not exist."),
        ({"prompt": "x" * 400}, 400, "maximum context length is 100 tokens"),
        ({"max_tokens": 99}, 400, "you requested 101 tokens"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"max_tokens": "5"}, 400, "max_tokens must be an integer"),
        ({"max_tokens": True}, 400, "max_tokens must be an integer"),
        ({"prompt": ""}, 400, "must not be empty"),
        ({"prompt": None}, 400, "prompt must be"),
        ({"prompt": ["a", "b"]}, 400, "prompt must be one"),
        ({"prompt": [1, -1]}, 400, "prompt must be one"),
        ({"n": 2}, 400, "n must be 1"),
        ({"logprobs": 5}, 400, "logprobs is not supported"),
        ({"echo": True}, 400, "echo is not supported"),
        ({"stop": [""]}, 400, "stop must be"),
        ({"stop": 5}, 400, "stop must be"),
        ({"stream_options": 5}, 400, "stream_options"),
        ({"seed": "x"}, 400, "seed must be an integer"),
    ],
)
def test_bad_completion_is_refused_with_field_and_reason(change: dict[str, Any], status: int, message: str) -> None:
    with pytest.raises(ApiError) as error:
        parsed({**HELLO, **change})
    assert error.value.status == status
    assert message in error.value.message
    assert error.value.body()["error"]["code"] == status


@pytest.mark.parametrize(
    "messages", [None, [], ["hi"], [{"content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}]]
)
def test_bad_messages_are_refused(messages: Any) -> None:
    with pytest.raises(ApiError, match="messages"):
        parse_inference({"model": "m", "messages": messages}, is_chat=True, limits=LIMITS)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff"])
def test_body_must_be_a_json_object(raw: bytes) -> None:
    with pytest.raises(ApiError) as error:
        parse_json(raw)
    assert error.value.status == 400


def test_prompt_may_be_text_a_list_of_one_or_token_ids() -> None:
    ids = tokenize("hello")
    assert parsed(HELLO).prompt == parsed({**HELLO, "prompt": ["hello"]}).prompt == ids
    assert parsed({**HELLO, "prompt": ids}).prompt == parsed({**HELLO, "prompt": [ids]}).prompt == ids
    assert parse_tokenize(HELLO, LIMITS) == ids


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert parsed({"model": "m", "messages": [{"role": "user", "content": parts}]}).prompt == parsed(CHAT).prompt


def test_default_length_is_16_for_completions_and_the_rest_of_the_context_for_chats() -> None:
    assert parsed(HELLO).rules.max_tokens == 16
    chat = parsed(CHAT)
    assert chat.rules.max_tokens == 100 - len(chat.prompt)
    assert parsed({**CHAT, "max_tokens": 9, "max_completion_tokens": 7}).rules.max_tokens == 7


def test_answer_never_outgrows_the_kv_cache() -> None:
    small = RequestLimits(("m",), max_model_len=100, kv_tokens=20)
    assert parsed({**HELLO, "max_tokens": 90}, small).rules.max_tokens == 20 - 2 + 1
    with pytest.raises(ApiError, match="exceeds the KV cache of 20"):
        parsed({**HELLO, "prompt": "x" * 84}, small)


def test_seed_counts_only_when_sampling() -> None:
    assert parsed({**HELLO, "seed": 5}).seed == 5
    assert parsed({**HELLO, "seed": 5, "temperature": 0}).seed is None


def test_sampling_parameters_and_unknown_fields_are_let_through() -> None:
    assert parsed({**HELLO, "top_p": 0.5, "presence_penalty": 1, "whatever": {}, "logprobs": None}) == parsed(HELLO)


def test_usage_comes_in_a_last_chunk_or_in_all_of_them() -> None:
    def reply(**options: bool) -> Reply:
        return Reply(parsed({**HELLO, "stream": True, "stream_options": options}), "id", 1)

    assert reply().closing(3) is None
    closing = reply(include_usage=True).closing(3)
    assert closing is not None
    assert closing["choices"] == []
    assert closing["usage"]["completion_tokens"] == 3
    assert "usage" not in reply(include_usage=True).piece("x", 1, None)
    every = reply(include_usage=True, continuous_usage_stats=True).piece("x", 1, None)
    assert every["usage"]["total_tokens"] == 3
