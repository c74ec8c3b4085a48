"""Explanations: the token where a prompt leaves the cache, the cause, and that asking is free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec
import pytest

from radixcache import (
    CacheConfig,
    Namespace,
    PrefixKey,
    RadixCache,
)
from radixcache.explain import Cause, Explanation, cached_beyond
from radixcache.ghosts import Evicted
from tests.core.serving import acquire, insert

PLAIN = Namespace()
SECRET = "hunter2"


def explain(
    cache: RadixCache,
    token_ids: Iterable[int],
    namespace: Namespace = PLAIN,
    among: Iterable[Namespace] | None = None,
) -> Explanation:
    """Ask a cache; everything here asks by this one function."""
    return cache.explain(PrefixKey.of(list(token_ids), namespace), among=among)


def haunted(num_blocks: int = 16, block_size: int = 1) -> RadixCache:
    """A cache that remembers everything that it evicts."""
    return RadixCache(CacheConfig(num_blocks=num_blocks, block_size=block_size, max_ghosts=1000))


@pytest.fixture
def make_haunted(make_cache: Callable[..., RadixCache]) -> Callable[..., RadixCache]:
    """`make_cache`, of caches that remember everything that they evict."""
    return partial(make_cache, max_ghosts=1000)


def test_what_is_cached_but_for_the_last_token_is_a_hit(make_cache):
    cache = make_cache(block_size=4)
    insert(cache, range(8))
    for prompt in (range(8), [*range(7), 99], [*range(8), 99], range(3)):
        why = explain(cache, prompt)
        assert (why.cause, why.num_cached) == (Cause.HIT, len(prompt) - 1)
        assert (why.first_missing, why.token, why.cached_token) == (None, None, None)


def test_an_empty_prompt_is_a_hit_of_nothing(cache):
    insert(cache, [1, 2])
    why = explain(cache, [])
    assert (why.cause, why.num_tokens, why.num_cached, why.node_id) == (Cause.HIT, 0, 0, None)
    assert why.describe() == "The prompt is empty: nothing is missing."


def test_a_prompt_of_one_token_is_never_short_of_anything(cache):
    assert explain(cache, [7]).cause is Cause.HIT


def test_a_cache_that_is_off_explains_everything_by_that(make_cache):
    cache = make_cache(enable_prefix_cache=False)
    insert(cache, [1, 2, 3])
    why = explain(cache, [1, 2, 3])
    assert (why.cause, why.num_cached, why.first_missing, why.token) == (Cause.DISABLED, 0, 0, 1)
    assert explain(cache, []).cause is Cause.DISABLED


def test_off_goes_before_a_raised_epoch(make_cache):
    cache = make_cache(enable_prefix_cache=False)
    cache.raise_epoch(PLAIN)
    assert explain(cache, [1, 2]).cause is Cause.DISABLED


def test_of_a_raised_epoch_nothing_can_be_reached(cache):
    insert(cache, [1, 2, 3])
    cache.raise_epoch(PLAIN)
    why = explain(cache, [1, 2, 3])
    assert (why.cause, why.num_cached, why.node_id) == (Cause.EPOCH, 0, None)
    assert (why.other, why.num_elsewhere) == ((), 0)
    assert "raise_epoch" in why.describe()
    assert explain(cache, []).cause is Cause.EPOCH


def test_what_only_an_older_epoch_has_is_missing_for_the_epoch(cache):
    insert(cache, [1, 2, 3, 4])
    current = cache.raise_epoch(PLAIN)
    insert(cache, [1, 2], current)
    why = explain(cache, [1, 2, 3, 4, 5], current)
    assert (why.cause, why.num_cached, why.token) == (Cause.EPOCH, 2, 3)
    assert (why.other, why.num_elsewhere) == (("epoch",), 4)


def test_an_older_epoch_goes_before_another_namespace_that_has_more(cache):
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3, 4], Namespace(salt="b"))
    current = cache.raise_epoch(PLAIN)
    why = explain(cache, [1, 2, 3, 4, 5], current)
    assert (why.cause, why.num_elsewhere) == (Cause.EPOCH, 2)


def test_a_later_epoch_that_nobody_was_raised_to_is_another_namespace(cache):
    insert(cache, [1, 2, 3], Namespace(epoch=1))
    why = explain(cache, [1, 2, 3])
    assert (why.cause, why.other) == (Cause.OTHER_NAMESPACE, ("epoch",))


def test_what_was_evicted_is_remembered_with_its_time(make_haunted):
    cache = make_haunted(block_size=2)
    insert(cache, range(8))
    cache.evict(2)
    why = explain(cache, [*range(8), 9])
    assert (why.cause, why.num_cached, why.num_cached_blocks) == (Cause.EVICTED, 4, 2)
    assert (why.first_missing, why.token, why.cached_token) == (4, 4, None)
    assert why.evicted == Evicted(2, 0)
    assert "2 blocks" in why.describe()


def test_evicted_goes_before_an_older_epoch_another_namespace_and_another_token(make_haunted):
    cache = make_haunted(num_blocks=64)
    prompt = [1, 2, 3, 4, 5]
    insert(cache, prompt)
    insert(cache, prompt, Namespace(salt="b"))
    current = cache.raise_epoch(PLAIN)
    insert(cache, prompt, current)
    held = acquire(cache, [1, 2, 9, 9], current)
    cache.commit(held, 4)
    cache.drop(current)  # all but what `held` stands on
    why = explain(cache, prompt, current)
    assert (why.cause, why.num_cached, why.token, why.cached_token) == (Cause.EVICTED, 2, 3, 9)
    assert (why.other, why.num_elsewhere) == ((), 0)


def test_evicted_means_the_very_next_block(make_haunted):
    cache = make_haunted(block_size=2)
    insert(cache, range(8))
    cache.evict(2)
    why = explain(cache, [0, 1, 2, 3, 4, 9, 6, 7])  # parts inside the evicted block
    assert (why.cause, why.evicted) == (Cause.NEVER_SEEN, Evicted(0, None))


def test_another_namespace_is_told_by_the_fields_that_differ(cache):
    insert(cache, [1, 2, 3, 4], Namespace(model="m", salt=SECRET))
    insert(cache, [1, 2])
    why = explain(cache, [1, 2, 3, 4])
    assert (why.cause, why.num_cached) == (Cause.OTHER_NAMESPACE, 2)
    assert (why.other, why.num_elsewhere) == (("model", "salt"), 3)


def test_of_other_namespaces_the_one_with_most_counts_then_the_one_that_differs_least(cache):
    insert(cache, [1, 2, 3], Namespace(model="m", adapter="a"))
    insert(cache, [1, 2, 3], Namespace(salt="s"))
    insert(cache, [1, 2, 3], Namespace(adapter="a", salt="s"))
    assert explain(cache, [1, 2, 3, 4]).other == ("salt",)
    insert(cache, [1, 2, 3, 4], Namespace(model="m", adapter="a"))
    assert explain(cache, [1, 2, 3, 4, 5]).other == ("model", "adapter")


def test_a_namespace_that_has_no_more_explains_nothing(cache):
    insert(cache, [1, 2, 3], Namespace(salt="s"))
    insert(cache, [1, 2, 3])
    assert explain(cache, [1, 2, 3, 4, 5]).other == ()


def test_another_namespace_goes_before_another_token_and_a_short_rest(make_cache):
    cache = make_cache(block_size=4)
    insert(cache, [*range(4), 90, 91, 92, 93])
    insert(cache, range(8), Namespace(salt="s"))
    why = explain(cache, range(9))
    assert (why.cause, why.num_cached, why.num_elsewhere) == (Cause.OTHER_NAMESPACE, 4, 8)
    assert (why.token, why.cached_token) == (4, 90)


def test_only_the_namespaces_that_may_be_spoken_of_are_looked_into(cache):
    own, theirs, older = Namespace(salt="b"), Namespace(salt="a"), Namespace(salt="b", epoch=0)
    insert(cache, [1, 2, 3, 4], theirs)
    insert(cache, [1, 2], older)
    current = cache.raise_epoch(own)
    allowed = (space for space in [current, older, Namespace(model="none")])  # used up once
    assert explain(cache, [1, 2, 3], current, among=allowed).cause is Cause.EPOCH
    why = explain(cache, [1, 2, 3], current, among=[])
    assert (why.cause, why.other, why.num_elsewhere) == (Cause.NEVER_SEEN, (), 0)
    assert explain(cache, [1, 2, 3, 4], current, among=[theirs]).cause is Cause.OTHER_NAMESPACE


def test_what_nobody_may_be_told_of_leaves_no_trace_in_an_explanation():
    asked = []
    for others in ([], [[1, 2, 3, 4, 5]], [[1, 2], [1, 9]]):
        cache = RadixCache(CacheConfig(num_blocks=16, block_size=1))
        insert(cache, [1, 2, 8])
        for prompt in others:
            insert(cache, prompt, Namespace(salt=SECRET))
        asked.append(explain(cache, [1, 2, 3, 4, 5], among=[PLAIN]))
        cache.check()
    assert asked[0] == asked[1] == asked[2]


def test_a_prompt_diverges_at_a_token_inside_a_block(make_cache):
    cache = make_cache(block_size=4)
    insert(cache, range(8))
    why = explain(cache, [*range(6), 99, 98, 97])
    assert (why.cause, why.num_cached, why.num_cached_blocks) == (Cause.DIVERGED, 6, 1)
    assert (why.first_missing, why.token, why.cached_token) == (6, 99, 6)
    assert why.node_id == cache.view().nodes[0].node_id


def test_a_prompt_diverges_at_the_edge_of_a_block_inside_an_edge(make_cache):
    cache = make_cache(block_size=4)
    insert(cache, range(8))
    why = explain(cache, [*range(4), 99, 98, 97, 96])
    assert (why.cause, why.num_cached, why.token, why.cached_token) == (Cause.DIVERGED, 4, 99, 4)


@pytest.mark.parametrize("block_size", [1, 2])
def test_a_prompt_diverges_behind_a_node_from_its_children(make_cache, block_size):
    cache = make_cache(num_blocks=64, block_size=block_size)
    for first in range(10, 30):  # more than are looked through one by one
        insert(cache, [1, 2, first, 0])
    top = cache.view().nodes[0]
    why = explain(cache, [1, 2, 99, 0])
    assert (why.cause, why.num_cached, why.token) == (Cause.DIVERGED, 2, 99)
    assert (why.cached_token, why.node_id) == (29, top.node_id)
    near = explain(cache, [1, 2, 15, 9, 9])
    assert (near.num_cached, near.token, near.cached_token) == (3, 9, 0)
    assert near.node_id in {node.node_id for node in cache.view().nodes[1:]}


def test_a_divergence_goes_before_a_short_rest(make_cache):
    cache = make_cache(block_size=4)
    insert(cache, range(8))
    assert explain(cache, [*range(4), 99, 98]).cause is Cause.DIVERGED
    assert explain(cache, [*range(5), 99, 98]).cause is Cause.DIVERGED


def test_a_prompt_that_agrees_in_no_token_has_not_diverged(make_cache):
    cache = make_cache(block_size=2)
    insert(cache, [1, 2, 3, 4])
    why = explain(cache, [9, 2, 3, 4])
    assert (why.cause, why.num_cached) == (Cause.NEVER_SEEN, 0)
    assert (why.token, why.cached_token, why.node_id) == (9, None, None)


def test_a_rest_that_fills_no_block_is_short(make_cache):
    cache = make_cache(block_size=4)
    insert(cache, range(7))
    why = explain(cache, range(7))
    assert (why.cause, why.num_cached) == (Cause.SHORT, 4)
    assert (why.first_missing, why.token, why.cached_token) == (4, 4, None)
    assert why.node_id == cache.view().nodes[0].node_id
    assert "last 3 tokens" in why.describe()


def test_a_prompt_shorter_than_a_block_is_short_even_in_an_empty_cache(make_cache):
    cache = make_cache(block_size=4)
    assert explain(cache, range(3)).cause is Cause.SHORT
    assert explain(cache, range(4)).cause is Cause.NEVER_SEEN


def test_blocks_of_one_token_leave_no_rest_that_is_short(cache):
    insert(cache, [1, 2])
    assert explain(cache, [1, 2, 3, 4]).cause is Cause.NEVER_SEEN
    assert explain(cache, [3, 4]).cause is Cause.NEVER_SEEN


def test_what_goes_on_where_the_cache_ends_was_never_seen(make_haunted):
    cache = make_haunted(block_size=2)
    insert(cache, [1, 2])
    why = explain(cache, [1, 2, 3, 4])
    assert (why.cause, why.num_cached, why.evicted) == (Cause.NEVER_SEEN, 2, Evicted(0, None))
    assert (why.first_missing, why.token, why.cached_token) == (2, 3, None)


def test_without_a_memory_never_seen_may_have_been_evicted(cache, make_haunted):
    without = explain(cache, [1, 2, 3])
    assert without.cause is Cause.NEVER_SEEN
    assert without.evicted is None
    assert "or was evicted" in without.describe()
    assert "evicted" not in explain(make_haunted(), [1, 2, 3]).describe()


def test_a_description_names_both_tokens_and_with_a_decoder_their_text(cache):
    insert(cache, [104, 105])
    why = explain(cache, [104, 106, 107])
    node = why.node_id
    assert why.describe() == (
        f"1 of 3 tokens cached; at index 1 the prompt has token 106, the cache 105 (node {node}). "
        "Prompts share what stands before their first difference: put what changes behind what "
        "does not."
    )
    text = why.describe(lambda ids: bytes(ids).decode())
    assert f"the prompt has token 106 ('j'), the cache 105 ('i') (node {node})." in text


def test_token_zero_is_a_token(cache):
    insert(cache, [5, 0])
    why = explain(cache, [5, 6, 7])
    assert (why.cause, why.cached_token) == (Cause.DIVERGED, 0)
    assert "the cache 0" in why.describe()
    insert(cache, [5, 6])
    assert explain(cache, [5, 6, 0, 0]).token == 0


def of_every_cause() -> Iterator[tuple[Cause, Explanation]]:
    """One explanation for each cause, all in namespaces with a secret salt."""
    own, theirs = Namespace(model="m", salt=SECRET), Namespace(model="m", salt=f"{SECRET}!")
    cache = haunted(num_blocks=64, block_size=2)
    insert(cache, [1, 2, 3, 4, 5, 6], own)
    insert(cache, [7, 7, 7, 7, 7, 7], theirs)
    cache.evict(1)
    yield Cause.HIT, explain(cache, [1, 2, 3, 4, 9], own)
    yield Cause.EVICTED, explain(cache, [1, 2, 3, 4, 5, 6], own)
    yield Cause.OTHER_NAMESPACE, explain(cache, [7, 7, 7, 7], own)
    yield Cause.DIVERGED, explain(cache, [1, 2, 9, 9], own)
    yield Cause.NEVER_SEEN, explain(cache, [9, 9, 9], own)
    off = RadixCache(CacheConfig(num_blocks=4, enable_prefix_cache=False))
    yield Cause.DISABLED, explain(off, [1, 2], own)
    yield Cause.SHORT, explain(RadixCache(CacheConfig(num_blocks=4)), [1, 2], own)
    current = cache.raise_epoch(own)
    yield Cause.EPOCH, explain(cache, [1, 2, 3], own)
    yield Cause.EPOCH, explain(cache, [1, 2, 3], current)
    cache.check()


def test_every_cause_is_described_in_at_most_two_sentences_without_a_secret():
    seen = set()
    for cause, why in of_every_cause():
        assert why.cause is cause
        seen.add(cause)
        for text in (why.describe(), why.describe(str), repr(why)):
            assert SECRET not in text
        text = why.describe()
        assert 1 <= text.count(". ") + text.endswith(".") <= 2
        assert text.startswith(f"{why.num_cached} of {why.num_tokens} tokens cached")
        assert "None" not in text
    assert seen == set(Cause)


def test_an_explanation_survives_the_trip_through_json():
    for _, why in of_every_cause():
        assert msgspec.json.decode(msgspec.json.encode(why), type=Explanation) == why


def test_what_the_cache_has_instead_is_read_on_behind_the_divergence(make_cache):
    cache = make_cache(block_size=2)
    insert(cache, range(8))
    insert(cache, [*range(8), 20, 21, 22, 23])
    for prompt in ([0, 1, 2, 9, 9], [0, 1, 2, 3, 9, 9], [9, 9], [*range(8), 9, 9]):
        key = PrefixKey.of(prompt)
        beyond = cached_beyond(key, tree=cache.tree, limit=5)
        why = cache.explain(key)
        assert beyond[:1] == ([] if why.cached_token is None else [why.cached_token])
        assert beyond == [*range(8), 20, 21, 22, 23][why.num_cached :][:5] if beyond else True
    assert cached_beyond(PrefixKey.of([0, 1, 2, 9]), tree=cache.tree, limit=0) == []
    other = PrefixKey.of([0, 1, 2, 9], Namespace(salt="b"))
    assert cached_beyond(other, tree=cache.tree, limit=5) == []
