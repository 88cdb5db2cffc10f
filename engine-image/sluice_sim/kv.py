"""KV cache: a fixed number of blocks, shared by prefix, kept after use until the room is needed.

Pure bookkeeping. Invariants: every block is either live (some sequence refers to it) or free, never both; a free block
may still be cached (known by the hash of its tokens) until it is handed out again, least recently used first;
`live` counts blocks of living sequences only, as vLLM's `kv_cache_usage_perc` does.

What a block is known by and what is in its memory are two things, as in a real engine: the content stays when the
block is freed, is lost when another sequence writes over it, and a transfer may bring in a wrong one unnoticed.
Content that was computed here from right content equals the block's hash.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of a block's KV: that of everything before it plus its own tokens."""
    return hashlib.blake2b(array("L", tokens).tobytes(), digest_size=16, key=parent).digest()


def model_root(model: str) -> bytes:
    """Parent of a first block: other weights have other KV for the same tokens."""
    return hashlib.blake2b(model.encode(), digest_size=16).digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append the hashes of the full blocks of `tokens` that `hashes` does not have yet."""
    for index in range(len(hashes), len(tokens) // block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(chain_hash(parent, tokens[index * block_size : (index + 1) * block_size]))


def kv_digest(contents: Sequence[bytes]) -> bytes:
    """What a model reads when it has these blocks before it; every one of them counts."""
    return hashlib.blake2b(b"|".join(contents), digest_size=16).digest()


class KvCache:
    """`num_blocks` blocks of `block_size` tokens. Methods never do half of what they are asked for."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._content = [b""] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))

    @property
    def live(self) -> int:
        """Blocks held by living sequences."""
        return self.num_blocks - len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks held by living sequences, 0..1."""
        return self.live / self.num_blocks

    @property
    def cached(self) -> int:
        """Blocks whose content can be found by hash, live or free."""
        return len(self._block_of)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest cached prefix, as blocks; takes nothing."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, hits: Sequence[int], new: int) -> list[int] | None:
        """A block table of the cached `hits` and `new` fresh blocks; None, and nothing taken, if there is no room."""
        revived = sum(1 for block in hits if self._refs[block] == 0)
        if new > len(self._free) - revived:
            return None
        for block in hits:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1
        table = list(hits)
        self.extend(table, new)
        return table

    def extend(self, table: list[int], new: int) -> bool:
        """Append `new` fresh blocks to the table; False, and nothing taken, if there is no room."""
        if new > len(self._free):
            return False
        for _ in range(new):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            table.append(block)
        return True

    def publish(self, block: int, block_hash: bytes) -> None:
        """The live block now holds this content: others may share it. A second copy of it stays private."""
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def write(self, block: int, content: bytes) -> None:
        """The block's memory now holds this."""
        self._content[block] = content

    def contents(self, blocks: Sequence[int]) -> list[bytes]:
        """What is in the memory of these blocks now, whoever they belong to; empty where nothing was ever written."""
        return [self._content[block] for block in blocks]

    def overwrite_free(self, blocks: Iterable[int]) -> None:
        """Use those of the blocks that are free at once for something else, as a busy engine soon would."""
        for block in blocks:
            if self._refs[block] == 0:
                self._forget(block)
                self._free.move_to_end(block, last=False)
                self._content[block] = hashlib.blake2b(self._content[block], digest_size=16, person=b"reused").digest()

    def release(self, table: list[int]) -> None:
        """Give all blocks of a sequence back and empty its table.

        From the end, so that the start of a prefix, which more requests share, is evicted last.
        """
        for block in reversed(table):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:  # holds nothing that anyone could find: first to be reused
                    self._free.move_to_end(block, last=False)
        table.clear()

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken (for tests)."""
        for block in range(self.num_blocks):
            assert (self._refs[block] == 0) == (block in self._free), f"block {block}: live and free at once"
            assert self._refs[block] >= 0, f"block {block}: released too often"
        for block_hash, block in self._block_of.items():
            assert self._hash_of[block] == block_hash, f"block {block}: found under a hash that it does not hold"
