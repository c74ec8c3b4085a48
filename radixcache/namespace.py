"""Namespaces: who may share with whom.

Owns: the identity of a tree.  Does not know: what stands in it.
Idea: everything that makes K/V differ for equal tokens, or that must not be seen by others, is a
field here; two requests share blocks only if all fields are equal.  Fields are compared one by
one, never joined to a text, so no choice of names can collide.
"""

from __future__ import annotations

import msgspec

from radixcache.errors import InvalidConfig


class Namespace(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The identity of one disjoint tree of prefixes.

    model    name of the weights that computed the K/V
    adapter  name of the adapter (LoRA) on top, or ""
    salt     secret of a tenant, or "" where all share
    epoch    raised when weights, adapter, template or dtype change: older K/V is unreachable

    Raises InvalidConfig for text with lone surrogates, or an epoch below 0.
    """

    model: str = ""
    adapter: str = ""
    salt: str = ""
    epoch: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "adapter", "salt"):
            value = getattr(self, name)
            if not isinstance(value, str) or not (value.isascii() or _is_text(value)):
                raise InvalidConfig(f"{name} must be text that UTF-8 can hold, not {value!r}")
        if type(self.epoch) is not int or self.epoch < 0:
            raise InvalidConfig(f"epoch must be an integer of at least 0, not {self.epoch!r}")


def _is_text(value: str) -> bool:
    """False for text with half a character (a lone surrogate), which no event could carry."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


DEFAULT_NAMESPACE = Namespace()
"""The namespace of callers who need only one."""
