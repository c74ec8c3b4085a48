"""Who owns how much: an account for each namespace, and whose leaf goes next.

Owns: accounts, quotas, and the order of eviction over all namespaces.  Does not know: tokens, how
pins and blocks change; pins and room keep the counts.
Idea: leaves of namespaces without a quota stand in one common index.  A namespace with a quota has
an index of its own, so its leaves can be passed over as a whole while it owns no more than its
share; those that own more are kept sorted by their first leaf, brought up to date only when asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

import msgspec
from sortedcontainers import SortedList

from radixcache.errors import InvalidConfig, InvariantViolation
from radixcache.eviction import EvictionIndex
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.policy import EvictionPolicy, Rank, check_policy
from radixcache.stats import Counters, NamespaceStats


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a namespace may own, in blocks; cached and private ones both count.

    soft_limit  its share: while it owns no more, nobody else's request evicts from it
    hard_limit  it never owns more: beyond, its own leaves make room; None where the pool decides

    Raises InvalidConfig for negative numbers, or a soft limit above the hard one.
    """

    soft_limit: int = 0
    hard_limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("soft_limit", "hard_limit"):
            value = getattr(self, name)
            if name == "hard_limit" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidConfig(f"{name} must be an integer of at least 0, not {value!r}")
        if self.hard_limit is not None and self.soft_limit > self.hard_limit:
            raise InvalidConfig(
                f"the soft limit of {self.soft_limit} blocks is above the hard limit of "
                f"{self.hard_limit}"
            )


NO_QUOTA = Quota()
"""No share and no limit: what a namespace keeps whose quota was taken back."""


class Account(Counters):
    """What one namespace owns, and what happened in it.

    quota          None where its leaves stand in the common index
    index          where its evictable leaves stand
    num_owned      blocks that its nodes or leases own, each once
    num_pinned     of those, blocks of the tree that somebody stands on or below
    num_evictable  of those, blocks of the tree that nobody stands on
    num_guarded    of those, blocks that only its own requests evict; kept by `Accounts.settle`
    """

    __slots__ = (
        "first",
        "index",
        "namespace",
        "num_evictable",
        "num_guarded",
        "num_owned",
        "num_pinned",
        "quota",
    )

    def __init__(self, namespace: Namespace, index: EvictionIndex) -> None:
        super().__init__()
        self.namespace = namespace
        self.quota: Quota | None = None
        self.index = index
        self.num_owned = 0
        self.num_pinned = 0
        self.num_evictable = 0
        self.num_guarded = 0
        self.first: tuple[Rank, int, Account] | None = None  # its entry in `Accounts._over`

    @property
    def num_over(self) -> int:
        """Blocks that it owns beyond its share."""
        return self.num_owned - (self.quota.soft_limit if self.quota else 0)

    @property
    def num_left(self) -> int | None:
        """Blocks that it may own beside; negative where it owns too many, None without limit."""
        if self.quota is None or self.quota.hard_limit is None:
            return None
        return self.quota.hard_limit - self.num_owned

    def stats(self) -> NamespaceStats:
        """Return the numbers as one record."""
        return NamespaceStats(
            soft_limit=self.quota.soft_limit if self.quota else 0,
            hard_limit=self.quota.hard_limit if self.quota else None,
            num_private=self.num_owned - self.num_pinned - self.num_evictable,
            num_pinned=self.num_pinned,
            num_evictable=self.num_evictable,
            **self.counts(),
        )


class Accounts:
    """The accounts of all namespaces that own something, or have a quota."""

    __slots__ = ("_num_blocks", "_num_guarded", "_over", "_touched", "by_namespace", "index")

    def __init__(self, policy: EvictionPolicy, *, num_blocks: int) -> None:
        check_policy(policy)
        self._num_blocks = num_blocks  # of the pool, which all shares together can't exceed
        self.index = EvictionIndex(policy)  # leaves of the namespaces without a quota
        self.by_namespace: dict[Namespace, Account] = {}
        self._over: SortedList = SortedList()  # (rank, node id, account): the first leaf of each
        self._touched: set[Account] = set()  # with a quota, and changed since `settle`
        self._num_guarded = 0

    def __iter__(self) -> Iterator[Account]:
        """Iterate over the accounts."""
        return iter(self.by_namespace.values())

    def open(self, namespace: Namespace) -> Account:
        """Return the account of a namespace, new if it has none."""
        account = self.by_namespace.get(namespace)
        if account is None:
            account = self.by_namespace[namespace] = Account(namespace, self.index)
        return account

    def close(self, namespace: Namespace) -> None:
        """Forget a namespace without a tree, with its counts, unless it has a quota."""
        account = self.by_namespace.get(namespace)
        if account and account.quota in (None, NO_QUOTA):
            self.settle()
            del self.by_namespace[namespace]

    def touch(self, account: Account) -> None:
        """Note that an account's blocks or leaves have changed."""
        if account.quota is not None:
            self._touched.add(account)

    def set_quota(self, namespace: Namespace, quota: Quota | None) -> Account:
        """Give a namespace a quota, or take it back; O(all evictable leaves) the first time.

        Raises InvalidConfig where the shares of all would be more than the pool has.
        """
        if quota is not None and not isinstance(quota, Quota):
            raise InvalidConfig(f"a quota is a Quota or None, not {quota!r}")
        others = sum(
            other.quota.soft_limit
            for other in self.by_namespace.values()
            if other.quota and other.namespace != namespace
        )
        if quota and others + quota.soft_limit > self._num_blocks:
            raise InvalidConfig(
                f"a soft limit of {quota.soft_limit} blocks, with the {others} of other "
                f"namespaces, is more than the pool's {self._num_blocks}"
            )
        account = self.open(namespace)
        if account.quota is None and quota is not None:
            apart = EvictionIndex(self.index.policy)
            for leaf in [node for node in self.index if node.namespace == namespace]:
                self.index.remove(leaf)
                apart.add(leaf)
            account.index = apart
        account.quota = quota or (account.quota and NO_QUOTA)
        self.touch(account)
        return account

    def pass_quota(self, old: Namespace, new: Namespace) -> None:
        """Let a namespace's quota be another's from now on; O(log n) if that is empty."""
        account = self.by_namespace.get(old)
        if account is None or account.quota in (None, NO_QUOTA):
            return
        quota, account.quota = account.quota, NO_QUOTA
        self.touch(account)
        if self.open(new).quota in (None, NO_QUOTA):
            self.set_quota(new, quota)

    def settle(self) -> None:
        """Bring the order of those over their share up to date; O(log) for each one touched."""
        for account in self._touched:
            if account.first is not None:
                self._over.remove(account.first)
                account.first = None
            spare = min(account.num_evictable, max(0, account.num_over))
            guarded = account.num_evictable - spare
            self._num_guarded += guarded - account.num_guarded
            account.num_guarded = guarded
            if spare:
                account.first = (*next(account.index.entries())[:2], account)
                self._over.add(account.first)
        self._touched.clear()

    def guarded_from(self, account: Account | None) -> int:
        """Return how many evictable blocks a request of a namespace must not evict."""
        self.settle()
        return self._num_guarded - (account.num_guarded if account else 0)

    def victim(self, account: Account | None) -> tuple[Node, int] | None:
        """Return what goes next for a request of a namespace (None: nobody's).

        The policy's first among the leaves without a quota, those of namespaces over their share,
        and the namespace's own.  O(log n).

        returns  the leaf, and how many of its blocks may go before another is asked for; or None
        """
        if self._touched:
            self.settle()
        first, most = self.index.first(), None
        if self._over and (first is None or self._over[0][:2] < first[:2]):
            owner: Account = self._over[0][2]
            first, most = owner.index.first(), owner.num_over
        own = account.index.first() if account and account.quota else None
        if own is not None and (first is None or own[:2] <= first[:2]):
            first, most = own, None
        if first is None:
            return None
        leaf = first[2]
        return leaf, len(leaf.block_ids) if most is None else min(most, len(leaf.block_ids))

    def own_victim(self, account: Account) -> tuple[Node, int] | None:
        """Return what of a namespace goes next to keep it within its hard limit."""
        first = account.index.first()
        return None if first is None else (first[2], len(first[2].block_ids))

    def leaves(self) -> Iterator[Node]:
        """Iterate over all evictable leaves in the policy's order, whoever's they are."""
        apart = [a.index for a in self.by_namespace.values() if a.quota is not None]
        entries = merge(*(index.entries() for index in (self.index, *apart)))
        return (node for _, _, node in entries)

    def rank_of(self, leaf: Node) -> int:
        """Return how many evictable leaves go before one by the policy's order; O(log n) an index.

        Quotas are passed over, and what a policy that learns would choose among its classes.
        """
        assert leaf.entry is not None
        apart = [a.index for a in self.by_namespace.values() if a.quota is not None]
        return sum(index.num_before(leaf.entry) for index in (self.index, *apart))

    def check(self) -> None:
        """Raise InvariantViolation unless, once settled, those over their share are in order."""
        expected, guarded = [], 0
        for account in self:
            share = account.quota.soft_limit if account.quota else 0
            spare = max(0, min(account.num_evictable, account.num_owned - share))
            guarded += account.num_evictable - spare
            if account.quota is not None and spare:
                rank, node_id, _ = next(account.index.entries())
                expected.append((rank, node_id, account))
        if list(self._over) != sorted(expected, key=lambda entry: entry[:2]):
            raise InvariantViolation("I11: those over their share are not in their order")
        if guarded != self._num_guarded:
            raise InvariantViolation(f"I11: {self._num_guarded} guarded, but {guarded} found")
