"""A log as it would be if one reason for misses were gone.

Owns: what each mend does to each request.  Does not know: tokens, caches, whether a mend saves
anything: that is found by replaying what comes out of here.
Idea: a log is mended from its begin to its end, each request after the earlier one that it is like.
What the two had in common they have in common still, in the mended form of the earlier one; so a
mend holds for all requests that follow, as it would in the program that sent them.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from runtime.doctor.changes import Change, change_between
from runtime.doctor.linking import Link, links_of
from runtime.doctor.log import LoggedRequest, Said, Tool
from runtime.doctor.moving import Mover
from runtime.doctor.pieces import reordered
from runtime.doctor.reasons import WORDS, Mend, Reason


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
    mover = Mover(log, links, reason) if mend is Mend.MOVE_DOWN else None
    found: list[LoggedRequest] = []
    for request, link in zip(log, links, strict=True):
        if link.earlier is None:
            found.append(mover.moved(request, len(found), kept=0) if mover else request)
            continue
        change = next((change for change in link.changes if change.reason is reason), None)
        earlier, now = log[link.earlier], found[link.earlier]
        said, kept = _carried(earlier, request, now, change, reason)
        new = structs.replace(
            request, said=said, tools=_carried_tools(earlier, request, now, change)
        )
        found.append(mover.moved(new, len(found), kept=kept) if mover else new)
    return found


def _carried(
    earlier: LoggedRequest,
    request: LoggedRequest,
    now: LoggedRequest,
    change: Change | None,
    reason: Reason,
) -> tuple[tuple[Said, ...], int]:
    """Return a request's messages as they follow on the mended earlier one.

    now      the earlier request, mended
    returns  the messages, and how many from the first on stand as the earlier one has them
    """
    theirs, ours, mine = earlier.said, request.said, now.said
    if WORDS[reason].mend is Mend.APPEND:
        if change is not None and change.message is not None:
            rest = ours[change.message + change.length :]
            return (*mine, *rest), len(mine)
        if ours[: len(theirs)] == theirs:
            return (*mine, *ours[len(theirs) :]), len(mine)
        return ours, 0
    said, kept = list(ours), 0
    is_kept = True
    for at, (before, after) in enumerate(zip(theirs, ours, strict=False)):
        if at >= len(mine):
            break
        if before == after or _is_mended(theirs, ours, at, change, reason):
            said[at] = mine[at]
            if before != after and change is not None and _is_order_within(change):
                said[at] = Said(after.role, reordered(after.text, mine[at].text))
            is_kept = is_kept and said[at] == mine[at]
            kept += is_kept
        else:
            is_kept = False
    return tuple(said), kept


def _is_order_within(change: Change) -> bool:
    """True where parts of one message stand in another order, and others of it may differ."""
    return change.reason is Reason.EXAMPLES_SHUFFLED and change.length == 1


def _is_mended(
    theirs: Sequence[Said], ours: Sequence[Said], at: int, change: Change | None, reason: Reason
) -> bool:
    """True where a message is to be sent as it was before."""
    if WORDS[reason].mend is not Mend.AS_BEFORE or change is None or change.message is None:
        return False
    if change.message <= at < change.message + change.length:
        return True
    if theirs[at].role != ours[at].role or at < change.message:
        return False
    pair = (LoggedRequest(line=0, said=(said[at],)) for said in (theirs, ours))
    alone = change_between(*pair)
    return any(found.reason is reason for found in alone)


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
