"""Parts of a server that fail where they are told to: fakes to inject.

Owns: how each fails.  Does not know: what the server makes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runtime.server.journal import Journal
from runtime.tokenizer.load import Tokenizer

POISON = 777
"""A token id that what is told to fail looks for."""
GOOD_TOKEN = 1000


class Rule:
    """A constraint that lets one token be written, and fails where it is told to.

    fails_in  its method that fails, from the second token on
    """

    is_done = False

    def __init__(self, fails_in: str, vocab_size: int, token: int, *, num: int = 0) -> None:
        self._fails_in = fails_in
        self._vocab_size = vocab_size
        self._token = token
        self._num = num

    def allowed(self) -> bytes:
        """One token."""
        self._fail("allowed")
        bits = np.zeros(self._vocab_size, bool)
        bits[self._token] = True
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token_id: int) -> None:
        """Count it."""
        self._fail("accept")
        self._num += 1

    def fork(self) -> Rule:
        """Another one."""
        if self._fails_in == "fork" and self._num == -1:
            raise ZeroDivisionError("a bug in fork")
        num = -1 if self._fails_in == "fork" else self._num  # of the request itself comes first
        return Rule(self._fails_in, self._vocab_size, self._token, num=num)

    def _fail(self, where: str) -> None:
        if self._fails_in == where and self._num:
            raise ZeroDivisionError(f"a bug in {where}")


class Compiler:
    """A constrainer whose constraints fail where the "regex" says."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def compile(self, grammar: Any) -> Rule:
        """The method that fails is the source; "compile" is this one."""
        if grammar.source == "compile":
            raise ZeroDivisionError("a bug in compile")
        token = POISON if grammar.source == "bytes_of" else GOOD_TOKEN
        return Rule(grammar.source, self._vocab_size, token)


class FussyTokenizer:
    """A tokenizer that knows no text for one token, and no tokens for one text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """Raises for the poisoned one."""
        if POISON in ids:
            raise ZeroDivisionError("a bug in bytes_of")
        return self._tokenizer.bytes_of(ids, skip_special=skip_special)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Raises for a text that asks for it."""
        if "poison" in text:
            raise ZeroDivisionError("a bug in encode")
        return self._tokenizer.encode(text, parse_special=parse_special)

    def encode_prompt(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Raises for a text that asks for it."""
        return self.encode(text, parse_special=parse_special)

    def encode_later(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Raises for a text that asks for it."""
        return self.encode(text, parse_special=parse_special)


class BrokenTemplate:
    """A template that fails in a way that no template should."""

    def encode(self, *args: Any, **options: Any) -> list[int]:
        """Raises."""
        raise ZeroDivisionError("a bug in the template")


class BrokenTracer:
    """A tracer that takes nothing."""

    num_asked = 0

    def record(self, journal: Journal, headers: Mapping[str, str], *, ended_ns: int) -> None:
        """Raises."""
        self.num_asked += 1
        raise ZeroDivisionError("a bug in the tracer")

    def close(self) -> None:
        """Nothing is left."""


class BrokenHandler(logging.Handler):
    """A handler of logs that takes nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raises."""
        raise OSError("the disk is full")


class Panic(BaseException):
    """What no `except Exception` catches, as a panic in a library is."""
