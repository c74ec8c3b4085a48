"""Log-probabilities as OpenAI tells them, for chats and for completions.

Owns: how a token is written, and where it begins in the text.  Does not know: where the numbers
come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.plan import TokenLogprobs
from runtime.server.answers import ChatLogprob, ChatLogprobs, TextLogprobs, TopLogprob
from runtime.tokenizer.detokenizer import Detokenizer
from runtime.tokenizer.load import Tokenizer

IMPOSSIBLE = -9999.0
"""What stands for the logarithm of 0, which JSON can't hold; OpenAI's number."""


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> ChatLogprobs:
    """Return a chat's form of the log-probabilities of some tokens.

    num_top  so many of the likeliest are told
    """
    return ChatLogprobs(
        [
            ChatLogprob(
                *_told(tokenizer, token, found.token),
                [
                    TopLogprob(*_told(tokenizer, *pair))
                    for pair in zip(found.top_ids[:num_top], found.top, strict=False)
                ],
            )
            for token, found in zip(ids, logprobs, strict=True)
        ]
    )


def _told(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    spelled = tokenizer.bytes_of([token], skip_special=False)
    return spelled.decode("utf-8", "replace"), max(logprob, IMPOSSIBLE), list(spelled)


class TextLogprobWriter:
    """Writes the log-probabilities of one completion, piece by piece.

    num_top   so many of the likeliest are told beside the token itself; 0: none
    specials  whether control tokens show in the text
    offset    characters of the text before the next token

    A token begins where the last character that the tokens before it made whole has ended.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, specials: bool = False) -> None:
        self.offset = 0
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._decoder = Detokenizer(tokenizer, skip_special=not specials)

    def write(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> TextLogprobs:
        """Write the next tokens; None of one where nothing is known."""
        tokens, offsets = [], []
        for token in ids:
            tokens.append(self._spelled(token))
            offsets.append(self.offset)
            self.offset += len(self._decoder.push([token]))
        return TextLogprobs(
            tokens=tokens,
            token_logprobs=[None if p is None else max(p.token, IMPOSSIBLE) for p in logprobs],
            top_logprobs=[
                None if found is None else self._top(token, found)
                for token, found in zip(tokens, logprobs, strict=True)
            ]
            if self._num_top
            else None,
            text_offset=offsets,
        )

    def _top(self, token: str, found: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that stands there whether it is one of them or not."""
        pairs = zip(found.top_ids[: self._num_top], found.top, strict=False)
        top = {self._spelled(i): max(logprob, IMPOSSIBLE) for i, logprob in pairs}
        top.setdefault(token, max(found.token, IMPOSSIBLE))
        return top

    def _spelled(self, token: int) -> str:
        spelled = self._tokenizer.bytes_of([token], skip_special=False)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def joined(pieces: Sequence[TextLogprobs]) -> TextLogprobs:
    """Put pieces together that follow each other."""
    if len(pieces) == 1:
        return pieces[0]
    tops = [piece.top_logprobs for piece in pieces]
    return TextLogprobs(
        tokens=[token for piece in pieces for token in piece.tokens],
        token_logprobs=[number for piece in pieces for number in piece.token_logprobs],
        top_logprobs=None
        if not tops or tops[0] is None
        else [top for piece in tops for top in piece or ()],
        text_offset=[offset for piece in pieces for offset in piece.text_offset],
    )
