"""Each request of a log beside the earlier one that it is most like, and what changed between them.

Owns: the links and the changes of a whole log.  Does not know: tokens, caches, how a log is mended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from runtime.doctor.changes import Change, change_between
from runtime.doctor.log import LoggedRequest
from runtime.doctor.pieces import Neighbours


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has to do with an earlier one.

    earlier  index of the earlier request in the log; None where none is like it
    changes  what changed from that one to this: in the tools, in the messages, or in both
    """

    earlier: int | None = None
    changes: tuple[Change, ...] = ()


def links_of(log: Sequence[LoggedRequest]) -> list[Link]:
    """Link every request of a log to the earlier one of its own model and salt that it is like."""
    neighbours: dict[tuple[str, str, str], Neighbours] = defaultdict(Neighbours)
    members: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    links = []
    for index, request in enumerate(log):
        group = request.model, request.tenant, request.salt
        place = neighbours[group].add(request)
        if place is None:
            links.append(Link())
        else:
            earlier = members[group][place]
            changes = tuple(change_between(log[earlier], request))
            links.append(Link(earlier=earlier, changes=changes))
        members[group].append(index)
    return links
