"""A log as it would be if one reason for misses were gone.

Owns: what each mend does to each request.  Does not know: tokens, caches, whether a mend saves
anything: that is found by replaying what comes out of here.
Idea: a log is mended from its begin to its end, each request after the earlier one that it is like.
What the two had in common they have in common still, in the mended form of the earlier one; so a
mend holds for all requests that follow, as it would in the program that sent them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from msgspec import structs

from runtime.doctor.changes import Change
from runtime.doctor.linking import Link, links_of
from runtime.doctor.log import LoggedRequest, Said, Tool
from runtime.doctor.moving import Mover
from runtime.doctor.reasons import WORDS, Mend, Reason
from runtime.doctor.text_changes import as_before, sorted_json


def mended(log: Sequence[LoggedRequest], reason: Reason) -> list[LoggedRequest]:
    """Return a log without one reason for misses; requests that it does not concern as they were.

    Reasons that lie in the cache (a pool that is too small) leave a log as it is.
    """
    mend = WORDS[reason].mend
    if mend is Mend.ROOM:
        return list(log)
    if mend is Mend.SHARE:
        return [structs.replace(request, salt="") for request in log]
    links = links_of(log)
    if mend is Mend.ALL_TOOLS:
        return _with_all_tools(log, links)
    if reason is Reason.JSON_KEYS:
        return _with_sorted_keys(log, links)
    mover = Mover(log, links, reason) if mend is Mend.MOVE_DOWN else None
    found: list[LoggedRequest] = []
    for request, link in zip(log, links, strict=True):
        if link.earlier is None:
            found.append(mover.moved(request, request, len(found)) if mover else request)
            continue
        change = next((change for change in link.changes if change.reason is reason), None)
        earlier, now = log[link.earlier], found[link.earlier]
        said, kept = _carried(earlier, request, now, change, reason)
        new = structs.replace(
            request, said=said, tools=_carried_tools(earlier, request, now, change)
        )
        found.append(mover.moved(new, request, len(found), kept=kept) if mover else new)
    return found


def _carried(
    earlier: LoggedRequest,
    request: LoggedRequest,
    now: LoggedRequest,
    change: Change | None,
    reason: Reason,
) -> tuple[tuple[Said, ...], frozenset[int]]:
    """Return a request's messages as they follow on the mended earlier one.

    now      the earlier request, mended
    returns  the messages, and which of them stand as the earlier one has them
    """
    theirs, ours, mine = earlier.said, request.said, now.said
    if WORDS[reason].mend is Mend.APPEND:
        if change is not None and change.message is not None:
            return (*mine, *ours[change.message + change.length :]), frozenset()
        if ours[: len(theirs)] == theirs:
            return (*mine, *ours[len(theirs) :]), frozenset()
        return ours, frozenset()
    said, kept = list(ours), set()
    in_place = zip(range(len(ours)), range(len(mine)), strict=False)
    is_shuffled = change is not None and change.length > 1
    for at, before in in_place if is_shuffled else _aligned(theirs, ours):
        if theirs[before] == ours[at]:
            said[at] = mine[before]
            kept.add(at)
        elif WORDS[reason].mend is Mend.MOVE_DOWN and at + 1 < len(ours):
            moved = mine[before].text.removeprefix(theirs[before].text)
            if moved != mine[before].text:  # what was moved behind it once stays there
                said[at] = Said(ours[at].role, ours[at].text + moved)
        elif WORDS[reason].mend is Mend.AS_BEFORE and change is not None:
            said[at] = _mended_message(ours[at], mine[before], at, change, reason)
    return tuple(said), frozenset(kept)


def _aligned(theirs: Sequence[Said], ours: Sequence[Said]) -> Iterator[tuple[int, int]]:
    """Yield the places of a request's messages with those of the same ones in an earlier request.

    Messages that were rewritten are the same in their order between two that were not.
    """
    matcher = SequenceMatcher(None, theirs, ours, autojunk=False)
    for _, a, b, c, d in matcher.get_opcodes():
        yield from zip(range(c, d), range(a, b), strict=False)


def _mended_message(ours: Said, mine: Said, at: int, change: Change, reason: Reason) -> Said:
    """Return a message in which what changed for a reason is as before."""
    if change.message is None or at < change.message:
        return ours
    if change.length > 1:  # messages in another order
        return mine if at < change.message + change.length else ours
    if ours.role != mine.role or (reason is Reason.PROMPT_EDITED and at != change.message):
        return ours
    return Said(ours.role, as_before(ours.text, mine.text, reason))


def _with_sorted_keys(log: Sequence[LoggedRequest], links: Sequence[Link]) -> list[LoggedRequest]:
    """Return a log in which JSON has its keys sorted, in the messages where they changed."""
    places = {
        change.message
        for link in links
        for change in link.changes
        if change.reason is Reason.JSON_KEYS
    }
    return [
        structs.replace(
            request,
            said=tuple(
                Said(said.role, sorted_json(said.text)) if at in places else said
                for at, said in enumerate(request.said)
            ),
        )
        for request in log
    ]


def _carried_tools(
    earlier: LoggedRequest, request: LoggedRequest, now: LoggedRequest, change: Change | None
) -> tuple[Tool, ...]:
    if request.tools == earlier.tools:
        return now.tools
    is_of_tools = change is not None and change.message is None
    return now.tools if is_of_tools else request.tools


def _with_all_tools(log: Sequence[LoggedRequest], links: Sequence[Link]) -> list[LoggedRequest]:
    """Return a log in which requests that are linked offer all of their tools, in one order."""
    roots: list[int] = []
    for index, link in enumerate(links):
        roots.append(index if link.earlier is None else roots[link.earlier])
    offered: dict[int, dict[str, Tool]] = {}
    for root, request in zip(roots, log, strict=True):
        tools = offered.setdefault(root, {})
        for tool in request.tools:
            tools.setdefault(tool.name, tool)
    return [
        structs.replace(request, tools=tuple(offered[root].values())) if request.tools else request
        for root, request in zip(roots, log, strict=True)
    ]
