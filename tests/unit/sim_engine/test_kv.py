from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_sim.kv import KvCache, extend_hashes, kv_digest, model_root

ROOT = model_root("model")


def hashes(tokens: list[int], block_size: int = 4) -> list[bytes]:
    found: list[bytes] = []
    extend_hashes(found, ROOT, tokens, block_size)
    return found


def filled(kv: KvCache, tokens: list[int]) -> list[int]:
    """A living table whose full blocks hold `tokens`."""
    table = kv.admit([], kv.blocks_for(len(tokens)))
    assert table is not None
    for block, block_hash in zip(table, hashes(tokens, kv.block_size), strict=False):
        kv.publish(block, block_hash)
    return table


def test_block_identity_covers_everything_before_it() -> None:
    first, other = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[1] != other[1]


def test_hashes_are_extended_not_recomputed() -> None:
    found = hashes([1, 2, 3, 4])
    extend_hashes(found, ROOT, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert found == hashes([1, 2, 3, 4, 5, 6, 7, 8])


def test_digest_covers_every_block() -> None:
    assert kv_digest([b"a", b"b"]) == kv_digest([b"a", b"b"])
    assert len({kv_digest([b"a", b"b"]), kv_digest([b"x", b"b"]), kv_digest([b"a", b"x"]), kv_digest([b"ab"])}) == 4


def test_content_outlives_its_sequence_until_the_block_is_used_again() -> None:
    kv = KvCache(2, 4)
    table = filled(kv, [1, 2, 3, 4])
    [block] = table
    kv.write(block, b"kv")
    kv.release(table)
    assert kv.contents([block]) == [b"kv"]
    kv.overwrite_free([block])
    assert kv.contents([block]) != [b"kv"]
    assert kv.match(hashes([1, 2, 3, 4])) == []
    kv.check()


def test_live_blocks_are_not_overwritten() -> None:
    kv = KvCache(2, 4)
    [block] = filled(kv, [1, 2, 3, 4])
    kv.write(block, b"kv")
    kv.overwrite_free([block])
    assert kv.contents([block]) == [b"kv"]


def test_only_blocks_of_the_living_count_as_used() -> None:
    kv = KvCache(10, 4)
    table = filled(kv, list(range(12)))
    assert kv.usage == 0.3
    kv.release(table)
    assert (kv.usage, kv.cached) == (0.0, 3)


def test_released_prefix_is_found_again() -> None:
    kv = KvCache(10, 4)
    kv.release(filled(kv, list(range(12))))
    assert len(kv.match(hashes([*range(8), 99, 98, 97, 96]))) == 2


def test_shared_block_lives_until_its_last_user_is_gone() -> None:
    kv = KvCache(10, 4)
    first = filled(kv, list(range(8)))
    second = kv.admit(kv.match(hashes(list(range(8)))), 1)
    assert second is not None
    assert kv.live == 3
    kv.release(first)
    assert kv.live == 3
    kv.release(second)
    assert kv.live == 0


def test_least_recently_used_prefix_is_evicted_first_and_from_its_end() -> None:
    kv = KvCache(4, 4)
    old, new = list(range(8)), list(range(100, 108))
    kv.release(filled(kv, old))
    kv.release(filled(kv, new))
    assert kv.admit([], 1) is not None
    assert (len(kv.match(hashes(old))), len(kv.match(hashes(new)))) == (1, 2)


def test_blocks_without_findable_content_are_reused_before_cached_ones() -> None:
    kv = KvCache(4, 4)
    kv.release(filled(kv, list(range(8))))
    kv.release(kv.admit([], 2) or [])
    assert kv.admit([], 2) is not None
    assert len(kv.match(hashes(list(range(8))))) == 2


def test_refused_request_takes_nothing() -> None:
    kv = KvCache(4, 4)
    table = filled(kv, list(range(8)))
    kv.release(table)
    hits = kv.match(hashes(list(range(8))))
    assert kv.admit(hits, 3) is None
    assert (kv.live, kv.cached) == (0, 2)
    held = kv.admit([], 4)
    assert held is not None
    assert not kv.extend(held, 1)
    assert kv.live == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["admit", "extend", "release"]), st.integers(0, 9)), max_size=60))
def test_no_sequence_of_uses_breaks_the_bookkeeping(uses: list[tuple[str, int]]) -> None:
    kv = KvCache(8, 2)
    tables: list[list[int]] = []
    for use, number in uses:
        if use == "admit":
            tokens = [number % 3, *range(number)]
            known = hashes(tokens, 2)
            hits = kv.match(known)
            table = kv.admit(hits, kv.blocks_for(len(tokens)) - len(hits))
            if table is not None:
                for block, block_hash in zip(table, known, strict=False):
                    kv.publish(block, block_hash)
                tables.append(table)
        elif tables and use == "extend":
            kv.extend(tables[number % len(tables)], 1)
        elif tables:
            kv.release(tables.pop(number % len(tables)))
        kv.check()
        assert kv.live == len({block for table in tables for block in table})
    for table in tables:
        kv.release(table)
    assert kv.live == 0
