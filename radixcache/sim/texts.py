"""Text of logs as token ids, without a model.

Owns: how a conversation becomes one text, and how text becomes ids where no tokenizer is given.
Does not know: files, blocks.
Idea: what a prefix cache sees of a log is where texts begin to differ, and how long they are.  Both
survive any tokenizer that works from left to right; a piece of at most four letters is about as
long as a token of English.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from radixcache.sim.logged import as_json, message_text

VOCABULARY = 2**31 - 1
"""Ids are below this."""

_PIECE = re.compile(r" ?\w{1,4}| ?[^\w\s]|\s")


def pieces(text: str) -> list[int]:
    """Return an id for each piece of a text, the same ones in every process.

    >>> pieces("to be") == pieces("to be or")[:2]
    True
    """
    return [
        zlib.crc32(piece.encode("utf-8", "surrogatepass")) % VOCABULARY
        for piece in _PIECE.findall(text)
    ]


def rendered(messages: Iterable[Mapping[str, Any]], tools: Iterable[Any] | None = None) -> str:
    """Return a conversation as one text in the ChatML manner, tools first, up to the reply."""
    parts = [f"<|tools|>{as_json(tool)}\n" for tool in tools or ()]
    for message in messages:
        parts.append(f"<|im_start|>{message.get('role', '')}\n{message_text(message)}<|im_end|>\n")
    return "".join((*parts, "<|im_start|>assistant\n"))
