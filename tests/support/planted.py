"""Bugs to plant in the core, each a few changed characters of one function.

Owns: the list, and how one is planted.  Does not know: who catches it; the tests do.
Idea: an oracle is worth what it catches.  A bug is an edit of a function's source, so the table
reads like a diff, and an edit that no longer fits fails loudly instead of testing nothing.
"""

from __future__ import annotations

import inspect
import textwrap
from types import FunctionType
from typing import NamedTuple

import pytest

from radixcache.cache import RadixCache
from radixcache.epochs import Epochs
from radixcache.keeping import Keeper
from radixcache.pins import Pins
from radixcache.policy import LRU
from radixcache.pool import BlockPool
from radixcache.publishing import Publisher
from radixcache.room import Room
from radixcache.tree import RadixTree


class PlantedBug(NamedTuple):
    """One bug.

    name     what goes wrong, as a phrase
    where    the class and the method whose source is edited
    edit     text that stands exactly once in that source, and the text in its place
    seen_by  the eyes of the state machine that see it, each on its own
    test     the named test that catches it where no eye does: "module:function"
    """

    name: str
    where: tuple[type, str]
    edit: tuple[str, str]
    seen_by: str
    test: str = ""

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the edited method in place for the length of a test."""
        (owner, method), (old, new) = self.where, self.edit
        original: FunctionType = inspect.getattr_static(owner, method)
        source = textwrap.dedent(inspect.getsource(original))
        if source.count(old) != 1:
            raise LookupError(f"{self.name}: {old!r} does not stand once in {original}")
        names = dict(original.__globals__)
        exec(compile(source.replace(old, new), f"<planted: {self.name}>", "exec"), names)
        monkeypatch.setattr(owner, method, names[method])


PLANTED_BUGS = (
    PlantedBug(
        "acquire pins nothing",
        (Room, "lock_and_allocate"),
        edit=("self.pins.lock(node)", "node.lock_ref += 0"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a pin does not travel up",
        (Pins, "lock"),
        edit=("current = current.parent", "return"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a pin stays above when the last one below is gone",
        (Pins, "unlock"),
        edit=("current = current.parent", "return"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a pinned leaf stays in the eviction index",
        (Pins, "lock"),
        edit=("account.index.remove(node)", "pass"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "an inner node enters the eviction index",
        (Pins, "unlock"),
        edit=("and node.is_leaf", "and node.parent"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a new leaf is evictable under the lease that published it",
        (Pins, "attached_below_pin"),
        edit=("leaf.lock_ref = 1", "leaf.lock_ref = 0"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a split loses the pin",
        (RadixTree, "split"),
        edit=("1 if node.lock_ref else 0", "0"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a refused acquire keeps its pin",
        (Room, "lock_and_allocate"),
        edit=("    self.unlock(node)\n", "    pass\n"),
        seen_by="check reference",
    ),
    PlantedBug(
        "commit keeps the pin on the node it left",
        (Publisher, "commit"),
        edit=("self._room.unlock(lease.node)", "pass"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "release forgets the private blocks",
        (RadixCache, "release"),
        edit=(
            "self.room.free(self.accounts.by_namespace[lease.namespace], self._private(lease))",
            "pass",
        ),
        seen_by="check reference content",
    ),
    PlantedBug(
        "release frees the committed blocks too",
        (RadixCache, "release"),
        edit=("self._private(lease)", "lease.block_table"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a block is freed twice",
        (BlockPool, "release"),
        edit=("if not refs[block_id]:", "if refs[block_id] <= 1:"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a refused append keeps the blocks it took first",
        (RadixCache, "append"),
        edit=(
            "fresh = self.room.allocate(account, needed + shared)",
            "fresh = self.room.allocate(account, min(1, needed)) "
            "+ self.room.allocate(account, max(0, needed - 1) + shared)",
        ),
        seen_by="check reference content",
    ),
    PlantedBug(
        "fork shares nothing",
        (RadixCache, "fork"),
        edit=("self.pool.share(self._private(lease))", "pass"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "truncate keeps the blocks",
        (RadixCache, "truncate"),
        edit=("self.room.free(account, lease.block_table[keep:])", "pass"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "truncate frees the part-full block as well",
        (RadixCache, "truncate"),
        edit=("-(-num_tokens // self.config.block_size)", "num_tokens // self.config.block_size"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a shared block is written without a copy",
        (RadixCache, "append"),
        edit=("self.pool.refcount(lease.block_table[-1]) > 1", "False"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a copy leaves out the last slot",
        (RadixCache, "append"),
        edit=("BlockCopy(source, own, filled)", "BlockCopy(source, own, filled - 1)"),
        seen_by="reference content",
    ),
    PlantedBug(
        "a copy goes the wrong way",
        (RadixCache, "append"),
        edit=("BlockCopy(source, own,", "BlockCopy(own, source,"),
        seen_by="reference content",
    ),
    PlantedBug(
        "the head of a block is copied to the wrong block",
        (RadixCache, "acquire"),
        edit=("BlockCopy(source, fresh[0], partial)", "BlockCopy(source, fresh[-1], partial)"),
        seen_by="content",
    ),
    PlantedBug(
        "the head of a block is counted as cached, but never copied",
        (RadixCache, "acquire"),
        edit=("if partial:", "if partial > 99:"),
        seen_by="content",
    ),
    PlantedBug(
        "the head of a block is copied one token too long",
        (RadixTree, "find_partial"),
        edit=("[block], same)", "[block], min(same + 1, end - found.num_tokens))"),
        seen_by="reference content",
    ),
    PlantedBug(
        "the head of a block is taken from the beginning of its edge",
        (RadixTree, "nearest"),
        edit=("first = inside * TOKEN_BYTES", "first = 0"),
        seen_by="reference content",
    ),
    PlantedBug(
        "only the first child is asked for the head of a block",
        (RadixTree, "nearest"),
        edit=("node.nearest(wanted):", "node.nearest(wanted)[:1]:"),
        seen_by="reference",
    ),
    PlantedBug(
        "a raised epoch is still found",
        (Epochs, "is_stale"),
        edit=("namespace.epoch < ", "namespace.epoch > "),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a live lease publishes into an epoch that was raised",
        (RadixCache, "commit"),
        edit=(" or self.epochs.is_stale(lease.namespace)", ""),
        seen_by="reference",
    ),
    PlantedBug(
        "drop gives up what a lease stands on",
        (Room, "drop"),
        edit=("if node is not root and not node.lock_ref", "if node is not root"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "commit publishes the part-full block",
        (RadixCache, "commit"),
        edit=("num_tokens - num_tokens % block_size", "num_tokens"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a twin is freed, but the block table still names it",
        (Publisher, "_remap"),
        edit=("lease.block_table[first:last] = theirs", "pass"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a twin is mapped away, but never freed",
        (Publisher, "_remap"),
        edit=("self._room.free(account, own)", "pass"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a twin is neither mapped away nor freed",
        (Publisher, "_remap"),
        edit=("self._room.free(account, own)\n    lease.block_table[first:last] = theirs", "pass"),
        seen_by="check reference",
    ),
    PlantedBug(
        "an edge grows in place under another lease",
        (Publisher, "_grows"),
        edit=("node.lock_ref != 1", "not node.lock_ref"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "an edge grows in place above its children",
        (Publisher, "_grows"),
        edit=("not node.is_leaf", "not node.parent"),
        seen_by="reference content",
    ),
    PlantedBug(
        "acquire finds the whole prompt, with no token left to compute",
        (RadixCache, "acquire"),
        edit=("key.tokens, 0, num_tokens - 1", "key.tokens, 0, num_tokens"),
        seen_by="reference",
    ),
    PlantedBug(
        "match ends inside a block",
        (RadixTree, "find"),
        edit=("same - same % self.block_size", "same"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "an edge is trusted by its first block",
        (RadixTree, "find"),
        edit=("tokens.startswith(edge, at)", "len(edge)"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "match looks into whichever namespace came first",
        (RadixCache, "_find"),
        edit=("self.tree.roots.get(key.namespace)", "next(iter(self.tree.roots.values()), None)"),
        seen_by="reference content",
    ),
    PlantedBug(
        "acquire looks into whichever namespace came first",
        (RadixCache, "acquire"),
        edit=("self.tree.roots.get(key.namespace)", "next(iter(self.tree.roots.values()), None)"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a split gives the upper node the lower one's blocks",
        (RadixTree, "split"),
        edit=(
            "bytes(node.edge[:cut]), node.block_ids[:cut_blocks]",
            "bytes(node.edge[:cut]), node.block_ids[-cut_blocks:]",
        ),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a trim frees the first blocks of an edge",
        (RadixTree, "trim"),
        edit=(
            "cut = leaf.block_ids[keep:]\n    del leaf.block_ids[keep:]",
            "cut = leaf.block_ids[:num_blocks]\n    del leaf.block_ids[:num_blocks]",
        ),
        seen_by="reference content",
    ),
    PlantedBug(
        "a trim is not counted",
        (Pins, "trimmed"),
        edit=("evictable=-num_blocks", "evictable=0"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "eviction counts blocks that a lease still holds as freed",
        (Room, "give_up"),
        edit=(
            "freed = self.free(account, evicted)",
            "freed = bool(self.free(account, evicted) + 1) * len(evicted)",
        ),
        seen_by="reference",
    ),
    PlantedBug(
        "room for a few blocks is made by evicting many",
        (Room, "allocate"),
        edit=("self.evict(count - self.pool.num_free, account)", "self.evict(count, account)"),
        seen_by="reference",
    ),
    PlantedBug(
        "the prefix that was found counts as room for the rest",
        (RadixCache, "acquire"),
        edit=("self.pins.num_unpinned_above([found], block_size)", "0"),
        seen_by="reference",
    ),
    PlantedBug(
        "the most recently used goes first",
        (LRU, "rank"),
        edit=("node.last_access", "-node.last_access"),
        seen_by="reference",
    ),
    PlantedBug(
        "a parent does not inherit the recency of its last child",
        (Room, "give_up"),
        edit=("max(parent.last_access, leaf.last_access)", "parent.last_access"),
        seen_by="",
        test="tests.core.test_eviction:"
        "test_a_parent_is_as_recent_as_the_last_use_of_its_evicted_child",
    ),
    PlantedBug(
        "a parent inherits after it was ranked",
        (Room, "give_up"),
        edit=(
            "self.deadlines.forget(leaf)\n        self.pins.removed(leaf, parent)",
            "self.deadlines.forget(leaf)\n        self.pins.removed(leaf, parent)\n"
            "        parent.last_access = max(parent.last_access + 1, leaf.last_access)",
        ),
        seen_by="check",
    ),
    PlantedBug(
        "an acquired prefix does not count as used",
        (RadixCache, "acquire"),
        edit=("node.last_access = self._clock", "pass"),
        seen_by="reference",
    ),
    PlantedBug(
        "a prefix that is touched does not count as used",
        (Keeper, "touch"),
        edit=("node.last_access = last_access", "pass"),
        seen_by="reference",
    ),
    PlantedBug(
        "a prefix that is touched keeps its place in the order of eviction",
        (Keeper, "touch"),
        edit=("self._room.pins.reranked(node)", "pass"),
        seen_by="check reference",
    ),
    PlantedBug(
        "what stands beyond a touched prefix is touched, too",
        (Keeper, "touch"),
        edit=("self._publisher.upper(found.node, found.inside)", "found.node"),
        seen_by="reference",
    ),
)
