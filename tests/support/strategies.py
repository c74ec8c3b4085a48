"""Hypothesis strategies for tests of the core.

Owns: what is drawn.  Does not know: what is done with it.
Idea: everything is tiny (two token ids, blocks of 1 to 3 tokens, pools of 4 to 14 blocks), so that
within a few steps every sequence meets, shares, splits and evicts every other.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from hypothesis import strategies as st

from radixcache import DEFAULT_NAMESPACE, CacheConfig, Namespace

NAMESPACES = (DEFAULT_NAMESPACE, Namespace(salt="a"), Namespace(adapter="a"))
"""Three trees; two of them differ only in which field holds the name."""

_RUNS = tuple(run for length in (1, 2, 3, 4, 5) for run in product((0, 1), repeat=length))


def token_runs() -> st.SearchStrategy[tuple[int, ...]]:
    """Runs of up to 5 tokens over the ids 0 and 1; rarely none at all."""
    return st.sampled_from(((), *_RUNS))


class Prompt(NamedTuple):
    """How a prompt comes from an earlier sequence.

    which      picks the earlier one
    keep       how many of its tokens it begins with
    more       what follows
    namespace  None: that of the earlier one
    """

    which: int
    keep: int
    more: tuple[int, ...]
    namespace: Namespace | None


def prompts() -> st.SearchStrategy[Prompt]:
    """Mostly a long part of an earlier sequence and a little more, in the same namespace."""
    return st.builds(
        Prompt,
        which=small(5),
        keep=st.sampled_from((2, 3, 4, 5, 6, 99, 0)),
        more=token_runs(),
        namespace=st.sampled_from((None, None, None, None, *NAMESPACES)),
    )


def configs() -> st.SearchStrategy[CacheConfig]:
    """Pools of 4 to 14 blocks of 1 to 3 tokens; the prefix cache is off in one of eight."""
    return st.builds(
        CacheConfig,
        num_blocks=st.sampled_from(range(4, 15)),
        block_size=st.sampled_from((1, 2, 3)),
        enable_prefix_cache=st.sampled_from((True,) * 7 + (False,)),
    )


def small(limit: int) -> st.SearchStrategy[int]:
    """A number from 0 to `limit`."""
    return st.sampled_from(range(limit + 1))
