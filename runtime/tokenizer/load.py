"""Text to token ids and back.

Owns: building a tokenizer from a GGUF's vocabulary or a Hugging Face folder; what is a control
token and what is text; the bytes of each token.  Does not know: models, requests, templates.
Idea: `tokenizers` splits text, but decoding is a table of bytes for each id, so a stream of ids can
be decoded piece by piece and give exactly the text that decoding it whole gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from runtime.errors import InvalidRequest, ModelFileError
from runtime.tokenizer.tool_format import MARKS
from runtime.tokenizer.vocabulary import (
    SPLITS,
    FolderTokens,
    GgufVocabulary,
    byte_level_bytes,
    read_json,
    token_decoding,
    without_first_space,
)

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # of `tokenizer.ggml.token_type`
# Control tokens that end a turn in every family that has them; files often name only one of them.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")


class Tokenizer:
    """Turns text into token ids and ids into text; immutable, so threads may share it.

    vocab_size      ids run from 0 to vocab_size - 1
    bos_id          the id that begins a sequence, or None
    eos_id          the id that ends one, or None
    eos_ids         every id that ends a generation, `eos_id` among them
    add_bos         whether `encode_prompt` puts `bos_id` in front
    special_tokens  the control tokens: text to id; in text they are text unless asked for
    token_bytes     what each id stands for, b"" for an id that is not used
    longest_token_bytes   bytes of the longest token: no text has fewer tokens than bytes over this
    """

    def __init__(
        self,
        *,
        first: tokenizers.Tokenizer,
        later: tokenizers.Tokenizer,
        token_bytes: Sequence[bytes],
        special_tokens: Mapping[str, int],
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: frozenset[int],
        add_bos: bool,
        drops_first_space: bool = False,
        swallows: Mapping[str, tuple[bool, bool]] | None = None,
    ) -> None:
        """Assemble a tokenizer; `tokenizer_from_gguf` and `tokenizer_from_folder` do it.

        first, later       what splits text at the start and behind a control token
        token_bytes        what each id stands for, b"" for an id that is not used
        drops_first_space  whether the first space of a decoded text was put there by encoding
        swallows           control tokens that take the white space (before, behind) with them
        """
        named = {text: i for text, i in special_tokens.items() if text}
        self.vocab_size = len(token_bytes)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.eos_ids = eos_ids | {named[end] for end in _ENDS if end in named}
        self.add_bos = add_bos and bos_id is not None
        self.special_tokens: Mapping[str, int] = MappingProxyType(named)
        self.drops_first_space = drops_first_space
        self._first = first
        self._later = later
        self.token_bytes = token_bytes
        # What ids stand for that are whole characters, without control tokens; noted as it is met.
        self.texts: dict[int, str] = {}
        self.longest_token_bytes = max(map(len, token_bytes), default=1)
        # A mark of a call may be a control token, but is a part of what a model says.
        self._skipped_ids = frozenset(i for text, i in named.items() if text not in MARKS)
        alternatives = []
        for text in sorted(named, key=len, reverse=True):
            before, behind = (swallows or {}).get(text, (False, False))
            alternatives.append(before * r"\s*" + re.escape(text) + behind * r"\s*")
        self._special_pattern = "|".join(alternatives)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the ids of a text.

        parse_special  whether the texts of control tokens become those tokens; else they are
                       split like any other text, which is what text from outside needs
        Errors: InvalidRequest for a text that is not Unicode (half of a surrogate pair).
        """
        return self.encode_pieces(self.split_special(text) if parse_special else [text])

    def encode_prompt(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the ids of a text that begins a sequence: `encode`, behind a bos if `add_bos`."""
        ids = self.encode(text, parse_special=parse_special)
        if self.add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        return ids

    def encode_later(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the ids of a text that follows other tokens; no merge crosses into those."""
        ids: list[int] = []
        for piece in self.split_special(text) if parse_special else [text]:
            ids += [piece] if isinstance(piece, int) else _encode(self._later, piece)
        return ids

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Return the ids of texts and ready ids in a row; no merge crosses from one to the next.

        Errors: InvalidRequest for a text that is not Unicode (half of a surrogate pair).
        """
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self.encode_behind(ids, piece)
        return ids

    def encode_behind(self, ids: Sequence[int], text: str) -> list[int]:
        """Return the ids of a text that follows `ids`; no merge crosses from one to the other."""
        return _encode(self._later if ids else self._first, text) if text else []

    def split_special(self, text: str, *, unless_before: str = "") -> list[str | int]:
        """Cut a text at its control tokens: texts and ids in order, empty texts left out.

        The leftmost token counts, and of several that begin there the longest.
        unless_before  a text that, right behind a control token's text, makes it plain text
        """
        if not self.special_tokens:
            return [text]
        guard = f"(?!{re.escape(unless_before)})" if unless_before else ""
        # The odd parts are what the group matched.
        parts = re.split(f"((?:{self._special_pattern}){guard})", text)
        pieces: list[str | int] = []
        for i, part in enumerate(parts):
            if i % 2:
                token = part if part in self.special_tokens else part.strip()
                pieces.append(self.special_tokens[token])
            elif part:
                pieces.append(part)
        return pieces

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD.

        skip_special  whether control tokens are left out, but for those that mark a tool call; else
                      they show as their text
        Errors: InvalidRequest for an id that is not in the vocabulary.
        """
        text = self.bytes_of(ids, skip_special=skip_special).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.drops_first_space else text

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """Return the bytes that ids stand for, which may end within a character.

        Errors: InvalidRequest for an id that is not in the vocabulary.
        """
        table, skipped = self.token_bytes, self._skipped_ids
        try:
            found = [table[i] for i in ids if not (skip_special and i in skipped)]
        except IndexError:
            raise self._unknown_id(max(ids)) from None
        if ids and min(ids) < 0:
            raise self._unknown_id(min(ids))
        return b"".join(found)

    def _unknown_id(self, token_id: int) -> InvalidRequest:
        return InvalidRequest(
            f"token id {token_id} is not in the vocabulary, which has ids 0 to "
            f"{self.vocab_size - 1}"
        )


def _encode(splitter: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        # Encoding a batch lets other threads run meanwhile; encoding one text does not.
        return splitter.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except TypeError as error:  # what the library makes of a str that has no UTF-8
        raise InvalidRequest(
            "the text holds half of a surrogate pair, which is no character; remove it or send "
            "the whole pair"
        ) from error


def tokenizer_from_gguf(vocabulary: GgufVocabulary, *, where: str) -> Tokenizer:
    """Build a tokenizer from a GGUF's vocabulary.

    where   the file, for messages
    Errors: ModelFileError for a kind of tokenizer that is not supported, or a damaged vocabulary.
    """
    v = vocabulary
    if v.model != "gpt2" or v.pre not in SPLITS:
        raise ModelFileError(
            f"{where} has a tokenizer of model {v.model!r} and pre-tokenizer {v.pre!r}; supported "
            f"are 'gpt2' with one of {', '.join(sorted(SPLITS))}"
        )
    if len(v.token_types) != len(v.tokens) or not 0 < len(v.tokens) <= v.vocab_size:
        raise ModelFileError(
            f"{where} lists {len(v.tokens)} tokens, {len(v.token_types)} token types and "
            f"{v.vocab_size} embeddings; it is damaged, fetch it again"
        )
    ends = v.other_eos_ids | ({v.eos_id} if v.eos_id is not None else set())
    begins = set() if v.bos_id is None else {v.bos_id}
    if not all(0 <= i < len(v.tokens) for i in ends | begins):
        raise ModelFileError(f"{where} names a bos or eos that is no token; fetch it again")
    typed = list(zip(v.tokens, v.token_types, strict=True))
    special = {t: i for i, (t, kind) in enumerate(typed) if kind in (_UNKNOWN, _CONTROL)}
    user_defined = [t for t, kind in typed if kind == _USER_DEFINED]
    splitter = _byte_level_bpe(v, special, user_defined, where)
    unmapped = set(special) | set(user_defined)
    token_bytes = [t.encode() if t in unmapped else byte_level_bytes(t) for t in v.tokens]
    token_bytes += [b""] * (v.vocab_size - len(v.tokens))
    return Tokenizer(
        first=splitter,
        later=splitter,
        token_bytes=token_bytes,
        special_tokens=special,
        bos_id=v.bos_id,
        eos_id=v.eos_id,
        eos_ids=ends,
        add_bos=v.pre == "llama-bpe" if v.add_bos is None else v.add_bos,
    )


def _byte_level_bpe(
    v: GgufVocabulary, special: Iterable[str], user_defined: Iterable[str], where: str
) -> tokenizers.Tokenizer:
    """Build what splits text as llama.cpp does for this `pre`, control tokens being text."""
    # Bytes above ASCII are letters in the merges, but a space never is: it separates the two.
    merges = [(m[: m.find(" ", 1)], m[m.find(" ", 1) + 1 :]) for m in v.merges]
    try:
        bpe = models.BPE(
            vocab={token: i for i, token in enumerate(v.tokens)},
            merges=merges,
            ignore_merges=v.pre == "llama-bpe",
        )
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(f"{where} has merges that do not fit its tokens: {error}") from error
    splitter = tokenizers.Tokenizer(bpe)
    if v.pre == "qwen2":
        splitter.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(expression), behavior="isolated")
        for expression in SPLITS[v.pre]
    ]
    splitter.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    splitter.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in user_defined])
    splitter.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in special])
    splitter.encode_special_tokens = True
    return splitter


def tokenizer_from_folder(folder: Path, *, vocab_size: int) -> Tokenizer:
    """Build a tokenizer from the `tokenizer.json` of a Hugging Face folder.

    vocab_size  rows of the model's embedding, which may be more than there are tokens
    Errors: ModelFileError for a file that is missing, damaged or of a kind not supported.
    """
    path = folder / "tokenizer.json"
    description = read_json(path)
    names = FolderTokens.read(folder)
    first = _from_description(description, path)
    without_space = without_first_space(description)
    later = first if without_space is None else _from_description(without_space, path)
    vocabulary = first.get_vocab(with_added_tokens=True)
    if max(vocabulary.values(), default=-1) >= vocab_size:
        raise ModelFileError(
            f"{path} has ids up to {max(vocabulary.values())}, but the model only {vocab_size} "
            "embeddings; the two do not belong together, fetch both again"
        )
    added = list(description.get("added_tokens", []))
    bytes_of, drops_first_space = token_decoding(description, path)
    unmapped = {entry["content"] for entry in added}
    token_bytes = [b""] * vocab_size
    for token, i in vocabulary.items():
        token_bytes[i] = token.encode() if token in unmapped else bytes_of(token)
    special = {
        entry["content"]: vocabulary[entry["content"]] for entry in added if entry["special"]
    }
    bos_id = names.bos_id(vocabulary)
    return Tokenizer(
        first=first,
        later=later,
        token_bytes=token_bytes,
        special_tokens=special,
        bos_id=bos_id,
        eos_id=names.eos_id(vocabulary),
        eos_ids=names.eos_ids(vocabulary),
        add_bos=bos_id is not None and first.encode("").ids[:1] == [bos_id],
        drops_first_space=drops_first_space,
        swallows={entry["content"]: (entry["lstrip"], entry["rstrip"]) for entry in added},
    )


def _from_description(description: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    try:
        splitter = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(description))
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(
            f"{path} is damaged or of a kind that the 'tokenizers' package does not know: {error}"
        ) from error
    splitter.no_padding()
    splitter.no_truncation()
    splitter.encode_special_tokens = True
    return splitter
