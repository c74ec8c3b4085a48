"""From what a caller appends to a session, to the tokens that it then has.

Owns: whether an addition is text, ids or messages, and what each makes of the branch.  Does not
know: sessions' lives, who calls.
Idea: an addition is computed from a state and applied to that state or not at all, so that text
can be encoded on any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from radixcache.namespace import Namespace
from runtime.accepting import check_tokens
from runtime.errors import InvalidRequest
from runtime.loading import Runtime
from runtime.request import pack_prompt
from runtime.sessions.conversation import Conversation, Reply, reply_to
from runtime.sessions.records import SessionState
from runtime.sessions.scoring import MAX_CHOICES, check_choices

Addition = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or messages."""


class Content(msgspec.Struct, frozen=True):
    """What a session consists of: packed ids, and the messages that they are, if they are."""

    tokens: bytes = b""
    conversation: Conversation | None = None


EMPTY = Content()


def content_of(state: SessionState) -> Content:
    """Return what a session consists of."""
    return Content(state.tokens, state.conversation)


def extended(
    runtime: Runtime,
    content: Content,
    addition: Addition,
    *,
    namespace: Namespace,
    parse_special: bool = False,
) -> Content:
    """Return a session's content with something added.

    addition       messages go to a conversation or an empty session only; a conversation that
                   text or ids are added to is none any more
    parse_special  whether control tokens written in a text act as such

    Raises InvalidRequest, PromptTooLong.
    """
    if isinstance(addition, str):
        begun = bool(content.tokens)
        ids = runtime.prompt_tokens(addition, parse_special=parse_special, begun=begun)
    elif not isinstance(addition, list | tuple):
        raise InvalidRequest(
            f"append a text, a list of token ids or a list of messages, not {addition!r:.60}",
            param="prompt",
        )
    elif addition and all(isinstance(item, Mapping) for item in addition):
        messages: list[Any] = [dict(item) for item in addition]
        return _with_messages(runtime, content, messages, namespace)
    else:
        ids = list(addition)
    return Content(content.tokens + pack_prompt(ids)) if ids else content


def choice_tokens(runtime: Runtime, choices: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """Return the ids of continuations to be scored, texts encoded as `append` would.

    Raises InvalidRequest for what is none, no choices, too many, or one without tokens.
    """
    if not isinstance(choices, list | tuple):
        raise InvalidRequest(f"choices are a list, not {choices!r:.60}", param="choices")
    ids: list[list[int]] = []
    for place, choice in enumerate(choices[: MAX_CHOICES + 1]):
        if isinstance(choice, str):
            ids.append(runtime.prompt_tokens(choice, begun=True))
        elif isinstance(choice, list | tuple):
            ids.append(_checked(runtime, choice, param=f"choices[{place}]"))
        else:
            raise InvalidRequest(
                f"a choice is a text or a list of token ids, not {choice!r:.60}",
                param=f"choices[{place}]",
            )
    check_choices(ids)
    return ids


def _checked(runtime: Runtime, ids: Sequence[int], *, param: str) -> list[int]:
    try:
        check_tokens(pack_prompt(ids), runtime.engine.vocab_size)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=param) from None
    return list(ids)


def replied(
    runtime: Runtime, state: SessionState, text: str, token_ids: tuple[int, ...]
) -> Conversation | None:
    """Return a session's messages with what it generated, noting the ids of the whole reply.

    None where the session is no conversation.
    """
    if state.conversation is None or not token_ids:
        return state.conversation
    reply: Reply = reply_to(state.conversation, state.tokens, text, token_ids)
    runtime.remember_reply(reply.prompt, reply.text, reply.token_ids, namespace=state.namespace)
    return reply.conversation


def _with_messages(
    runtime: Runtime, content: Content, added: list[dict[str, Any]], namespace: Namespace
) -> Content:
    if content.conversation is None and content.tokens:
        raise InvalidRequest(
            "this session holds tokens that are no messages: append a text or token ids",
            param="messages",
        )
    before = content.conversation.messages if content.conversation else []
    conversation = Conversation.of([*before, *added])
    ids = runtime.chat_tokens(conversation.messages, namespace=namespace)
    return Content(pack_prompt(ids), conversation)
