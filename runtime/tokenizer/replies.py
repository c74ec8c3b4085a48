"""Which token ids a reply's text was made of.

Owns: the replies given lately.  Does not know: conversations, templates, the cache.
Idea: a model may spell a text with other tokens than encoding that text gives, and clients send
the text back.  Encoded anew, the history would leave the cached prefix at that reply; with the ids
kept, the next turn begins with exactly what was computed.  A reply is known only behind the very
prompt that it answered, so no conversation can change another's ids.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from radixcache.namespace import Namespace
from radixcache.tokens import pack_tokens, unpack_tokens

DEFAULT_BYTES = 32 << 20
"""Memory for replies: their text, their packed ids, and what each takes beside them."""

ENTRY_BYTES = 256
"""What a reply takes beside its text and ids, or a million short ones would hardly count."""

_Key = tuple[Namespace, bytes, str]


class ReplyMemory:
    """The latest replies by prompt and text; the least recently used go first.

    May be used from any thread.  Every operation costs O(prompt + reply).
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._replies: OrderedDict[_Key, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def remember(
        self, namespace: Namespace, prompt: bytes, text: str, token_ids: Sequence[int]
    ) -> None:
        """Note that `text` was generated as `token_ids` behind a packed prompt."""
        packed = pack_tokens(token_ids)
        size = _size(text, packed)
        if not text or size > self._max_bytes:
            return
        key = _key(namespace, prompt, text)
        with self._lock:
            earlier = self._replies.pop(key, None)
            if earlier is not None:
                self._num_bytes -= _size(text, earlier)
            self._replies[key] = packed
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                (_, _, old_text), old_ids = self._replies.popitem(last=False)
                self._num_bytes -= _size(old_text, old_ids)

    def recall(self, namespace: Namespace, prompt: Sequence[int], text: str) -> list[int] | None:
        """Return the ids that `text` was generated as behind a prompt, or None if not known."""
        key = _key(namespace, pack_tokens(prompt), text)
        with self._lock:
            packed = self._replies.get(key)
            if packed is None:
                return None
            self._replies.move_to_end(key)
        return unpack_tokens(packed)


def _key(namespace: Namespace, prompt: bytes, text: str) -> _Key:
    return namespace, blake2b(prompt, digest_size=16).digest(), text


def _size(text: str, packed: bytes) -> int:
    return ENTRY_BYTES + 4 * len(text) + len(packed)  # up to four bytes a character
