"""Which epoch of a namespace is the present one.

Owns: the epochs that were raised.  Does not know: what is cached in them.
Idea: raising an epoch only makes the older one a namespace that nobody may ask for any more, so it
costs the same however much is cached there.
"""

from __future__ import annotations

from msgspec import structs

from radixcache.errors import StaleEpoch
from radixcache.namespace import Namespace


class Epochs:
    """The newest epoch of each namespace that was raised once.

    Kept for good, some 200 bytes each: forgotten, what was cached before would be found again.
    """

    __slots__ = ("_newest",)

    def __init__(self) -> None:
        self._newest: dict[Namespace, int] = {}  # by the namespace at epoch 0

    def newest(self, namespace: Namespace) -> int | None:
        """Return the epoch to which a namespace was raised, or None if it never was."""
        return self._newest.get(structs.replace(namespace, epoch=0))

    def current(self, namespace: Namespace) -> Namespace:
        """Return a namespace at the epoch it was raised to; itself where it never was."""
        if not self.is_stale(namespace):
            return namespace
        return structs.replace(namespace, epoch=self.newest(namespace) or 0)

    def raise_above(self, namespace: Namespace) -> Namespace:
        """Make the epoch after the namespace's own the newest; return the namespace at it."""
        following = structs.replace(namespace, epoch=namespace.epoch + 1)
        self._newest[structs.replace(namespace, epoch=0)] = following.epoch
        return following

    def is_stale(self, namespace: Namespace) -> bool:
        """True where the namespace's epoch was raised since; free where no epoch ever was."""
        if not self._newest:
            return False
        return namespace.epoch < (self.newest(namespace) or 0)

    def check(self, namespace: Namespace) -> None:
        """Raise StaleEpoch for a namespace whose epoch was raised since."""
        if self.is_stale(namespace):
            raise StaleEpoch(f"the epoch of {namespace} was raised: use the one that is current")
