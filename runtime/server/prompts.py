"""From conversations in Anthropic's words to token ids, for the endpoints that want them.

Owns: where a prefill stands.  Does not know: HTTP, what the ids are for.
"""

from __future__ import annotations

from radixcache.namespace import Namespace
from runtime.loading import Runtime
from runtime.server.anthropic import Conversation


def anthropic_prompt(runtime: Runtime, body: Conversation, namespace: Namespace) -> list[int]:
    """Return a conversation's token ids, the text that the reply goes on from at their end.

    Raises what `Runtime.chat_tokens` raises.
    """
    ids = runtime.chat_tokens(
        body.template_messages(), tools=body.template_tools(), namespace=namespace
    )
    return ids + (runtime.prompt_tokens(body.prefill, begun=True) if body.prefill else [])
