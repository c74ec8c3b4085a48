"""What the cache hands out: leases, and the records of what it did.

Owns: the fields.  Does not know: how they change; the cache alone changes a lease.
Idea: a sequence is a lease, and every kind of branching is fork, truncate, release.

    tokens       │ committed: shared with the tree │ private: this lease's own │
    block_table  │ b0  b1  b2 …                    │ b7  b8  b9(part full)     │
                 0                              num_committed        num_tokens
"""

from __future__ import annotations

from array import array

import msgspec

from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from radixcache.node import Node
from radixcache.retention import Retention
from radixcache.tokens import TOKEN_BYTES, Packed, check_packed, pack_tokens


class PrefixKey(msgspec.Struct, frozen=True):
    """What is looked up: packed tokens in a namespace.  Raises InvalidTokens for unpacked ones.

    >>> PrefixKey.of([1, 2, 3]).num_tokens
    3
    """

    namespace: Namespace
    tokens: bytes

    def __post_init__(self) -> None:
        check_packed(self.tokens)

    @classmethod
    def of(cls, token_ids: list[int], namespace: Namespace = DEFAULT_NAMESPACE) -> PrefixKey:
        """Pack token ids into a key.  Raises InvalidTokens."""
        return cls(namespace, pack_tokens(token_ids))

    @property
    def num_tokens(self) -> int:
        """Tokens in the key."""
        return len(self.tokens) // TOKEN_BYTES


class Match(msgspec.Struct, frozen=True):
    """What a look-up found; a copy, so nothing done to it reaches the cache.

    num_tokens  tokens of the key that are cached, whole blocks
    packed_ids  ids of their blocks, in order, native int32: `numpy.frombuffer` reads them at once
    """

    num_tokens: int
    packed_ids: bytes

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks in order, one int each; O(blocks)."""
        return tuple(memoryview(self.packed_ids).cast("i"))


class BlockCopy(msgspec.Struct, frozen=True):
    """A copy that the cache owes: K/V of the first `num_tokens` slots of `src` into `dst`.

    Carry copies out in order, before anything of the same step is written.
    """

    src: int
    dst: int
    num_tokens: int


class Commit(msgspec.Struct, frozen=True):
    """What a commit did.

    num_published  blocks that the tree took over
    num_twins      blocks that another lease had published first: ours were given up, and the
                   block table now names the others' (same tokens, same K/V)
    """

    num_published: int
    num_twins: int


class Lease:
    """One sequence's hold on the pool.  Passive: read it, and let the cache change it.

    tokens         packed ids, prompt and what was appended; grows
    block_table    a block id for each `block_size` tokens, the last perhaps part full
    num_cached     tokens found in the cache at `acquire`; beyond whole blocks by a copy
    num_committed  tokens whose blocks belong to the tree, whole blocks; the rest is private
    copy_owed      the copy that `num_cached` counts on, to be carried out before the next step
                   writes; None where the cache was left at the edge of a block
    retentions     token ranges that are worth more than the rest
    """

    __slots__ = (
        "block_table",
        "copy_owed",
        "lease_id",
        "namespace",
        "node",
        "num_cached",
        "num_committed",
        "retentions",
        "tokens",
    )

    def __init__(
        self,
        lease_id: int,
        namespace: Namespace,
        tokens: Packed,
        node: Node,
        retentions: tuple[Retention, ...] = (),
    ) -> None:
        self.lease_id = lease_id
        self.namespace = namespace
        self.tokens = bytearray(tokens)
        self.block_table = array("i")
        self.num_cached = 0
        self.copy_owed: BlockCopy | None = None
        self.num_committed = 0
        self.retentions = retentions
        self.node = node  # where the committed part ends in the tree; pinned

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, computed or not."""
        return len(self.tokens) // TOKEN_BYTES

    def __repr__(self) -> str:
        return (
            f"Lease({self.lease_id}, {self.num_tokens} tokens, {self.num_cached} cached, "
            f"{self.num_committed} committed)"
        )
