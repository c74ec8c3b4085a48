"""Which token ids a reply's text was made of.

Owns: the replies given lately.  Does not know: conversations, templates, the cache.
Idea: a model may spell a text with other tokens than encoding that text gives, and clients send
the text back.  Encoded anew, the history would leave the cached prefix at that reply; with the ids
kept, the next turn begins with exactly what was computed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from radixcache.namespace import Namespace
from radixcache.tokens import pack_tokens, unpack_tokens

DEFAULT_BYTES = 32 << 20
"""Memory for replies, in bytes of text and packed ids."""


class ReplyMemory:
    """The latest replies, text to ids, apart for each namespace; least recently used go first.

    May be used from any thread.  Every operation costs O(length of the reply).
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._replies: OrderedDict[tuple[Namespace, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, namespace: Namespace, text: str, token_ids: list[int]) -> None:
        """Note that `text` was generated as `token_ids`; one larger than the memory is not."""
        packed = pack_tokens(token_ids)
        size = _size(text, packed)
        if not text or size > self._max_bytes:
            return
        key = (namespace, text)
        with self._lock:
            earlier = self._replies.pop(key, None)
            if earlier is not None:
                self._num_bytes -= _size(text, earlier)
            self._replies[key] = packed
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                (_, old_text), old_ids = self._replies.popitem(last=False)
                self._num_bytes -= _size(old_text, old_ids)

    def recall(self, namespace: Namespace, text: str) -> list[int] | None:
        """Return the ids that `text` was generated as last, or None if it was not, or long ago."""
        with self._lock:
            packed = self._replies.get((namespace, text))
            if packed is None:
                return None
            self._replies.move_to_end((namespace, text))
        return unpack_tokens(packed)


def _size(text: str, packed: bytes) -> int:
    return 4 * len(text) + len(packed)  # a str takes up to four bytes a character
