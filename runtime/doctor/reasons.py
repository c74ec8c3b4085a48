"""The reasons why prompts that are alike share less than they could, and the mend of each.

Owns: their names, what is said of each, and in which way each is mended.  Does not know: how they
are recognised, logs, caches.
"""

from __future__ import annotations

import enum

import msgspec


class Reason(enum.StrEnum):
    """What made a prompt miss that is like an earlier one."""

    CLOCK = enum.auto()
    DATE = enum.auto()
    UUID = enum.auto()
    REQUEST_ID = enum.auto()
    NUMBER = enum.auto()
    DIRECTORY = enum.auto()
    GIT = enum.auto()
    CALLER = enum.auto()
    PROMPT_EDITED = enum.auto()
    CONTEXT_ABOVE = enum.auto()
    EXAMPLES_SHUFFLED = enum.auto()
    JSON_KEYS = enum.auto()
    TOOL_ORDER = enum.auto()
    TOOL_KEYS = enum.auto()
    TOOL_EDITED = enum.auto()
    TOOLS_CHANGED = enum.auto()
    HISTORY_TRIMMED = enum.auto()
    HISTORY_EDITED = enum.auto()
    MESSAGE_MOVED = enum.auto()
    THINKING_REMOVED = enum.auto()
    WHITESPACE = enum.auto()
    IMAGE_MOVED = enum.auto()
    IMAGE_ADDRESS = enum.auto()
    OTHER_SALT = enum.auto()
    EVICTED = enum.auto()


class Mend(enum.Enum):
    """How a log is mended, to see what it would save.

    MOVE_DOWN   what differs goes behind all that is shared
    AS_BEFORE   what says the same is sent as the earlier request had it
    APPEND      what was sent stays, and what is new goes behind it
    ALL_TOOLS   every request offers all tools, in one order
    SHARE       requests of a tenant share, whatever their salt
    ROOM        the pool forgets nothing
    """

    MOVE_DOWN = enum.auto()
    AS_BEFORE = enum.auto()
    APPEND = enum.auto()
    ALL_TOOLS = enum.auto()
    SHARE = enum.auto()
    ROOM = enum.auto()


class Words(msgspec.Struct, frozen=True):
    """What is said of a reason.

    title   what happens
    advice  what to do about it
    mend    how the log is mended
    """

    title: str
    advice: str
    mend: Mend


VOLATILE = frozenset(
    {
        Reason.CLOCK,
        Reason.DATE,
        Reason.UUID,
        Reason.REQUEST_ID,
        Reason.NUMBER,
        Reason.DIRECTORY,
        Reason.GIT,
        Reason.CALLER,
        Reason.CONTEXT_ABOVE,
    }
)
"""Reasons that are a text which changes above one that does not."""

REWRITTEN = frozenset(
    {
        Reason.EXAMPLES_SHUFFLED,
        Reason.JSON_KEYS,
        Reason.TOOL_ORDER,
        Reason.TOOL_KEYS,
        Reason.THINKING_REMOVED,
        Reason.WHITESPACE,
        Reason.IMAGE_MOVED,
        Reason.IMAGE_ADDRESS,
    }
)
"""Reasons for which a text that says the same is made of other tokens."""

_MOVE = "Put what stays first and what changes last: move it behind the shared part"
_KEEP = "Send it as it was sent before"

WORDS: dict[Reason, Words] = {
    Reason.CLOCK: Words(
        "a clock near the top",
        f"{_MOVE}, into the last message, or leave the time out.",
        Mend.MOVE_DOWN,
    ),
    Reason.DATE: Words(
        "a date near the top",
        f"{_MOVE}, into the last message; one date a day costs each prompt once a day.",
        Mend.MOVE_DOWN,
    ),
    Reason.UUID: Words(
        "a UUID near the top",
        f"{_MOVE}, or keep it out of the prompt: a model has no use for it.",
        Mend.MOVE_DOWN,
    ),
    Reason.REQUEST_ID: Words(
        "an id of the request, session or trace near the top",
        f"{_MOVE}, or keep it in a header or in `metadata`.",
        Mend.MOVE_DOWN,
    ),
    Reason.NUMBER: Words(
        "a number that changes near the top",
        f"{_MOVE}, into the last message.",
        Mend.MOVE_DOWN,
    ),
    Reason.DIRECTORY: Words(
        "a working directory or path near the top",
        f"{_MOVE}; what is the same for one project only goes behind what is the same for all.",
        Mend.MOVE_DOWN,
    ),
    Reason.GIT: Words(
        "the state of a git repository near the top",
        f"{_MOVE}, into the last message.",
        Mend.MOVE_DOWN,
    ),
    Reason.CALLER: Words(
        "the name or details of the user near the top",
        f"{_MOVE}: the instructions are the same for every user, so they go first.",
        Mend.MOVE_DOWN,
    ),
    Reason.PROMPT_EDITED: Words(
        "a system prompt that is edited by a word or two",
        "Settle on one wording; put what must differ behind the shared part.",
        Mend.AS_BEFORE,
    ),
    Reason.CONTEXT_ABOVE: Words(
        "text that changes above text that does not",
        f"{_MOVE}: documents and questions go behind instructions and examples.",
        Mend.MOVE_DOWN,
    ),
    Reason.EXAMPLES_SHUFFLED: Words(
        "the same parts in another order, such as few-shot examples",
        "Keep one order; shuffle by the day, not by the request, if order must vary.",
        Mend.AS_BEFORE,
    ),
    Reason.JSON_KEYS: Words(
        "JSON in the prompt with its keys in another order",
        "Write JSON with sorted keys (`sort_keys=True`).",
        Mend.AS_BEFORE,
    ),
    Reason.TOOL_ORDER: Words(
        "the same tools in another order",
        "Sort tools by name before they are sent.",
        Mend.AS_BEFORE,
    ),
    Reason.TOOL_KEYS: Words(
        "tools whose JSON has its keys in another order",
        "Write the schemas of tools with sorted keys.",
        Mend.AS_BEFORE,
    ),
    Reason.TOOL_EDITED: Words(
        "the description or schema of a tool that changes",
        "Keep what changes out of tools: they stand above the whole conversation.",
        Mend.AS_BEFORE,
    ),
    Reason.TOOLS_CHANGED: Words(
        "tools that come and go",
        "Offer all tools always, and say by `tool_choice` or in the last message which to use.",
        Mend.ALL_TOOLS,
    ),
    Reason.HISTORY_TRIMMED: Words(
        "history that is trimmed from its front",
        "Keep it while it fits, and trim seldom and much: half of it at once, say.",
        Mend.APPEND,
    ),
    Reason.HISTORY_EDITED: Words(
        "history that is rewritten, such as results cleared or summed up",
        f"{_KEEP}; where it grows too long, rewrite much at once and seldom.",
        Mend.AS_BEFORE,
    ),
    Reason.MESSAGE_MOVED: Words(
        "a message that moves down as the conversation grows, such as a reminder",
        "Leave it where it was and add it anew at the end.",
        Mend.APPEND,
    ),
    Reason.THINKING_REMOVED: Words(
        "what was thought is removed from the history",
        f"{_KEEP}, thoughts included, or never put them into the history.",
        Mend.AS_BEFORE,
    ),
    Reason.WHITESPACE: Words(
        "white space that differs, such as texts trimmed or lines ended in another way",
        f"{_KEEP}, to the letter.",
        Mend.AS_BEFORE,
    ),
    Reason.IMAGE_MOVED: Words(
        "images that move within the prompt",
        "Keep images where they were sent first.",
        Mend.AS_BEFORE,
    ),
    Reason.IMAGE_ADDRESS: Words(
        "the same image under another address, such as one signed anew",
        "Send one address for one image, or its bytes.",
        Mend.AS_BEFORE,
    ),
    Reason.OTHER_SALT: Words(
        "the same prompt under another cache salt",
        "Give one salt to those who may share.",
        Mend.SHARE,
    ),
    Reason.EVICTED: Words(
        "evicted before it was wanted again",
        "A larger pool keeps it: `--kv-memory`.",
        Mend.ROOM,
    ),
}
