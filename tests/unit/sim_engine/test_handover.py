"""KV between two schedulers, in fake time: what the lender's blocks hold is what the borrower's model reads."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_sim.kv import KvCache, model_root
from sluice_sim.scheduler import Limits, Scheduler, Sequence, TimeModel

TIME = TimeModel(base_s=1.0, prefill_token_s=0.1, sequence_s=0.01, kv_token_s=0.001)
BLOCK = 4


class Side:
    def __init__(self, *, blocks: int = 64, seqs: int = 4) -> None:
        self.scheduler = Scheduler(Limits(seqs, 16), KvCache(blocks, BLOCK), TIME, model_root("m"))
        self.digests: dict[Sequence, bytes] = {}
        self.now = 0.0

    def add(self, prompt: list[int], target: int, *, is_remote: bool = False, keeps_blocks: bool = False) -> Sequence:
        sequence = Sequence(
            prompt, target, lambda i: 1000 + i, self.now, is_remote=is_remote, keeps_blocks=keeps_blocks
        )
        sequence.on_prompt = lambda digest: self.digests.__setitem__(sequence, digest)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        step = self.scheduler.begin(self.now)
        if step is None:
            return False
        self.now += step.duration_s
        self.scheduler.end(step, self.now)
        return True

    def play(self) -> None:
        while self.step():
            pass

    def compute(self, prompt: list[int], *, keeps_blocks: bool = False) -> tuple[bytes, list[int]]:
        """Digest of the prompt's KV, and the blocks that were kept."""
        sequence = self.add(prompt, 1, keeps_blocks=keeps_blocks)
        self.play()
        return self.digests[sequence], self.scheduler.take_blocks(sequence)


def read(lender: Side, blocks: list[int], first: int) -> list[bytes]:
    return lender.scheduler.kv.contents(blocks[first:])


PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=6))
def test_borrower_reads_what_it_would_have_computed(prompts: list[list[int]]) -> None:
    """Also when parts of a prompt are cached on either side."""
    lender, borrower, alone = Side(), Side(), Side()
    for prompt in prompts:
        _, blocks = lender.compute(prompt, keeps_blocks=True)
        sequence = borrower.add(prompt, 3, is_remote=True)
        assert not borrower.step()
        [(loading, first)] = borrower.scheduler.take_loads()
        borrower.scheduler.loaded(loading, read(lender, blocks, first))
        borrower.play()
        lender.scheduler.kv.release(blocks)
        assert borrower.digests[sequence] == alone.compute(prompt)[0]
        assert sequence.cached + sequence.external == len(prompt)
    for side in (lender, borrower):
        assert side.scheduler.kv.live == 0
        side.scheduler.kv.check()


def test_kept_blocks_are_live_until_they_are_released() -> None:
    lender = Side()
    _, blocks = lender.compute(list(range(10)), keeps_blocks=True)
    assert (lender.scheduler.running, lender.scheduler.kv.live) == (0, 3)
    lender.scheduler.kv.release(blocks)
    assert lender.scheduler.kv.live == 0


def test_blocks_that_were_used_again_hold_something_else() -> None:
    lender, alone = Side(blocks=4), Side()
    prompt = list(range(10))
    digest, blocks = lender.compute(prompt, keeps_blocks=True)
    table = list(blocks)
    before = read(lender, table, 0)
    lender.scheduler.kv.release(blocks)
    assert read(lender, table, 0) == before
    lender.compute(list(range(100, 116)))
    assert all(old != new for old, new in zip(before, read(lender, table, 0), strict=True))
    assert lender.compute(prompt)[0] == digest == alone.compute(prompt)[0]


def test_what_is_computed_on_wrong_kv_is_wrong_too() -> None:
    borrower, alone = Side(), Side()
    prompt = list(range(8))
    borrower.add(prompt, 1, is_remote=True)
    borrower.step()
    [(loading, _)] = borrower.scheduler.take_loads()
    borrower.scheduler.loaded(loading, [b"wrong", b"wrong"])
    borrower.play()
    longer = [*prompt, *range(50, 60)]
    assert borrower.compute(longer)[0] != alone.compute(longer)[0]


def test_sequence_whose_kv_does_not_come_is_computed() -> None:
    borrower, alone = Side(), Side()
    prompt = list(range(10))
    sequence = borrower.add(prompt, 2, is_remote=True)
    borrower.step()
    assert (borrower.scheduler.loading, borrower.scheduler.waiting, borrower.scheduler.running) == (1, 1, 0)
    [(loading, _)] = borrower.scheduler.take_loads()
    borrower.scheduler.not_loaded(loading)
    borrower.play()
    assert borrower.digests[sequence] == alone.compute(prompt)[0]
    assert sequence.external == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(10, 24), st.integers(1, 3))
def test_every_sequence_ends_whatever_becomes_of_its_kv(seed: int, blocks: int, seqs: int) -> None:
    rng = random.Random(seed)
    side = Side(blocks=blocks, seqs=seqs)
    added = [
        side.add(
            [rng.randint(0, 2) for _ in range(rng.randint(1, 30))], rng.randint(1, 10), is_remote=rng.random() < 0.6
        )
        for _ in range(10)
    ]
    under_way: list[Sequence] = []
    for _ in range(2000):
        side.step()
        under_way += [sequence for sequence, _ in side.scheduler.take_loads()]
        if under_way and rng.random() < 0.5:
            sequence = under_way.pop(rng.randrange(len(under_way)))
            match rng.choice(["loaded", "failed", "aborted"]):
                case "loaded":
                    total = side.scheduler.kv.blocks_for(len(sequence.prompt))
                    side.scheduler.loaded(sequence, [b"x"] * (total - sequence.cached // BLOCK))
                case "failed":
                    side.scheduler.not_loaded(sequence)
                case _:
                    side.scheduler.abort(sequence)
    assert all(sequence.is_done for sequence in added)
    assert (side.scheduler.running, side.scheduler.waiting, side.scheduler.kv.live) == (0, 0, 0)
    side.scheduler.kv.check()
