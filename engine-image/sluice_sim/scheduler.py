"""The scheduler: which sequence computes how many tokens in the next step, and how long that step takes.

Imitates vLLM's V1 scheduler: running sequences first, then waiting ones in order of arrival; prompts are computed in
chunks under one token budget per step; when blocks run out, the youngest running sequence is preempted and computed
anew later. A sequence whose KV comes from another engine takes its blocks when its turn comes, then waits beside the
queue until the KV is there. Pure: time is an argument, in seconds of any clock; nothing here sleeps.

Invariants: never more than `max_num_seqs` running, never more than `max_num_batched_tokens` per step; a sequence holds
blocks exactly while it runs or its KV is on the way (and after its end, if it keeps them for another engine);
whatever is added ends or is aborted (a sequence that fits alone always gets through).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice_sim.kv import KvCache, chain_hash, extend_hashes, kv_digest


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds per step = base + prefill_token * tokens + sequence * running + kv_token * KV tokens read."""

    base_s: float
    prefill_token_s: float
    sequence_s: float
    kv_token_s: float

    def step_s(self, prefill_tokens: int, running: int, kv_tokens: int) -> float:
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.sequence_s * running
            + self.kv_token_s * kv_tokens
        )


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Pace:
    """How a fault slows one sequence. Factors >= 1; after `stall_after` tokens nothing comes for `stall_s` seconds."""

    first_token_factor: float = 1.0
    token_factor: float = 1.0
    stall_after: int | None = None
    stall_s: float = 0.0


NORMAL_PACE = Pace()


@dataclass(eq=False, slots=True, repr=False)
class Sequence:
    """One request inside the engine. The scheduler alone changes the fields below `keeps_blocks`."""

    prompt: list[int]
    target: int
    """Tokens to generate, >= 1; at most these, until `on_prompt` was called."""
    next_token: Callable[[int], int]
    """Id of the i-th generated token."""
    arrived_at: float
    pace: Pace = NORMAL_PACE
    on_prompt: Callable[[bytes], None] | None = None
    """Called once, when the whole prompt has KV, with its digest; may lower `target` and set `next_token`."""
    is_remote: bool = False
    """The prompt's KV comes from another engine (false again once it came, or failed to)."""
    keeps_blocks: bool = False
    """Its blocks are not released at its end: see `Scheduler.take_blocks`."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and what was generated so far."""
    computed: int = 0
    """Tokens whose KV is in blocks now; 0 again after a preemption."""
    generated: int = 0
    cached: int = 0
    """Prompt tokens found in the prefix cache when first admitted."""
    external: int = 0
    """Prompt tokens whose KV came from another engine."""
    admitted_at: float | None = None
    """When it first left the queue; null while it waits for the first time."""
    is_done: bool = False
    _blocks: list[int] = field(default_factory=list)
    _hashes: list[bytes] = field(default_factory=list)
    _published: int = 0
    """Full blocks that are written and known by their hash."""
    _has_tail: bool = False
    """The prompt's last, partial block is written already."""
    _hold_until: float = 0.0
    _first_token_held: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)


@dataclass(frozen=True, slots=True)
class Step:
    work: tuple[tuple[Sequence, int], ...]
    """Sequence and number of tokens that it computes, >= 1."""
    duration_s: float
    admitted: tuple[Sequence, ...]
    """Sequences that left the queue for the first time."""
    preemptions: int


class Scheduler:
    def __init__(self, limits: Limits, kv: KvCache, time_model: TimeModel, root: bytes) -> None:
        self.kv = kv
        self._limits = limits
        self._time_model = time_model
        self._root = root
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._loading: list[Sequence] = []
        self._loaded: deque[Sequence] = deque()
        self._new_loads: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """All that do not run: in the queue, or waiting for their KV."""
        return len(self._waiting) + self.loading

    @property
    def loading(self) -> int:
        """Sequences whose KV is on the way, or came and found no free slot yet."""
        return len(self._loading) + len(self._loaded)

    @property
    def capacity_tokens(self) -> int:
        """KV tokens that one sequence alone can have."""
        return self.kv.num_blocks * self.kv.block_size

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            ValueError: it could not be finished even alone in the engine (the last token needs no KV).
        """
        needed = len(sequence.prompt) + sequence.target - 1
        if needed > self.capacity_tokens:
            raise ValueError(f"sequence needs KV for {needed} tokens, the engine has room for {self.capacity_tokens}")
        self._waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Drop it now, with its blocks; its part of a step under way is void. Done or unknown: nothing happens."""
        if sequence.is_done:
            return
        sequence.is_done = True
        self.kv.release(sequence._blocks)
        for place in (self._running, self._waiting, self._loading, self._loaded, self._new_loads):
            if sequence in place:
                place.remove(sequence)

    def take_loads(self) -> list[tuple[Sequence, int]]:
        """Sequences whose KV is to be fetched from now on, and the index of the first block that they lack."""
        loads, self._new_loads = self._new_loads, []
        return [(sequence, sequence._published) for sequence in loads]

    def loaded(self, sequence: Sequence, contents: list[bytes]) -> None:
        """The missing blocks' KV came; aborted meanwhile: nothing happens."""
        if sequence not in self._loading:
            return
        self._loading.remove(sequence)
        size, total = self.kv.block_size, len(sequence.prompt)
        first, full = sequence._published, total // size
        for index, content in enumerate(contents, start=first):
            self.kv.write(sequence._blocks[index], content)
        for index in range(first, full):  # under the hash of its tokens, whatever really came
            self.kv.publish(sequence._blocks[index], sequence._hashes[index])
        sequence._published = full
        sequence._has_tail = True
        sequence.is_remote = False
        sequence.external = total - sequence.cached
        sequence.computed = total - 1  # the last token is always computed: the next one comes out of it
        self._loaded.append(sequence)

    def not_loaded(self, sequence: Sequence) -> None:
        """Its KV does not come: compute the prompt here; aborted meanwhile: nothing happens."""
        if sequence not in self._loading:
            return
        self._loading.remove(sequence)
        self.kv.release(sequence._blocks)
        sequence.is_remote = False
        sequence.cached = 0
        sequence._published = 0
        self._waiting.appendleft(sequence)

    def take_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of an ended sequence that keeps them; whoever takes them releases them."""
        blocks, sequence._blocks = sequence._blocks, []
        return blocks

    def begin(self, now: float) -> Step | None:
        """Plan the next step; None if nothing can be computed at `now` (empty, or all are held, see `held_until`)."""
        budget = self._limits.max_num_batched_tokens
        work: list[tuple[Sequence, int]] = []
        admitted = self._start_loaded(now)
        preemptions = 0
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            if sequence._hold_until > now:
                index += 1
                continue
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if self._grow(sequence, count):
                work.append((sequence, count))
                budget -= count
                index += 1
            else:
                self._preempt_last()
                preemptions += 1
        if not preemptions:
            admitted += self._admit(now, budget, work)
        if not work:
            return None
        return Step(tuple(work), self._duration(work), tuple(admitted), preemptions)

    def end(self, step: Step, now: float) -> tuple[Sequence, ...]:
        """Book what the step computed; the sequences that got a token (their last one if `is_done`).

        Sequences aborted while the step ran are skipped.
        """
        produced = []
        for sequence, count in step.work:
            if sequence.is_done:
                continue
            sequence.computed += count
            self._publish(sequence)
            if sequence.computed < len(sequence.tokens):
                continue
            self._complete_prompt(sequence)
            self._hold_first_token(sequence, now)
            if sequence._hold_until > now:  # compute the last token once more when the hold is over
                sequence.computed -= 1
                continue
            self._produce(sequence, step, now)
            produced.append(sequence)
        return tuple(produced)

    def held_until(self) -> float | None:
        """When the next held sequence may go on; null if none is held."""
        return min((s._hold_until for s in self._running if s._hold_until > 0), default=None)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        missing = self.kv.blocks_for(sequence.computed + count) - len(sequence._blocks)
        return missing <= 0 or self.kv.extend(sequence._blocks, missing)

    def _preempt_last(self) -> None:
        victim = self._running.pop()
        self.kv.release(victim._blocks)
        victim.computed = 0
        victim._published = 0
        victim._has_tail = False
        self._waiting.appendleft(victim)

    def _start_loaded(self, now: float) -> list[Sequence]:
        started = []
        while self._loaded and len(self._running) < self._limits.max_num_seqs:
            sequence = self._loaded.popleft()
            self._running.append(sequence)
            sequence.admitted_at = now
            started.append(sequence)
        return started

    def _admit(self, now: float, budget: int, work: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Let waiting sequences in, first come first served, and add their first chunk to `work`."""
        admitted = []
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            sequence = self._waiting[0]
            extend_hashes(sequence._hashes, self._root, sequence.tokens, self.kv.block_size)
            # The last token is always computed: the next one comes out of it.
            usable = (len(sequence.tokens) - 1) // self.kv.block_size
            hits = self.kv.match(sequence._hashes[:usable])
            cached = len(hits) * self.kv.block_size
            count = len(sequence.tokens) - cached
            if not sequence.is_remote:
                count = min(count, budget)
            blocks = self.kv.admit(hits, self.kv.blocks_for(cached + count) - len(hits))
            if blocks is None:
                break
            self._waiting.popleft()
            sequence._blocks = blocks
            sequence._published = len(hits)
            if sequence.is_remote:
                sequence.cached = cached
                self._loading.append(sequence)
                self._new_loads.append(sequence)
                continue
            self._running.append(sequence)
            sequence.computed = cached
            if sequence.admitted_at is None:
                sequence.admitted_at = now
                sequence.cached = cached
                admitted.append(sequence)
            budget -= count
            work.append((sequence, count))
        return admitted

    def _duration(self, work: list[tuple[Sequence, int]]) -> float:
        prefill = kv_tokens = 0
        for sequence, count in work:
            if sequence.computed + 1 < len(sequence.tokens):
                prefill += count
            else:
                kv_tokens += sequence.computed
        return self._time_model.step_s(prefill, len(work), kv_tokens)

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.computed // self.kv.block_size
        if full <= sequence._published:
            return
        extend_hashes(sequence._hashes, self._root, sequence.tokens, self.kv.block_size)
        for index in range(sequence._published, full):
            content = self._computed(sequence, index)
            self.kv.write(sequence._blocks[index], content)
            self.kv.publish(sequence._blocks[index], sequence._hashes[index])
        sequence._published = full

    def _computed(self, sequence: Sequence, index: int) -> bytes:
        """What computing the block gives, on top of what really is in the block before it."""
        if index == 0:
            before = self._root
        else:
            [before] = self.kv.contents(sequence._blocks[index - 1 : index])
            if before != sequence._hashes[index - 1]:  # wrong KV before it makes its own wrong
                return self._chain(before, sequence, index)
        return sequence._hashes[index] if index < len(sequence._hashes) else self._chain(before, sequence, index)

    def _chain(self, before: bytes, sequence: Sequence, index: int) -> bytes:
        size = self.kv.block_size
        return chain_hash(before, sequence.tokens[index * size : (index + 1) * size])

    def _complete_prompt(self, sequence: Sequence) -> None:
        """All of the prompt has KV: say which, once."""
        if sequence.on_prompt is None:
            return
        full = len(sequence.prompt) // self.kv.block_size
        blocks = sequence._blocks[: self.kv.blocks_for(len(sequence.prompt))]
        if len(blocks) > full and not sequence._has_tail:
            self.kv.write(blocks[full], self._computed(sequence, full))
        sequence.on_prompt(kv_digest(self.kv.contents(blocks)))
        sequence.on_prompt = None

    def _hold_first_token(self, sequence: Sequence, now: float) -> None:
        """The first token is due at `now`; a fault may delay it, once."""
        pace = sequence.pace
        if sequence.generated or sequence._first_token_held:
            return
        delay_s = (now - sequence.arrived_at) * (pace.first_token_factor - 1)
        if pace.stall_after == 0:
            delay_s += pace.stall_s
        if delay_s > 0:
            sequence._first_token_held = True
            sequence._hold_until = now + delay_s

    def _produce(self, sequence: Sequence, step: Step, now: float) -> None:
        sequence.tokens.append(sequence.next_token(sequence.generated))
        sequence.generated += 1
        if sequence.generated == sequence.target:
            sequence.is_done = True
            self._running.remove(sequence)
            if not sequence.keeps_blocks:
                self.kv.release(sequence._blocks)
            return
        pace = sequence.pace
        hold_s = step.duration_s * (pace.token_factor - 1)
        if pace.stall_after == sequence.generated:
            hold_s += pace.stall_s
        sequence._hold_until = now + hold_s if hold_s > 0 else 0.0
