"""Bugs to plant in holds, priorities and quotas; see planted.py.

Owns: the list.  Does not know: who catches them; the machine of test_state_machine_keeping.py does.
"""

from __future__ import annotations

from radixcache.accounts import Accounts
from radixcache.cache import RadixCache
from radixcache.deadlines import Deadlines
from radixcache.eviction import EvictionIndex
from radixcache.keeping import Keeper
from radixcache.pins import Pins
from radixcache.policy import Priority
from radixcache.publishing import Publisher
from radixcache.room import Room
from tests.support.planted import PlantedBug

KEEPING_BUGS = (
    PlantedBug(
        "a hold pins nothing",
        (Keeper, "hold"),
        edit=("self._room.pins.lock(hold.node)", "hold.node.lock_ref += 0"),
        seen_by="check reference content",
    ),
    PlantedBug(
        "a hold that has ended keeps its pin",
        (Keeper, "end_hold"),
        edit=("self._room.unlock(hold.node)", "pass"),
        seen_by="check reference",
    ),
    PlantedBug(
        "a hold never ends of itself",
        (Deadlines, "hold"),
        edit=("hold, until", "hold, math.inf"),
        seen_by="reference",
    ),
    PlantedBug(
        "a hold ends before its time",
        (RadixCache, "retain"),
        edit=(
            "self.deadlines.after(duration_s)",
            "self.deadlines.after(duration_s and duration_s / 2)",
        ),
        seen_by="reference",
    ),
    PlantedBug(
        "a hold holds a block less",
        (RadixCache, "retain"),
        edit=(
            "self._publisher.upper(found.node, found.inside), found.num_tokens",
            "(found.node.parent or found.node), found.num_tokens",
        ),
        seen_by="check",
    ),
    PlantedBug(
        "a priority never ends",
        (Deadlines, "refresh"),
        edit=("self.after(node.retention.duration_s)", "math.inf"),
        seen_by="check reference",
    ),
    PlantedBug(
        "a priority ends while its prefix is in use",
        (Keeper, "expire"),
        edit=("elif ended.lock_ref:", "elif ended.lock_ref > 99:"),
        seen_by="reference",
    ),
    PlantedBug(
        "a release does not let the time begin anew",
        (RadixCache, "release"),
        edit=("self._keeper.refresh(lease.node)", "pass"),
        seen_by="reference",
    ),
    PlantedBug(
        "a cut edge loses the priority of its upper half",
        (Publisher, "upper"),
        edit=("self._deadlines.split(upper, node)", "pass"),
        seen_by="reference",
    ),
    PlantedBug(
        "what was worth more keeps its rank",
        (Keeper, "expire"),
        edit=("self._room.pins.reranked(ended)", "pass"),
        seen_by="check reference",
    ),
    PlantedBug(
        "a lower priority takes the place of a higher",
        (Keeper, "_retain"),
        edit=(
            "node.retention.strength >= retention.strength",
            "node.retention.strength == retention.strength",
        ),
        seen_by="reference",
    ),
    PlantedBug(
        "a range is worth its priority beyond its end",
        (Keeper, "_retain"),
        edit=("min(last, node.end) - node.start", "node.num_tokens"),
        seen_by="reference",
    ),
    PlantedBug(
        "a range is worth its priority before its start",
        (Keeper, "_retain"),
        edit=("if marked.start < first:", "if marked.start < 0:"),
        seen_by="reference",
    ),
    PlantedBug(
        "an edge grows in place into what is worth another priority",
        (Publisher, "_grows"),
        edit=("if node.retention is None:", "if node.lock_ref:"),
        seen_by="reference",
    ),
    PlantedBug(
        "what is evicted is still to end",
        (Room, "give_up"),
        edit=("self.deadlines.forget(leaf)", "pass"),
        seen_by="check",
    ),
    PlantedBug(
        "a hit is not worth what the request says",
        (RadixCache, "acquire"),
        edit=("self._keeper.retain(lease, 0, committed)", "pass"),
        seen_by="reference",
    ),
    PlantedBug(
        "what is published is not worth what the request says",
        (RadixCache, "commit"),
        edit=("self._keeper.retain(lease, start, end)", "pass"),
        seen_by="reference",
    ),
    PlantedBug(
        "a branch forgets what its tokens are worth",
        (RadixCache, "fork"),
        edit=("lease.node, lease.retentions)", "lease.node)"),
        seen_by="reference",
    ),
    PlantedBug(
        "priorities are not asked",
        (Priority, "rank"),
        edit=("node.priority,", "0,"),
        seen_by="reference",
    ),
    PlantedBug(
        "a share guards nothing",
        (Accounts, "settle"),
        edit=("max(0, account.num_over)", "max(0, account.num_owned)"),
        seen_by="check reference",
    ),
    PlantedBug(
        "eviction goes on below a share",
        (Accounts, "victim"),
        edit=("owner.index.first(), owner.num_over", "owner.index.first(), None"),
        seen_by="reference",
    ),
    PlantedBug(
        "a share is kept from its own namespace",
        (Accounts, "victim"),
        edit=("account.index.first() if account and account.quota else None", "None"),
        seen_by="reference",
    ),
    PlantedBug(
        "what is guarded counts as room",
        (Room, "require"),
        edit=("evictable -= self.accounts.guarded_from(account)", "pass"),
        seen_by="reference",
    ),
    PlantedBug(
        "what is guarded from others is no room for its own",
        (Accounts, "guarded_from"),
        edit=("account.num_guarded if account else 0", "0"),
        seen_by="reference",
    ),
    PlantedBug(
        "a hard limit is not kept by eviction",
        (Room, "allocate"),
        edit=("self._evict(count - left,", "self._evict(0 * left,"),
        seen_by="reference",
    ),
    PlantedBug(
        "a hard limit refuses too late",
        (Room, "require"),
        edit=("needed > left + own", "needed > left + own + 99"),
        seen_by="reference",
    ),
    PlantedBug(
        "blocks that came free stay on the account",
        (Room, "free"),
        edit=("account.num_owned -= count", "pass"),
        seen_by="check reference",
    ),
    PlantedBug(
        "blocks that were taken are on no account",
        (Room, "allocate"),
        edit=("account.num_owned += count", "pass"),
        seen_by="check reference",
    ),
    PlantedBug(
        "an account that changed is not looked at",
        (Accounts, "touch"),
        edit=("self._touched.add(account)", "pass"),
        seen_by="check reference",
    ),
    PlantedBug(
        "a quota leaves the leaves where they were",
        (Accounts, "set_quota"),
        edit=("account.index = apart", "pass"),
        seen_by="check",
    ),
    PlantedBug(
        "a lowered hard limit evicts nothing",
        (RadixCache, "set_quota"),
        edit=("self.room.trim_to_quota(account)", "0"),
        seen_by="reference",
    ),
    PlantedBug(
        "an epoch leaves its quota behind",
        (RadixCache, "raise_epoch"),
        edit=("self.accounts.pass_quota(namespace, following)", "pass"),
        seen_by="reference",
    ),
    PlantedBug(
        "a namespace in use loses its account",
        (Room, "forget_if_unused"),
        edit=("if namespace not in self.tree.roots:", "if namespace:"),
        seen_by="check",
    ),
    PlantedBug(
        "what is abandoned goes when it is its turn",
        (EvictionIndex, "rank"),
        edit=("if node.is_abandoned", "if node.num_tokens < 0"),
        seen_by="reference",
    ),
    PlantedBug(
        "what is used again stays abandoned",
        (Pins, "lock"),
        edit=("current.is_abandoned = False", "pass"),
        seen_by="",
        test="tests.core.test_abandon:test_who_comes_back_after_all_takes_it_back",
    ),
    PlantedBug(
        "who waits for it does not save what is abandoned",
        (Keeper, "touch"),
        edit=("self._room.pins.revive(node)", "pass"),
        seen_by="",
        test="tests.core.test_abandon:test_who_comes_back_after_all_takes_it_back",
    ),
    PlantedBug(
        "a branch is abandoned with what another goes on from",
        (Keeper, "abandon"),
        edit=("if len(node.children) > 1", "if len(node.children) > 99"),
        seen_by="",
        test="tests.core.test_abandon:test_what_another_branch_goes_on_from_stays",
    ),
    PlantedBug(
        "a branch is abandoned from its begin",
        (Keeper, "abandon"),
        edit=("if node.start < start:", "if node.start > start:"),
        seen_by="",
        test="tests.core.test_abandon:test_tokens_before_the_start_are_left_alone",
    ),
)
