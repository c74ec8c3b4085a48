"""What every slot of the pool holds, told in tokens: the oracle that counters cannot replace.

Owns: the slots, and the copies that the cache still owes.  Does not know: how the cache decides.
Idea: K/V of a token depends on exactly the tokens up to it, in its namespace.  So a slot "holds"
the prefix that was current when it was written, and slot i of a sequence is right only if it holds
exactly that sequence's first i + 1 tokens.

    store = ContentOracle(num_blocks=8, block_size=2)
    store.owe(cache.append(lease, tokens))               # copies, carried out before the next write
    store.compute(lease, num_computed, lease.num_tokens)
    store.check_lease(lease, num_computed)
    store.check_match(namespace, token_ids, cache.match(key))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixcache import BlockCopy, Lease, Match, Namespace, unpack_tokens

Content = tuple[Namespace, tuple[int, ...]]


class WrongContent(AssertionError):
    """A slot that is read for one prefix holds another, or nothing."""


class ContentOracle:
    """Slots of a pool as a device would hold them: written by `compute`, moved by copies alone.

    Copies owed are carried out in their order before the next write, as late as is allowed.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: list[list[Content | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._owed: list[BlockCopy] = []

    def owe(self, copies: Iterable[BlockCopy]) -> None:
        """Note copies that `append` returned."""
        self._owed.extend(copies)

    def settle(self) -> None:
        """Carry out the copies owed, in order."""
        for copy in self._owed:
            self._blocks[copy.dst][: copy.num_tokens] = self._blocks[copy.src][: copy.num_tokens]
        self._owed.clear()

    def compute(self, lease: Lease, start: int, end: int) -> None:
        """Write the slots of tokens `start … end` of a sequence, once the copies are done."""
        self.settle()
        tokens = tuple(unpack_tokens(lease.tokens))
        for position in range(start, end):
            block, slot = divmod(position, self.block_size)
            content = (lease.namespace, tokens[: position + 1])
            self._blocks[lease.block_table[block]][slot] = content

    def check_lease(self, lease: Lease, num_computed: int) -> None:
        """Raise WrongContent unless the first `num_computed` slots of a lease hold its tokens."""
        tokens = unpack_tokens(lease.tokens)[:num_computed]
        self._check(repr(lease), lease.namespace, tokens, lease.block_table)

    def check_match(self, namespace: Namespace, token_ids: Sequence[int], match: Match) -> None:
        """Raise WrongContent unless the matched blocks hold the matched tokens."""
        if len(match.block_ids) * self.block_size != match.num_tokens:
            raise WrongContent(f"{match} names another number of slots than of tokens")
        self._check(repr(match), namespace, token_ids[: match.num_tokens], match.block_ids)

    def _check(
        self, who: str, namespace: Namespace, tokens: Sequence[int], block_ids: Sequence[int]
    ) -> None:
        blocks = self._after_copies()
        for position in range(len(tokens)):
            block, slot = divmod(position, self.block_size)
            held = blocks[block_ids[block]][slot]
            expected = (namespace, tuple(tokens[: position + 1]))
            if held != expected:
                raise WrongContent(
                    f"{who}: slot {slot} of block {block_ids[block]} should hold {expected}, "
                    f"but holds {held}"
                )

    def _after_copies(self) -> list[list[Content | None]]:
        """The slots as the next step will read them; the copies stay owed."""
        if not self._owed:
            return self._blocks
        blocks = [list(block) for block in self._blocks]
        for copy in self._owed:
            blocks[copy.dst][: copy.num_tokens] = blocks[copy.src][: copy.num_tokens]
        return blocks
