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
from radixcache.pins import Pins
from radixcache.policy import LRU
from radixcache.pool import BlockPool
from radixcache.tree import RadixTree


class PlantedBug(NamedTuple):
    """One bug.

    name   what goes wrong, as a phrase
    owner  the class whose method is edited
    method the method
    old    text that stands exactly once in its source
    new    text in its place
    eyes   which eyes of the state machine see it, each on its own
    """

    name: str
    owner: type
    method: str
    old: str
    new: str
    eyes: str

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the edited method in place for the length of a test."""
        original: FunctionType = inspect.getattr_static(self.owner, self.method)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, f"{self.name}: the edit no longer fits {original}"
        code = compile(source.replace(self.old, self.new), f"<{self.name}>", "exec")
        names = dict(original.__globals__)
        exec(code, names)
        monkeypatch.setattr(self.owner, self.method, names[self.method])


ALL, CHECK, REFERENCE, CONTENT = "check reference content", "check", "reference", "content"

PLANTED_BUGS = (
    # Pins.
    PlantedBug(
        "acquire pins nothing",
        *(RadixCache, "acquire", "self.pins.lock(node)", "node.lock_ref += 0"),
        ALL,
    ),
    PlantedBug(
        "a pin does not travel up",
        *(Pins, "lock", "current = current.parent", "return"),
        ALL,
    ),
    PlantedBug(
        "a pin stays above when the last one below is gone",
        *(Pins, "unlock", "current = current.parent", "return"),
        ALL,
    ),
    PlantedBug(
        "a pinned leaf stays in the eviction index",
        *(Pins, "lock", "self.index.remove(current)", "pass"),
        ALL,
    ),
    PlantedBug(
        "an inner node enters the eviction index",
        *(Pins, "unlock", "if current.is_leaf:", "if current.parent:"),
        ALL,
    ),
    PlantedBug(
        "a parent stays in the eviction index beside its new child",
        *(Pins, "attached", "self.index.remove(parent)", "pass"),
        ALL,
    ),
    PlantedBug(
        "a split loses the pin",
        *(RadixTree, "split", "1 if node.lock_ref else 0", "0"),
        ALL,
    ),
    PlantedBug(
        "a refused acquire keeps its pin",
        *(RadixCache, "acquire", "    self._unlock(node)\n", "    pass\n"),
        ALL,
    ),
    PlantedBug(
        "commit keeps the pin on the node it left",
        *(RadixCache, "commit", "self._unlock(lease.node)", "pass"),
        ALL,
    ),
    # Blocks and their owners.
    PlantedBug(
        "release forgets the private blocks",
        *(RadixCache, "release", "self.pool.release(self._private(lease))", "pass"),
        ALL,
    ),
    PlantedBug(
        "release frees the committed blocks too",
        *(RadixCache, "release", "self._private(lease)", "lease.block_table"),
        ALL,
    ),
    PlantedBug(
        "a block is freed twice",
        *(BlockPool, "release", "ids[self._refs[ids] == 0]", "ids[self._refs[ids] <= 1]"),
        ALL,
    ),
    PlantedBug(
        "a refused append keeps the blocks it took first",
        *(
            RadixCache,
            "append",
            "fresh = self._allocate(needed + shared)",
            "fresh = self._allocate(min(1, needed)) + self._allocate(max(0, needed - 1) + shared)",
        ),
        ALL,
    ),
    PlantedBug(
        "fork shares nothing",
        *(RadixCache, "fork", "self.pool.share(self._private(lease))", "pass"),
        ALL,
    ),
    PlantedBug(
        "truncate keeps the blocks",
        *(RadixCache, "truncate", "self.pool.release(lease.block_table[keep:])", "pass"),
        ALL,
    ),
    PlantedBug(
        "truncate frees the part-full block as well",
        *(
            RadixCache,
            "truncate",
            "-(-num_tokens // self.config.block_size)",
            "num_tokens // self.config.block_size",
        ),
        ALL,
    ),
    # Copy on write.
    PlantedBug(
        "a shared block is written without a copy",
        *(RadixCache, "append", "self.pool.refcount(lease.block_table[-1]) > 1", "False"),
        ALL,
    ),
    PlantedBug(
        "a copy leaves out the last slot",
        *(
            RadixCache,
            "append",
            "BlockCopy(source, own, filled)",
            "BlockCopy(source, own, filled - 1)",
        ),
        ALL,
    ),
    PlantedBug(
        "a copy goes the wrong way",
        *(RadixCache, "append", "BlockCopy(source, own,", "BlockCopy(own, source,"),
        ALL,
    ),
    # Commit and twins.
    PlantedBug(
        "commit publishes the part-full block",
        *(RadixCache, "commit", "num_tokens - num_tokens % block_size", "num_tokens"),
        ALL,
    ),
    PlantedBug(
        "a twin is freed, but the block table still names it",
        *(RadixCache, "_remap", "lease.block_table[first:last] = theirs", "pass"),
        ALL,
    ),
    PlantedBug(
        "a twin is mapped away, but never freed",
        *(RadixCache, "_remap", "self.pool.release(own)", "pass"),
        ALL,
    ),
    PlantedBug(
        "an edge grows in place under another lease",
        *(RadixCache, "_publish", "and node.lock_ref == 1", "and node.lock_ref"),
        ALL,
    ),
    PlantedBug(
        "an edge grows in place above its children",
        *(RadixCache, "_publish", "node.is_leaf and", "node.parent and"),
        ALL,
    ),
    # Matching.
    PlantedBug(
        "acquire finds the whole prompt, with no token left to compute",
        *(RadixCache, "acquire", "key.tokens, 0, num_tokens - 1", "key.tokens, 0, num_tokens"),
        ALL,
    ),
    PlantedBug(
        "match ends inside a block",
        *(RadixTree, "find", "same - same % self.block_size", "same"),
        ALL,
    ),
    PlantedBug(
        "an edge is trusted by its first block",
        *(RadixTree, "find", "tokens.startswith(edge, at)", "len(edge)"),
        ALL,
    ),
    PlantedBug(
        "match looks into whichever namespace came first",
        *(
            RadixCache,
            "match",
            "self.tree.roots.get(key.namespace)",
            "next(iter(self.tree.roots.values()), None)",
        ),
        ALL,
    ),
    PlantedBug(
        "acquire looks into whichever namespace came first",
        *(
            RadixCache,
            "acquire",
            "self.tree.roots.get(key.namespace)",
            "next(iter(self.tree.roots.values()), None)",
        ),
        ALL,
    ),
    PlantedBug(
        "a split gives the upper node the lower one's blocks",
        *(
            RadixTree,
            "split",
            "node.edge[:cut], node.block_ids[:cut_blocks]",
            "node.edge[:cut], node.block_ids[-cut_blocks:]",
        ),
        ALL,
    ),
    # Eviction.
    PlantedBug(
        "a trim frees the first blocks of an edge",
        *(
            RadixTree,
            "trim",
            "cut = leaf.block_ids[keep:]\n    del leaf.block_ids[keep:]",
            "cut = leaf.block_ids[:num_blocks]\n    del leaf.block_ids[:num_blocks]",
        ),
        ALL,
    ),
    PlantedBug(
        "a trim is not counted",
        *(Pins, "trimmed", "num_blocks\n", "0\n"),
        ALL,
    ),
    PlantedBug(
        "eviction counts blocks that a lease still holds as freed",
        *(
            RadixCache,
            "evict",
            "freed += self.pool.release(evicted)",
            "freed += bool(self.pool.release(evicted) + 1) * len(evicted)",
        ),
        ALL,
    ),
    PlantedBug(
        "room for a few blocks is made by evicting many",
        *(RadixCache, "_allocate", "self.evict(count - self.pool.num_free)", "self.evict(count)"),
        ALL,
    ),
    PlantedBug(
        "the most recently used goes first",
        *(LRU, "rank", "node.last_access", "-node.last_access"),
        ALL,
    ),
    PlantedBug(
        "a parent does not inherit the recency of its last child",
        *(RadixCache, "evict", "max(parent.last_access, leaf.last_access)", "parent.last_access"),
        ALL,
    ),
    PlantedBug(
        "a parent inherits after it was ranked",
        *(
            RadixCache,
            "evict",
            "parent.last_access = max(parent.last_access, leaf.last_access)\n"
            "            self.pins.removed(leaf, parent)",
            "self.pins.removed(leaf, parent)\n"
            "            parent.last_access = max(parent.last_access, leaf.last_access)",
        ),
        ALL,
    ),
    PlantedBug(
        "an acquired prefix does not count as used",
        *(RadixCache, "acquire", "self._touch(node)", "pass"),
        ALL,
    ),
)
