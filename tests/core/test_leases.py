"""Leases: fork and release, whose lease is whose, and the life of a request."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from radixcache import InvalidLease, OutOfBlocks, PrefixKey, RadixCache, pack_tokens
from tests.core.serving import acquire, insert, match


def test_a_fork_takes_no_block_and_shares_them_all(make_cache):
    cache = make_cache(block_size=2)
    insert(cache, [1, 2, 3, 4])
    lease = acquire(cache, [1, 2, 3, 4, 5])
    before = cache.stats()
    branch = cache.fork(lease)
    after = cache.stats()
    assert after.num_free == before.num_free
    assert after.num_leases == 2
    assert branch.block_table == lease.block_table
    assert branch.tokens == lease.tokens
    assert (branch.num_cached, branch.num_committed) == (lease.num_cached, lease.num_committed)
    assert branch.lease_id != lease.lease_id


def test_a_branch_does_not_change_when_the_other_does(cache):
    lease = acquire(cache, [1, 2])
    branch = cache.fork(lease)
    cache.append(lease, pack_tokens([3]))
    assert (branch.num_tokens, len(branch.block_table)) == (2, 2)


def test_shared_blocks_come_free_with_the_last_branch(cache):
    leases = [acquire(cache, [1, 2, 3])]
    leases += [cache.fork(leases[0]) for _ in range(3)]
    for lease in leases[:-1]:
        cache.release(lease)
        assert cache.stats().num_free == 13
    cache.release(leases[-1])
    assert cache.stats().num_free == 16


def test_finishing_without_publishing_leaves_nothing(cache):
    lease = acquire(cache, [1, 2, 3])
    cache.release(lease)
    assert cache.stats().num_free == 16
    assert match(cache, [1, 2, 3]).num_tokens == 0
    assert cache.tree.roots == {}


def test_the_next_turn_finds_prompt_and_output_of_the_one_before(make_cache):
    cache = make_cache(num_blocks=64, block_size=4)
    lease = acquire(cache, range(12))
    cache.commit(lease, 12)
    cache.append(lease, pack_tokens(range(12, 16)))
    cache.commit(lease, 16)
    cache.release(lease)
    assert acquire(cache, range(24)).num_cached == 16


def test_a_second_turn_of_200_tokens_has_the_150_of_the_first_cached(make_cache):
    cache = make_cache(num_blocks=512)
    lease = acquire(cache, range(100))
    cache.commit(lease, 100)
    for token in range(100, 150):
        cache.append(lease, pack_tokens([token]))
        cache.commit(lease, lease.num_tokens)
    cache.release(lease)
    assert acquire(cache, range(200)).num_cached == 150


USES = {
    "append": lambda cache, lease: cache.append(lease, pack_tokens([1])),
    "commit": lambda cache, lease: cache.commit(lease, 1),
    "truncate": lambda cache, lease: cache.truncate(lease, 1),
    "fork": lambda cache, lease: cache.fork(lease),
    "release": lambda cache, lease: cache.release(lease),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_released_lease_is_refused_and_nothing_changes(cache, use):
    lease, other = acquire(cache, [1, 2]), acquire(cache, [1, 2])
    cache.release(lease)
    before = (cache.stats(), cache.view())
    with pytest.raises(InvalidLease, match="is released, or belongs to another cache"):
        use(cache, lease)
    assert (cache.stats(), cache.view()) == before
    cache.release(other)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_lease_of_another_cache_is_refused_and_nothing_changes(make_cache, use):
    ours, theirs = make_cache(), make_cache()
    acquire(ours, [1, 2])  # the same id as the foreign one
    foreign = acquire(theirs, [1, 2])
    before = ours.stats()
    with pytest.raises(InvalidLease):
        use(ours, foreign)
    assert ours.stats() == before
    assert foreign.num_tokens == 2


def test_a_lease_says_what_it_is_when_shown(cache):
    assert repr(acquire(cache, [1, 2])) == "Lease(1, 2 tokens, 0 cached, 0 committed)"


def random_step(cache: RadixCache, leases: list, rng: random.Random) -> str:
    """One random call of a runtime on prompts that share; returns its name."""
    block_size = cache.config.block_size
    verb = rng.choice(["acquire", "decode", "commit", "fork", "abort", "finish", "retract"])
    lease = rng.choice(leases) if leases else None
    if verb == "acquire" or lease is None:
        ids = [rng.randrange(2)] * rng.randrange(3 * block_size) + [7] * rng.randrange(block_size)
        leases.append(cache.acquire(PrefixKey.of(ids)))
    elif verb == "decode":
        cache.append(lease, pack_tokens([rng.randrange(2)] * rng.choice([1, block_size])))
    elif verb == "commit":
        cache.commit(lease, rng.randint(0, lease.num_tokens))
    elif verb == "fork":
        leases.append(cache.fork(lease))
    elif verb == "retract":
        cache.truncate(lease, rng.randint(lease.num_committed, lease.num_tokens))
    else:
        if verb == "finish":
            cache.commit(lease, lease.num_tokens)
        leases.remove(lease)
        cache.release(lease)
    return verb


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_at_idle_the_balance_holds_after_any_mix_of_ends(make_cache, block_size):
    cache, rng = make_cache(num_blocks=24, block_size=block_size), random.Random(block_size)
    leases: list = []
    done: Counter[str] = Counter()
    for _ in range(400):
        try:
            done[random_step(cache, leases, rng)] += 1
        except OutOfBlocks:
            done["refused"] += 1
            victim = leases.pop(0)
            cache.release(victim)
        stats = cache.stats()
        assert stats.num_free + stats.num_private + stats.num_pinned + stats.num_evictable == 24
    assert len(done) == 8, f"each verb was tried, and some were refused: {done}"
    cache.check()
    for lease in leases:
        cache.release(lease)
    stats = cache.stats()
    assert (stats.num_private, stats.num_pinned, stats.num_leases) == (0, 0, 0)
    assert cache.evict(24) == stats.num_evictable
    assert cache.stats().num_free == 24
