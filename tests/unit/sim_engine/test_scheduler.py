"""The scheduler in fake time: every test plays its steps itself."""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_sim.kv import KvCache, model_root
from sluice_sim.scheduler import NORMAL_PACE, Limits, Pace, Scheduler, Sequence, Step, TimeModel

TIME = TimeModel(base_s=1.0, prefill_token_s=0.1, sequence_s=0.01, kv_token_s=0.001)


@dataclass
class Player:
    """Plays steps one after the other and notes when each sequence got its tokens."""

    scheduler: Scheduler
    now: float = 0.0
    steps: list[Step] = field(default_factory=list)
    token_times: dict[Sequence, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, prompt: int, target: int, *, first: int = 0, pace: Pace = NORMAL_PACE) -> Sequence:
        """A sequence of `prompt` tokens `first`, `first` + 1, ..."""
        sequence = Sequence(list(range(first, first + prompt)), target, lambda i: 10_000 + i, self.now, pace)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step | None:
        step = self.scheduler.begin(self.now)
        if step is None:
            return None
        self.now += step.duration_s
        for sequence in self.scheduler.end(step, self.now):
            self.token_times[sequence].append(self.now)
        self.steps.append(step)
        return step

    def play(self, limit: int = 10_000) -> None:
        """Until nothing is left; waits for held sequences."""
        for _ in range(limit):
            if self.step() is None:
                held_until = self.scheduler.held_until()
                if held_until is None:
                    return
                assert held_until > self.now, "idle though a sequence may go on"
                self.now = held_until
        raise AssertionError(f"not done after {limit} steps")


def player(*, seqs: int = 8, batched: int = 64, blocks: int = 100, block_size: int = 4) -> Player:
    return Player(Scheduler(Limits(seqs, batched), KvCache(blocks, block_size), TIME, model_root("m")))


def test_step_time_counts_prefill_sequences_and_kv() -> None:
    engine = player()
    engine.add(10, 2)
    first, second = engine.step(), engine.step()
    assert first is not None
    assert second is not None
    assert first.duration_s == pytest.approx(1 + 10 * 0.1 + 0.01)
    assert second.duration_s == pytest.approx(1 + 0.01 + 10 * 0.001)


def test_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    engine = player(batched=8)
    sequence = engine.add(20, 1)
    engine.play()
    assert [step.work[0][1] for step in engine.steps] == [8, 8, 4]
    assert len(engine.token_times[sequence]) == 1


def test_running_sequences_get_their_token_before_new_prompts_get_the_rest_of_the_budget() -> None:
    engine = player(batched=8)
    engine.add(4, 10)
    engine.step()
    engine.add(20, 1, first=500)
    step = engine.step()
    assert step is not None
    assert [count for _, count in step.work] == [1, 7]


def test_first_come_first_served_within_max_num_seqs() -> None:
    engine = player(seqs=2)
    order = [engine.add(4, 2, first=100 * i) for i in range(4)]
    engine.step()
    assert (engine.scheduler.running, engine.scheduler.waiting) == (2, 2)
    engine.play()
    firsts = [engine.token_times[sequence][0] for sequence in order]
    assert firsts == sorted(firsts)
    assert firsts[1] < firsts[2]


def test_second_request_with_the_same_prompt_hits_the_cache_but_computes_its_last_token() -> None:
    engine = player()
    engine.add(16, 1)
    engine.play()
    again = engine.add(16, 1)
    step = engine.step()
    assert step is not None
    assert again.cached == 12
    assert step.work == ((again, 4),)


def test_generated_tokens_are_cached_too() -> None:
    engine = player()
    engine.add(8, 9)
    engine.play()
    follow_up = Sequence([*range(8), *(10_000 + i for i in range(9)), 1], 1, lambda i: i, engine.now)
    engine.scheduler.add(follow_up)
    engine.step()
    assert follow_up.cached == 16


def test_out_of_blocks_the_youngest_is_preempted_and_still_completes() -> None:
    engine = player(blocks=6)
    old, young = engine.add(8, 12), engine.add(8, 12, first=100)
    engine.play()
    assert sum(step.preemptions for step in engine.steps) > 0
    assert engine.token_times[old][-1] < engine.token_times[young][-1]
    assert (old.generated, young.generated) == (12, 12)


def test_sequence_that_could_never_finish_is_refused() -> None:
    engine = player(blocks=2)
    engine.add(8, 1)
    with pytest.raises(ValueError, match="room for 8"):
        engine.add(8, 2)


def test_abort_frees_slot_and_blocks_at_once_even_inside_a_step() -> None:
    engine = player(seqs=1)
    gone, next_one = engine.add(8, 50), engine.add(8, 1, first=100)
    step = engine.scheduler.begin(engine.now)
    assert step is not None
    engine.scheduler.abort(gone)
    assert (engine.scheduler.running, engine.scheduler.kv.live) == (0, 0)
    assert engine.scheduler.end(step, 1.0) == ()
    engine.play()
    assert next_one.is_done
    engine.scheduler.kv.check()


def test_abort_while_waiting_leaves_the_queue() -> None:
    engine = player(seqs=1)
    engine.add(4, 3)
    waiting = engine.add(4, 3)
    engine.step()
    engine.scheduler.abort(waiting)
    engine.play()
    assert engine.token_times[waiting] == []


def test_slow_first_token_multiplies_the_time_to_it_once() -> None:
    normal, slow = player(), player()
    reference, sequence = normal.add(10, 3), slow.add(10, 3, pace=Pace(first_token_factor=5))
    normal.play()
    slow.play()
    one_step = 1 + 0.01 + 9 * 0.001
    assert slow.token_times[sequence][0] == pytest.approx(5 * normal.token_times[reference][0] + one_step)
    gaps = [b - a for a, b in zip(slow.token_times[sequence], slow.token_times[sequence][1:], strict=False)]
    assert max(gaps) < 1.1


def test_slow_tokens_multiply_the_time_between_tokens() -> None:
    engine = player()
    sequence = engine.add(4, 5, pace=Pace(token_factor=3))
    engine.play()
    times = engine.token_times[sequence]
    assert [b - a for a, b in itertools.pairwise(times[1:])] == pytest.approx([3 * 1.01] * 3, rel=0.02)


@pytest.mark.parametrize("after", [0, 2])
def test_stalled_sequence_holds_its_blocks_while_others_go_on(after: int) -> None:
    engine = player()
    stalled = engine.add(4, 5, pace=Pace(stall_after=after, stall_s=100))
    other = engine.add(4, 5, first=100)
    engine.play()
    times = engine.token_times[stalled]
    assert engine.token_times[other][-1] < 20
    assert len(times) == 5
    assert (times[0] if after == 0 else times[after] - times[after - 1]) >= 100


def test_stalled_sequence_that_was_preempted_stays_silent_until_its_time() -> None:
    engine = player(blocks=4)
    other = engine.add(4, 12)
    stalled = engine.add(4, 3, first=100, pace=Pace(stall_after=1, stall_s=1000))
    engine.play()
    assert other.is_done
    assert engine.token_times[stalled][1] >= 1000


REQUESTS = st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 2), st.sampled_from([0, 0, 0, 1, 3]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(REQUESTS, min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(4, 40),
    st.integers(13, 30),
    st.sets(st.integers(0, 11), max_size=3),
    st.integers(0, 9),
)
def test_every_request_ends_within_the_limits(
    requests: list[tuple[int, int, int, int]],
    seqs: int,
    batched: int,
    blocks: int,
    aborted: set[int],
    abort_at: int,
) -> None:
    """Whatever comes: all tokens, in bounds, nothing leaks; `blocks` hold the longest request alone."""
    engine = player(seqs=seqs, batched=batched, blocks=blocks)
    added = [
        engine.add(prompt, target, first=family * 3, pace=Pace(stall_after=stall or None, stall_s=5.0))
        for prompt, target, family, stall in requests
    ]
    for _ in range(abort_at):
        engine.step()
    gone = [added[i] for i in aborted if i < len(added)]
    for sequence in gone:
        engine.scheduler.abort(sequence)
    engine.play()
    for step in engine.steps:
        assert len(step.work) <= seqs
        assert sum(count for _, count in step.work) <= batched
        assert all(count >= 1 for _, count in step.work)
    for sequence in added:
        if sequence not in gone:
            assert sequence.is_done
            assert len(engine.token_times[sequence]) == sequence.target
    assert (engine.scheduler.running, engine.scheduler.waiting, engine.scheduler.kv.live) == (0, 0, 0)
    engine.scheduler.kv.check()
