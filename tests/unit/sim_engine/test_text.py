import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_sim.text import CHARS_PER_TOKEN, WORDS, Answer, StopRules, Voice, plan_answer, tokenize, tokenize_chat

DIGEST = b"digest of the prompt"


@pytest.mark.parametrize(("text", "count"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("x" * 4000, 1000)])
def test_one_token_is_four_characters(text: str, count: int) -> None:
    assert len(tokenize(text)) == count


def test_same_text_has_same_tokens_and_another_has_others() -> None:
    assert tokenize("some text") == tokenize("some text")
    assert tokenize("some text") != tokenize("same text")


def test_longer_chat_begins_with_the_tokens_of_the_shorter_one() -> None:
    first = [("system", "be short"), ("user", "odd length!")]
    answer = "".join(Voice(DIGEST).piece(i) for i in range(7))
    short = tokenize_chat(first)
    long = tokenize_chat([*first, ("assistant", answer), ("user", "go on")])
    assert long[: len(short)] == short
    assert long[len(short) : len(short) + 7] == tokenize(answer)


def test_vocabulary_is_one_token_per_word_without_doubles() -> None:
    assert all(len(word) == CHARS_PER_TOKEN for word in WORDS)
    assert len(set(WORDS)) == len(WORDS)


def test_answer_depends_on_the_prompt_and_the_seed_only() -> None:
    def said(digest: bytes, seed: int | None = None) -> str:
        return plan_answer(Voice(digest, seed), StopRules(64, ignore_eos=True)).text(0, 64)

    assert said(DIGEST) == said(DIGEST)
    assert len({said(DIGEST), said(b"other"), said(DIGEST, 1), said(DIGEST, 2)}) == 4


def test_pieces_are_the_same_in_any_order() -> None:
    forward, backward = Voice(DIGEST), Voice(DIGEST)
    assert [forward.piece(i) for i in range(100)] == [backward.piece(i) for i in reversed(range(100))][::-1]


def test_ends_by_itself_unless_told_not_to() -> None:
    natural = Voice(DIGEST).natural_length()
    assert plan_answer(Voice(DIGEST), StopRules(1000)).length == natural
    assert plan_answer(Voice(DIGEST), StopRules(1000)).finish_reason == "stop"
    assert plan_answer(Voice(DIGEST), StopRules(natural - 1)).finish_reason == "length"
    assert plan_answer(Voice(DIGEST), StopRules(1000, ignore_eos=True)).length == 1000
    assert plan_answer(Voice(DIGEST), StopRules(1000, min_tokens=500)).length == 500


def whole(answer: Answer) -> str:
    return answer.text(0, answer.length)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=8), st.integers(1, 300), st.integers(0, 300), st.integers(1, 12), st.integers(1, 9))
def test_stop_string_ends_the_answer_and_is_not_shown(
    digest: bytes, max_tokens: int, start: int, length: int, step: int
) -> None:
    free = whole(plan_answer(Voice(digest), StopRules(max_tokens)))
    stop = free[start : start + length]
    if not stop:
        return
    answer = plan_answer(Voice(digest), StopRules(max_tokens, stop=(stop,)))
    assert whole(answer) == free[: free.index(stop)]
    assert answer.finish_reason == "stop"
    pieces = [answer.text(i, min(i + step, answer.length)) for i in range(0, answer.length, step)]
    assert "".join(pieces) == whole(answer), "streamed and plain text differ"


def test_stop_string_does_not_count_before_min_tokens() -> None:
    first = Voice(DIGEST).piece(0)
    answer = plan_answer(Voice(DIGEST), StopRules(20, min_tokens=10, ignore_eos=True, stop=(first,)))
    assert answer.length > 10


def test_of_several_stop_strings_the_first_complete_one_counts() -> None:
    free = whole(plan_answer(Voice(DIGEST), StopRules(16)))
    answer = plan_answer(Voice(DIGEST), StopRules(16, stop=(free[4:20], free[8:12])))
    assert whole(answer) == free[:8]
