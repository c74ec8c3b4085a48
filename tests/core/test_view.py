"""The view: the tree as records and as text."""

from __future__ import annotations

import msgspec

from radixcache import Namespace, TreeView, pack_tokens, render_text, unpack_tokens
from tests.core.serving import acquire, insert


def test_an_empty_tree_is_no_nodes_and_no_text(cache):
    assert cache.view() == TreeView(block_size=1, nodes=())
    assert render_text(cache.view()) == ""


def test_a_view_tells_where_each_node_hangs_and_what_it_holds(make_cache):
    cache = make_cache(block_size=2)
    first = insert(cache, [1, 2, 3, 4, 5, 6])
    lease = acquire(cache, [1, 2, 7, 8, 9])
    cache.commit(lease, 4)
    upper, lower, leaf = cache.view().nodes
    assert [unpack_tokens(node.tokens) for node in (upper, lower, leaf)] == [
        [1, 2],
        [3, 4, 5, 6],
        [7, 8],
    ]
    assert (upper.parent, lower.parent, leaf.parent) == (None, upper.node_id, upper.node_id)
    assert (upper.depth, lower.depth, leaf.depth) == (0, 1, 1)
    assert upper.block_ids + lower.block_ids == first.block_ids[:3]
    assert leaf.block_ids == (lease.block_table[1],)
    assert (upper.lock_ref, lower.lock_ref, leaf.lock_ref) == (1, 0, 1)
    assert (upper.evict_order, lower.evict_order, leaf.evict_order) == (None, 0, None)


def test_a_node_is_as_recent_as_the_latest_below_it(cache):
    insert(cache, [1])
    insert(cache, [1, 2])
    insert(cache, [1, 3])
    top, older, newer = cache.view().nodes
    assert older.last_access < newer.last_access == top.last_access


def test_the_places_in_the_order_of_eviction_are_those_in_which_leaves_go(cache):
    for prompt in ([1], [2], [3, 4], [3, 5]):
        insert(cache, prompt)
    order = {unpack_tokens(n.tokens)[0]: n.evict_order for n in cache.view().nodes}
    assert order == {1: 0, 2: 1, 3: None, 4: 2, 5: 3}


def test_a_view_is_a_copy_that_later_calls_do_not_change(cache):
    insert(cache, [1, 2, 3])
    view = cache.view()
    before = msgspec.json.encode(view)
    insert(cache, [1, 9])
    cache.evict(16)
    assert msgspec.json.encode(view) == before


def test_a_view_survives_the_trip_through_json(cache):
    insert(cache, [1, 2, 3], Namespace(salt="s"))
    insert(cache, [1, 4])
    view = cache.view()
    assert msgspec.json.decode(msgspec.json.encode(view), type=TreeView) == view


def test_the_text_shows_a_line_for_each_node_indented_by_depth(make_cache):
    cache = make_cache(block_size=2)
    insert(cache, [1, 2, 3, 4])
    acquire(cache, [1, 2, 9])
    assert render_text(cache.view()).splitlines() == [
        "1 2  · 2 tokens in 1 block · pinned by 1",
        "   3 4  · 2 tokens in 1 block · evictable, goes 1.",
    ]


def test_the_text_is_cut_to_the_width_and_kept_on_one_line(cache):
    insert(cache, range(10, 22))
    (line,) = render_text(cache.view(), width=12).splitlines()
    assert line == "10 11 12 13…  · 12 tokens in 12 blocks · evictable, goes 1."
    letters = render_text(cache.view(), decode=lambda ids: "a\nb" * len(ids), width=5)
    assert letters.startswith("a⏎ba…  · 12 tokens")


def test_a_decoder_is_given_the_whole_edge(cache):
    insert(cache, [104, 105])
    assert render_text(cache.view(), decode=lambda ids: bytes(ids).decode()).startswith("hi  · ")
    assert cache.view().nodes[0].tokens == pack_tokens([104, 105])
