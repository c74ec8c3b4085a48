"""From conversations in Anthropic's words to token ids, for the endpoints that want them.

Owns: where a prefill stands, and where marked blocks end.  Does not know: HTTP, what the ids are
for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache.namespace import Namespace
from runtime.errors import InvalidRequest
from runtime.loading import Runtime
from runtime.server.anthropic import Conversation
from runtime.server.anthropic_blocks import CacheControl


def anthropic_prompt(runtime: Runtime, body: Conversation, namespace: Namespace) -> list[int]:
    """Return a conversation's token ids, the text that the reply goes on from at their end.

    Raises what `Runtime.chat_tokens` raises.
    """
    ids = runtime.chat_tokens(
        body.template_messages(), tools=body.template_tools(), namespace=namespace
    )
    return ids + (runtime.prompt_tokens(body.prefill, begun=True) if body.prefill else [])


def marked_ends(
    runtime: Runtime, body: Conversation, namespace: Namespace, ids: Sequence[int]
) -> Iterator[tuple[CacheControl, int]]:
    """Yield each mark of a conversation, and how many of its tokens lie before the block's end.

    ids  of the whole conversation

    Where a block ends is seen by writing the conversation up to it: as far as that agrees with the
    whole, it is the same prefix.  Texts are compared where the ids are made of the very bytes of
    the text, else ids: to encode an agent's long prompt anew for each mark takes longer than to
    serve it from the cache.  A mark whose beginning the template refuses to write is left out.
    """
    marks, template = body.breakpoints(), runtime.chat_template
    if not marks or template is None:
        return
    pieces = [runtime.tokenizer.token_bytes[token] for token in ids]
    whole = template.render(body.template_messages(), tools=body.template_tools())
    written = np.frombuffer((whole + (body.prefill or "")).encode(), np.uint8)
    is_same_text = b"".join(pieces) == written.tobytes()
    ends = list(accumulate(map(len, pieces)))
    for control, head in marks:
        messages, tools = head.template_messages(without_prefill=False), head.template_tools()
        with suppress(InvalidRequest):
            if is_same_text:
                text = template.render(messages, tools=tools, add_generation_prompt=False)
                agreeing = _agreeing(np.frombuffer(text.encode(), np.uint8), written)
                yield control, bisect_right(ends, agreeing)
            else:
                begun = runtime.chat_tokens(
                    messages, tools=tools, namespace=namespace, add_generation_prompt=False
                )
                yield control, _agreeing(np.asarray(begun), np.asarray(ids))


def _agreeing(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Return with how many equal entries two arrays begin."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
