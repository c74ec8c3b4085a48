"""`check()` itself: every invariant that it names is one that it can see broken."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from radixcache import (
    CacheConfig,
    InvariantViolation,
    Lease,
    Namespace,
    PrefixKey,
    Quota,
    RadixCache,
    Retention,
    pack_tokens,
)
from radixcache.accounts import Account
from radixcache.node import Node
from tests.core.serving import acquire, insert


class Scene:
    """A cache with everything in it: a split edge, an idle branch, two leases, private blocks.

    root ──[1 2 3 4]──► upper (standing: lease) ──[5 6]──► lower (idle)
                                                └─[7 8]──► leaf (standing: branch)
    """

    def __init__(self) -> None:
        config = CacheConfig(num_blocks=16, block_size=2)
        self.cache = RadixCache(config, clock=lambda: 0.0)
        insert(self.cache, range(1, 7))
        self.lease: Lease = acquire(self.cache, [1, 2, 3, 4, 7, 8, 9])
        self.branch: Lease = acquire(self.cache, [1, 2, 3, 4, 7, 8, 9])
        self.cache.commit(self.branch, 6)
        insert(self.cache, range(50, 54), Namespace(salt="other"))
        self.cache.check()
        self.root: Node = self.cache.tree.roots[self.lease.namespace]
        (self.upper,) = self.root.children.values()
        self.lower, self.leaf = self.upper.children.values()
        self.pool, self.pins, self.tree = self.cache.pool, self.cache.pins, self.cache.tree


class KeptScene(Scene):
    """The same with quotas, a hold on `upper`, and a running sequence that is worth something.

    other and wide own more than their shares, guarded owns less; worth has pinned blocks only.
    """

    def __init__(self) -> None:
        super().__init__()
        cache, self.accounts, self.deadlines = self.cache, self.cache.accounts, self.cache.deadlines
        for name, quota in (("other", 1), ("wide", 0), ("guarded", 4)):
            cache.set_quota(Namespace(salt=name), Quota(soft_limit=quota, hard_limit=9))
        insert(cache, range(60, 64), Namespace(salt="wide"))
        insert(cache, range(70, 74), Namespace(salt="guarded"))
        self.hold = cache.retain(PrefixKey.of([1, 2, 3, 4]), 5.0)
        key = PrefixKey.of([80, 81], Namespace(salt="worth"))
        worth = cache.acquire(key, retentions=[Retention(priority=1, duration_s=9.0)])
        cache.commit(worth, 2)
        cache.check()
        assert self.account("worth").num_owned == self.account("worth").num_pinned == 1

    def account(self, name: str) -> Account:
        return self.accounts.by_namespace[Namespace(salt=name)]


def count_more(scene: KeptScene, name: str, count: str) -> None:
    account = scene.account(name)
    setattr(account, count, getattr(account, count) + 1)


def move_a_leaf_to_the_common_index(scene: KeptScene) -> None:
    leaf = next(iter(scene.account("guarded").index))
    scene.account("guarded").index.remove(leaf)
    scene.accounts.index.add(leaf)


def keep_those_over_under_an_old_rank(scene: KeptScene) -> None:
    rank, node_id, account = scene.accounts._over.pop()
    scene.accounts._over.add((rank - 100, node_id, account))


def let_an_ended_hold_end_again(scene: KeptScene) -> None:
    scene.cache.end_hold(scene.hold)
    scene.deadlines._set(("hold", scene.hold.hold_id), scene.hold, 5.0)


def forget_the_end_of_a_priority(scene: KeptScene) -> None:
    (key,) = [key for key in scene.deadlines._due if key[0] == "node"]
    scene.deadlines.order.remove(scene.deadlines._due.pop(key))


def put_an_end_off_in_one_place_only(scene: KeptScene) -> None:
    key, (until, _, what) = next(iter(scene.deadlines._due.items()))
    scene.deadlines._due[key] = (until + 1, key, what)


def rank_anew_behind_the_index(scene: Scene) -> None:
    scene.lower.last_access += 100


def swap_two_entries_of_the_index(scene: Scene) -> None:
    index = scene.cache.accounts.index
    (rank, one, first), (later, two, second) = list(index._order)
    index._order.clear()
    first.entry, second.entry = (later, two, first), (rank, one, second)
    index._order.update([first.entry, second.entry])


def lengthen_an_edge(scene: Scene, num_bytes: int) -> None:
    scene.lower.edge += bytes(num_bytes)


def exchange_two_blocks(scene: Scene) -> None:
    ids = scene.upper.block_ids
    ids[0], ids[1] = ids[1], ids[0]


def write_another_token_on_an_edge(scene: Scene) -> None:
    scene.upper.edge = scene.upper.edge[:-4] + pack_tokens([99])


def file_a_child_under_another_first_block(scene: Scene) -> None:
    children = scene.upper.children
    children[pack_tokens([98, 99])] = children.pop(pack_tokens([5, 6]))


def move_a_lease_to_the_sibling(scene: Scene) -> None:
    scene.branch.node = scene.lower
    scene.pins.lock(scene.lower)
    scene.pins.unlock(scene.leaf)


def forget_the_root(scene: Scene) -> None:
    scene.tree.roots.clear()


BREAKAGES: dict[str, tuple[str, Callable[[Scene], object]]] = {
    "the free list has a block twice": (
        "I1",
        lambda s: s.pool._free.append(s.pool._free[0]),
    ),
    "the free list lacks a block": ("I1", lambda s: s.pool._free.pop()),
    "a free block has an owner counted": (
        "I3",
        lambda s: s.pool._refs.__setitem__(s.pool._free[0], 1),
    ),
    "a cached block has an owner too many": ("I3", lambda s: s.pool.share(s.lower.block_ids)),
    "a cached block is freed": ("I3", lambda s: s.pool.release(s.lower.block_ids)),
    "a private block has no owner": (
        "I3",
        lambda s: s.pool._refs.__setitem__(s.lease.block_table[-1], 0),
    ),
    "two edges name one block": (
        "I3",
        lambda s: s.lower.block_ids.__setitem__(0, s.upper.block_ids[0]),
    ),
    "a pin is negative": ("I2", lambda s: setattr(s.lower, "lock_ref", -1)),
    "a pin is missing": ("I2", lambda s: setattr(s.upper, "lock_ref", 1)),
    "a pin is left over": ("I2", lambda s: setattr(s.leaf, "lock_ref", 2)),
    "a lease ends on a node that is not in the tree": (
        "I2",
        lambda s: setattr(
            s.lease,
            "node",
            Node(
                99,
                namespace=s.lease.namespace,
                parent=None,
                edge=b"",
                block_ids=array("i"),
                start=0,
            ),
        ),
    ),
    "a whole tree is forgotten": ("I1|I2|I3", forget_the_root),
    "an edge has more tokens than blocks": ("I4", lambda s: lengthen_an_edge(s, 8)),
    "an edge ends inside a block": ("I4", lambda s: lengthen_an_edge(s, 4)),
    "a child is found under another block than its first": (
        "I4",
        file_a_child_under_another_first_block,
    ),
    "a child names another parent": ("I4", lambda s: setattr(s.lower, "parent", s.root)),
    "a child is in another namespace than its parent": (
        "I4",
        lambda s: setattr(s.lower, "namespace", Namespace(salt="other")),
    ),
    "a root is filed under another namespace": (
        "I4",
        lambda s: s.tree.roots.__setitem__(
            Namespace(salt="third"), s.tree.roots.pop(Namespace(salt="other"))
        ),
    ),
    "a root that nobody needs is kept": (
        "I4",
        lambda s: s.tree.root(Namespace(salt="unused")),
    ),
    "an idle leaf is not in the index": ("I5", lambda s: s.cache.accounts.index.remove(s.lower)),
    "a pinned leaf is in the index": ("I5", lambda s: s.cache.accounts.index.add(s.leaf)),
    "an inner node is in the index in place of a leaf": (
        "I5",
        lambda s: (s.cache.accounts.index.remove(s.lower), s.cache.accounts.index.add(s.upper)),
    ),
    "a leaf is in the index under an old rank": ("I5", rank_anew_behind_the_index),
    "the index mixes up two leaves": ("I5", swap_two_entries_of_the_index),
    "a block table and its path name different blocks": ("I7", exchange_two_blocks),
    "a path has other tokens than its lease": ("I7", write_another_token_on_an_edge),
    "a lease stands on a sibling": ("I7", move_a_lease_to_the_sibling),
    "a lease has committed more than its path": (
        "I1|I3|I7",
        lambda s: setattr(s.lease, "num_committed", 6),
    ),
    "a block table is longer than its tokens": (
        "I4",
        lambda s: s.lease.tokens.__delitem__(slice(-8, None)),
    ),
    "a lease and its node are in different namespaces": (
        "I4",
        lambda s: setattr(s.lease, "namespace", Namespace(salt="other")),
    ),
    "evictable blocks are counted wrong": ("I8", lambda s: setattr(s.pins, "num_evictable", 99)),
    "pinned blocks are counted wrong": ("I8", lambda s: s.pins.extended(s.leaf, 1)),
    "nodes are counted wrong": ("I8", lambda s: setattr(s.tree, "num_nodes", 3)),
}

KEPT_BREAKAGES: dict[str, tuple[str, Callable[[KeptScene], object]]] = {
    "what a namespace owns is counted wrong": (
        "I11",
        lambda s: count_more(s, "worth", "num_owned"),
    ),
    "what a namespace with a quota owns is counted wrong": (
        "I11",
        lambda s: count_more(s, "wide", "num_owned"),
    ),
    "a namespace's pinned blocks are counted wrong": (
        "I11",
        lambda s: count_more(s, "worth", "num_pinned"),
    ),
    "a namespace's evictable blocks are counted wrong": (
        "I11",
        lambda s: count_more(s, "other", "num_evictable"),
    ),
    "a leaf is in the index of another namespace": ("I5", move_a_leaf_to_the_common_index),
    "a namespace has no account": (
        "I11",
        lambda s: s.accounts.by_namespace.pop(Namespace(salt="worth")),
    ),
    "an account that nobody needs is kept": (
        "I11",
        lambda s: s.accounts.open(Namespace(salt="gone")),
    ),
    "guarded blocks are counted wrong": (
        "I11",
        lambda s: setattr(s.accounts, "_num_guarded", 1),
    ),
    "one that is over its share is not in their order": ("I11", lambda s: s.accounts._over.pop()),
    "one that is over its share stands under an old rank": (
        "I11",
        keep_those_over_under_an_old_rank,
    ),
    "a hold has ended, but is kept": ("I2", lambda s: setattr(s.hold, "has_ended", True)),
    "a hold is forgotten, but not its pin": ("I2", lambda s: s.deadlines.end(s.hold)),
    "a hold ends elsewhere than its node": ("I2", lambda s: setattr(s.hold, "num_tokens", 2)),
    "a hold that has ended is still to end": ("I8", let_an_ended_hold_end_again),
    "a priority with a time never ends": ("I8", forget_the_end_of_a_priority),
    "priorities are counted wrong": ("I8", lambda s: setattr(s.deadlines, "num_retained", 2)),
    "the order of ends is not that of their times": ("I8", put_an_end_off_in_one_place_only),
    "an end is in the order that nobody knows of": (
        "I8",
        lambda s: s.deadlines.order.add((1.0, ("hold", 99), s.hold)),
    ),
}

ALL_BREAKAGES = {
    **{name: (Scene, *breakage) for name, breakage in BREAKAGES.items()},
    **{name: (KeptScene, *breakage) for name, breakage in KEPT_BREAKAGES.items()},
}


@pytest.mark.parametrize(
    ("scene_type", "invariant", "damage"), ALL_BREAKAGES.values(), ids=ALL_BREAKAGES
)
def test_check_finds_that(scene_type, invariant, damage):
    scene = scene_type()
    damage(scene)
    with pytest.raises(InvariantViolation, match=rf"^({invariant}): "):
        scene.cache.check()


def test_check_finds_that_a_namespace_with_an_idle_leaf_has_no_account():
    scene = Scene()
    del scene.cache.accounts.by_namespace[Namespace(salt="other")]
    with pytest.raises(InvariantViolation, match=r"^I11: "):
        scene.cache.check()


def test_check_finds_that_the_leaves_of_a_namespace_without_quota_stand_apart():
    scene = KeptScene()
    scene.account("wide").quota = None  # its share was 0, so nothing else is wrong
    scene.accounts._over.discard(scene.account("wide").first)
    with pytest.raises(InvariantViolation, match=r"^I(5|11): "):
        scene.cache.check()


def test_check_finds_nothing_wrong_in_a_sound_cache():
    scene = Scene()
    for lease in (scene.lease, scene.branch):
        scene.cache.release(lease)
        scene.cache.check()
    scene.cache.evict(16)
    scene.cache.check()
    KeptScene().cache.check()


def test_check_changes_nothing():
    scene = Scene()
    before = (scene.cache.stats(), scene.cache.view(), scene.pool.free_ids())
    scene.cache.check()
    assert (scene.cache.stats(), scene.cache.view(), scene.pool.free_ids()) == before
    assert scene.cache.match(PrefixKey.of(list(range(1, 7)))).num_tokens == 6
