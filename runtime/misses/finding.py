"""Why a prompt misses, found out in a cache and told of a conversation.

Owns: what is read on the engine's thread, and what is made of it elsewhere.  Does not know: HTTP,
who asks; what may be spoken of is said by the caller.
Idea: the cache is asked once and left as it was; all that is left to do is text, which keeps no
engine waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import structs

from radixcache.cache import RadixCache
from radixcache.explain import Cause, Explanation, cached_beyond
from radixcache.lease import PrefixKey
from radixcache.namespace import Namespace
from radixcache.tokens import unpack_tokens
from runtime.misses.records import MissCause, MissPlace, MissReport, Side, in_words
from runtime.misses.rewriting import is_retokenised, rewriting_of
from runtime.scheduler.public import PUBLIC, PublicPrefix
from runtime.tokenizer.parts import Part, part_at, parts_of

NUM_SHOWN = 24
"""Tokens shown of each text."""

NUM_COMPARED = 2048
"""Tokens behind the divergence in which a rewriting is looked for."""


class Decoder(Protocol):
    """Whatever gives the text of token ids, such as a `Tokenizer`."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids; control tokens as their text unless they are to be skipped."""

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """Return the bytes that ids stand for."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a cache knows of one prompt; values, for any thread.

    key         the prompt
    why         how much is cached, and why it is no more
    beyond      tokens that the cache has in place of those that are missing
    block_size  tokens a block
    evicted_s   seconds since the first of what is missing was evicted; None where nothing was
    """

    key: PrefixKey
    why: Explanation
    beyond: list[int]
    block_size: int
    evicted_s: float | None


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation that a prompt was rendered from.

    render    gives the text of messages and tools as a prompt
    messages  as chat templates take them
    """

    render: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None

    @property
    def tool_names(self) -> list[str]:
        """The names of the tools, in order."""
        functions = (tool.get("function") for tool in self.tools or ())
        return [str(f["name"]) for f in functions if isinstance(f, Mapping) and "name" in f]


def find_miss(
    cache: RadixCache,
    key: PrefixKey,
    *,
    now: float,
    public: PublicPrefix | None = None,
    may_see: Callable[[Namespace], bool] = lambda namespace: False,
) -> Finding:
    """Ask a cache for one prompt; change nothing.  On the thread that owns the cache.

    now      seconds of the cache's clock
    public   what every namespace may have by copy
    may_see  which namespaces beside the key's own may be spoken of; what they have is told as a
             number, never as text

    O(tokens, and nodes passed in each namespace that may be spoken of).
    """
    among: Iterable[Namespace] = filter(may_see, list(cache.tree.roots))
    why = cache.explain(key, among=among)
    seen = key
    count = public.reach(key.tokens) if public is not None else 0
    if count > why.num_cached and not _is_evicted_beyond(why, count, cache.config.block_size):
        seen = PrefixKey(PUBLIC, key.tokens)
        why = structs.replace(cache.explain(seen, among=()), num_cached=count)
    evicted = why.evicted.first_at if why.evicted is not None else None
    return Finding(
        key=key,
        why=why,
        beyond=cached_beyond(seen, tree=cache.tree, limit=NUM_COMPARED),
        block_size=cache.config.block_size,
        evicted_s=None if evicted is None else max(0.0, now - evicted),
    )


def tell_miss(found: Finding, tokenizer: Decoder, spoken: Spoken | None = None) -> MissReport:
    """Make a report of a finding: text of both sides, the part of the conversation, the cause.

    spoken  the conversation, where the prompt was one

    O(tokens), and one more rendering of the conversation.
    """
    why = found.why
    ids = unpack_tokens(bytes(found.key.tokens))
    report = MissReport(
        prompt_tokens=why.num_tokens,
        cached_tokens=why.num_cached,
        computed_tokens=why.num_tokens - why.num_cached,
        cause=_cause(found, ids, tokenizer, spoken),
        first_missing=why.first_missing,
        place=None,
        shared="",
        prompt=None,
        cached=None,
        evicted_tokens=(why.evicted.num_blocks if why.evicted else 0) * found.block_size,
        evicted_s=found.evicted_s,
        differs_in=why.other,
        elsewhere_tokens=why.num_elsewhere,
        summary="",
    )
    first = why.first_missing
    if first is not None:
        shown, beyond = ids[first : first + NUM_SHOWN], found.beyond[:NUM_SHOWN]
        report = structs.replace(
            report,
            place=_place(ids[:first], tokenizer, spoken),
            shared=_text(tokenizer, ids[max(0, first - NUM_SHOWN) : first]),
            prompt=Side(token=shown[0], text=_text(tokenizer, shown)),
            cached=Side(token=beyond[0], text=_text(tokenizer, beyond)) if beyond else None,
        )
    return structs.replace(report, summary=in_words(report))


def _is_evicted_beyond(why: Explanation, count: int, block_size: int) -> bool:
    """True where more than `count` tokens were cached once, so that eviction is what is to tell."""
    if why.evicted is None:
        return False
    return (why.num_cached_blocks + why.evicted.num_blocks) * block_size > count


def _cause(
    found: Finding, ids: Sequence[int], tokenizer: Decoder, spoken: Spoken | None
) -> MissCause:
    """The cache's cause; of a divergence, what was done to the text if something was."""
    why = found.why
    if why.cause not in (Cause.DIVERGED, Cause.NEVER_SEEN, Cause.SHORT) or not found.beyond:
        return MissCause(why.cause)
    first = why.first_missing or 0
    rest = ids[first : first + NUM_COMPARED]
    if is_retokenised(
        *(
            [tokenizer.bytes_of([i], skip_special=False) for i in run]
            for run in (rest, found.beyond)
        )
    ):
        return MissCause.RETOKENISED
    shared, names = ids[max(0, first - NUM_SHOWN) : first], spoken.tool_names if spoken else []
    if len(names) > 1:
        shared = ids[:first]
    ours, theirs = (_text(tokenizer, [*shared, *run]) for run in (rest, found.beyond))
    rewriting = rewriting_of(ours, theirs, tool_names=names)
    return MissCause(why.cause if rewriting is None else rewriting)


def _place(before: Sequence[int], tokenizer: Decoder, spoken: Spoken | None) -> MissPlace | None:
    """The part of the conversation that begins or goes on behind these tokens."""
    if spoken is None:
        return None
    parts: list[Part] = parts_of(spoken.render, spoken.messages, spoken.tools)
    part = part_at(parts, len(tokenizer.bytes_of(before, skip_special=False)))
    if part is None:
        return None
    return MissPlace(part=part.name, message=part.message, role=part.role)


def _text(tokenizer: Decoder, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special=False)
