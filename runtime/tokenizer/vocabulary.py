"""What model files say about their tokens, before any library splits text with them.

Owns: the vocabulary record of a GGUF and its ways to cut text; which files of a Hugging Face folder
name bos and eos; the bytes that a token stands for.  Does not know: the `tokenizers` package.
Idea: each kind of vocabulary spells bytes its own way; here the spelling is undone token by token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from runtime.errors import ModelFileError

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN_SPLIT = (  # of cl100k and its heirs; %s is how many digits stay together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "llama-bpe": (_MODERN_SPLIT % "{1,3}",),
    "qwen2": (_MODERN_SPLIT % "",),
}
"""How text is cut before merging, by the name in `tokenizer.ggml.pre`: expressions that are applied
one after the other, each to the pieces that the one before left."""


class GgufVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What a GGUF file says about its tokenizer, as read from the `tokenizer.ggml` keys.

    pre         how text is split before merging
    merges      two tokens separated by a space, best first
    add_bos     None where the file does not say
    vocab_size  rows of the embedding, which may be more than `tokens`
    """

    model: str
    pre: str
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    bos_id: int | None
    eos_id: int | None
    other_eos_ids: frozenset[int]
    add_bos: bool | None
    vocab_size: int


class FolderTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens of a Hugging Face folder begin and end a text, from its small JSON files.

    Each is given as a token's text or its id, and a folder may name several ends.
    """

    begins: tuple[str | int, ...]
    ends: tuple[str | int, ...]

    @classmethod
    def read(cls, folder: Path) -> FolderTokens:
        """Read `tokenizer_config.json`, `generation_config.json` and `config.json`.

        Errors: ModelFileError for a file that is no JSON object; a missing one says nothing.
        """
        of_tokenizer, *of_ids = (
            read_json(folder / name, required=False)
            for name in ("tokenizer_config.json", "generation_config.json", "config.json")
        )
        begins = _named(of_tokenizer.get("bos_token"))
        ends = _named(of_tokenizer.get("eos_token"))
        for source in of_ids:
            begins += _named(source.get("bos_token_id"))
            ends += _named(source.get("eos_token_id"))
        return cls(begins=begins, ends=ends)

    def bos_id(self, vocabulary: Mapping[str, int]) -> int | None:
        """Return the id that begins a text: the first that is named and exists, or None."""
        return next(iter(_ids(self.begins, vocabulary)), None)

    def eos_id(self, vocabulary: Mapping[str, int]) -> int | None:
        """Return the id that ends a text: the first that is named and exists, or None."""
        return next(iter(_ids(self.ends, vocabulary)), None)

    def eos_ids(self, vocabulary: Mapping[str, int]) -> frozenset[int]:
        """Return every id that ends a text."""
        return frozenset(_ids(self.ends, vocabulary))


def _named(value: Any) -> tuple[str | int, ...]:
    """Flatten what a JSON file gives for a token: a text, an id, a record, a list, or nothing."""
    if isinstance(value, dict):
        value = value.get("content")
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, (str, int)))


def _ids(names: tuple[str | int, ...], vocabulary: Mapping[str, int]) -> list[int]:
    known = set(vocabulary.values())
    ids = (vocabulary.get(name, -1) if isinstance(name, str) else name for name in names)
    return [i for i in ids if i in known]


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """Return the JSON object in a file; {} for a missing one that is not required.

    Errors: ModelFileError for a file that is missing, unreadable or no JSON object.
    """
    if not required and not path.exists():
        return {}
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelFileError(
            f"{path} is missing; the model's folder must be complete, fetch it again"
        ) from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds no JSON object")
    return value


def _byte_of_letter() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    Printable bytes stand for themselves, the others, in order, for the letters from U+0100 on.
    Source: Radford et al. 2019 (GPT-2).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_LETTER: Mapping[str, int] = MappingProxyType(_byte_of_letter())
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary.

    >>> byte_level_bytes("Ġcaf\u00c3\u00a9").decode()
    ' café'
    """
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:  # not a byte-level token: an addition that the file does not mark as one
        return token.encode()


def _spaced_bytes(token: str) -> bytes:
    """Return the bytes of a token where U+2581 stands for a space and `<0x0A>` for one byte."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def token_decoding(
    description: Mapping[str, Any], path: Path
) -> tuple[Callable[[str], bytes], bool]:
    """Read from a `tokenizer.json` how its tokens become bytes.

    Returns the function for one token, and whether the first space of a whole text is dropped.
    Errors: ModelFileError for decoders that are neither byte-level nor SentencePiece's.
    """
    decoder = description.get("decoder") or {}
    steps = decoder.get("decoders") or [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes, False
    spaced = kinds[0] in ("Replace", "Metaspace") and "\u2581" in str(steps[0])
    if spaced and set(kinds[1:]) <= {"ByteFallback", "Fuse", "Strip"}:
        never = steps[0].get("prepend_scheme") == "never"
        return _spaced_bytes, "Strip" in kinds or (kinds[0] == "Metaspace" and not never)
    raise ModelFileError(
        f"{path} decodes by {kinds}, which is not supported; supported are byte-level BPE and "
        "SentencePiece-like tokenizers"
    )


def without_first_space(description: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a `tokenizer.json` that puts no space before a text because it is the first one.

    It splits what follows a control token, where such a space does not belong.  None where the
    given one puts none already.
    """
    outer = description.get("pre_tokenizer") or {}
    steps = [
        step | {"prepend_scheme": "never"} if step.get("prepend_scheme") == "first" else step
        for step in outer.get("pretokenizers", [outer])
    ]
    inner = outer | {"pretokenizers": steps} if "pretokenizers" in outer else steps[0]
    return None if inner == outer else {**description, "pre_tokenizer": inner}
