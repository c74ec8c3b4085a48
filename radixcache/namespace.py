"""Namespaces: who may share with whom.

Owns: the identity of a tree.  Does not know: what stands in it.
Idea: everything that makes K/V differ for equal tokens, or that must not be seen by others, is a
field here; two requests share blocks only if all fields are equal.  Fields are compared one by
one, never joined to a text, so no choice of names can collide.
"""

from __future__ import annotations

import msgspec


class Namespace(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The identity of one disjoint tree of prefixes.

    model    name of the weights that computed the K/V
    adapter  name of the adapter (LoRA) on top, or ""
    salt     secret of a tenant, or "" where all share
    epoch    raised when weights, adapter, template or dtype change: older K/V is unreachable
    """

    model: str = ""
    adapter: str = ""
    salt: str = ""
    epoch: int = 0


DEFAULT_NAMESPACE = Namespace()
"""The namespace of callers who need only one."""
