"""What was changed from one request to a later one that is like it.

Owns: finding the place, in tools or messages, at which the later prompt leaves the earlier one,
and naming the change.  Does not know: tokens, caches, logs.
Idea: a conversation that only grows changes nothing.  Of any other difference only the first one
counts, in the order in which a prompt is read: what stands behind it is lost by it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from runtime.doctor.log import LoggedRequest, Said, Tool
from runtime.doctor.pieces import pieces_of
from runtime.doctor.reasons import VOLATILE, Reason
from runtime.doctor.text_changes import TextChange, changes_of, difference, likeness

ALIKE = 0.3
"""Texts with less in common are of another program or another conversation."""

LEAST_SHARED = 200
"""Characters of equal sentences that make two texts alike, whatever else they say."""

LEAST_SHIFTED = 40
"""Characters of messages that must stand elsewhere to be told as moved."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What made a request leave the earlier one.

    reason   what changed
    place    where, in words
    text     the first words that differ
    message  index of the message, in both; None where it is in the tools
    tool     name of the tool; None where it is in the messages or in the list as a whole
    length   messages that are concerned
    skipped  messages of the earlier request that are gone, where history moved up
    """

    reason: Reason
    place: str
    text: TextChange
    message: int | None = None
    tool: str | None = None
    length: int = 1
    skipped: int = 0


def change_between(theirs: LoggedRequest, ours: LoggedRequest) -> list[Change]:
    """Return what changed from an earlier request to a later one: in tools, in messages, or both.

    Nothing where the later one only goes on, or is another conversation.
    """
    return [*_in_tools(theirs.tools, ours.tools), *_in_messages(theirs.said, ours.said)]


def place_of(index: int, said: Sequence[Said]) -> str:
    """Name a message's place.

    >>> place_of(0, [Said("system", "Be brief.")])
    'the system prompt'
    """
    role = said[index].role
    if role == "system" and all(s.role == "system" for s in said[:index]):
        return "the system prompt"
    return f"messages[{index}] ({role})" if role else "the prompt"


def _in_tools(theirs: Sequence[Tool], ours: Sequence[Tool]) -> list[Change]:
    if list(theirs) == list(ours) or not theirs or not ours:
        return []
    text = difference(*("\n".join(tool.text for tool in tools) for tools in (theirs, ours)))
    place = "the tools"
    sorted_keys = [[_sorted(tool) for tool in tools] for tools in (theirs, ours)]
    if sorted(sorted_keys[0]) == sorted(sorted_keys[1]):
        is_order = sorted_keys[0] != sorted_keys[1]
        reason = Reason.TOOL_ORDER if is_order else Reason.TOOL_KEYS
        return [Change(reason=reason, place=place, text=text)]
    names = [sorted(tool.name for tool in tools) for tools in (theirs, ours)]
    if names[0] != names[1]:
        return [Change(reason=Reason.TOOLS_CHANGED, place=place, text=text)]
    before = {tool.name: tool.text for tool in theirs}
    name = next(tool.name for tool in ours if before[tool.name] != tool.text)
    texts = changes_of(before[name], next(tool.text for tool in ours if tool.name == name))
    text = texts[0]
    reason = text.reason if len(texts) == 1 and text.reason in VOLATILE else Reason.TOOL_EDITED
    return [Change(reason=reason, place=f"the tool {name}", text=text, tool=name)]


def _sorted(tool: Tool) -> str:
    return json.dumps(json.loads(tool.text), sort_keys=True)


def _in_messages(theirs: Sequence[Said], ours: Sequence[Said]) -> list[Change]:
    found: list[Change] = []
    for at in range(min(len(theirs), len(ours))):
        if theirs[at] == ours[at]:
            continue
        moved = _shifted(theirs, ours, at) or _shuffled(theirs, ours, at)
        if moved is not None:
            return [*found, moved]
        rewritten = _rewritten(theirs, ours, at) if theirs[at].role == ours[at].role else []
        if not rewritten:  # another conversation from here on
            return found
        found += rewritten
    return found


def _shifted(theirs: Sequence[Said], ours: Sequence[Said], at: int) -> Change | None:
    """History that moved up, since what stood before it is gone or stands elsewhere now."""
    for skipped in range(1, len(theirs) - at):
        rest = theirs[at + skipped :]
        same = ours[at : at + len(rest)]
        if list(rest[: len(same)]) != list(same):
            continue
        if sum(len(said.text) for said in same) < LEAST_SHIFTED:
            continue
        gone = theirs[at : at + skipped]
        has_moved = all(said in ours[at + len(same) :] for said in gone)
        return Change(
            reason=Reason.MESSAGE_MOVED if has_moved else Reason.HISTORY_TRIMMED,
            place=place_of(at, ours),
            text=difference(gone[0].text, ours[at].text),
            message=at,
            length=len(same),
            skipped=skipped,
        )
    return None


def _shuffled(theirs: Sequence[Said], ours: Sequence[Said], at: int) -> Change | None:
    """The same messages in another order, as few-shot examples written as turns."""
    balance: Counter[Said] = Counter()
    longest = 0
    for length in range(1, min(len(theirs), len(ours)) - at + 1):
        balance[theirs[at + length - 1]] += 1
        balance[ours[at + length - 1]] -= 1
        if length > 1 and not any(balance.values()):
            longest = length
    if not longest:
        return None
    return Change(
        reason=Reason.EXAMPLES_SHUFFLED,
        place=place_of(at, ours),
        text=difference(theirs[at].text, ours[at].text),
        message=at,
        length=longest,
    )


def _rewritten(theirs: Sequence[Said], ours: Sequence[Said], at: int) -> list[Change]:
    """What was rewritten in one message, a change for each reason."""
    is_alike = _are_alike(theirs[at].text, ours[at].text)
    is_same = is_alike or _goes_on(theirs, ours, at + 1)
    found: dict[Reason, Change] = {}
    for text in changes_of(theirs[at].text, ours[at].text):
        reason = _reason(text.reason, ours, at, is_alike=is_alike, is_same=is_same)
        if reason is not None:
            change = Change(reason=reason, place=place_of(at, ours), text=text, message=at)
            found.setdefault(reason, change)
    return list(found.values())


def _reason(
    reason: Reason | None, ours: Sequence[Said], at: int, *, is_alike: bool, is_same: bool
) -> Reason | None:
    """Name a rewriting by where it stands; None where the message is another one.

    is_alike  whether both messages have much in common
    is_same   whether they are of one conversation
    """
    role, is_last = ours[at].role, at == len(ours) - 1
    if reason in (None, Reason.PROMPT_EDITED) and role not in ("system", ""):
        if is_last:
            return Reason.CONTEXT_ABOVE if is_alike else None
        return Reason.HISTORY_EDITED if is_same else None
    if reason is None:
        return Reason.CONTEXT_ABOVE if is_alike or (is_same and at) else None
    if reason in VOLATILE and not is_same:
        return None
    if reason in VOLATILE and role in ("assistant", "tool"):
        return Reason.HISTORY_EDITED
    return reason


def _are_alike(theirs: str, ours: str) -> bool:
    """True where the texts have a good part in common, or enough to be worth sharing."""
    if likeness(theirs, ours) >= ALIKE:
        return True
    pieces = {piece.strip() for piece in pieces_of(theirs)}
    return sum(len(p) for p in pieces_of(ours) if p.strip() in pieces) >= LEAST_SHARED


def _goes_on(theirs: Sequence[Said], ours: Sequence[Said], start: int) -> bool:
    """True where the next messages are equal and say enough: it is the same conversation."""
    pairs = zip(theirs[start:], ours[start:], strict=False)
    same = takewhile(lambda pair: pair[0] == pair[1], pairs)
    return sum(len(said.text) for said, _ in same) >= LEAST_SHIFTED
