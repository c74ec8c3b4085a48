"""Grammars to masks over the vocabulary; the one file that uses `llguidance`.

Owns: the library's view of our tokenizer, its limits, and one matcher for each branch.  Does not
know: requests, steps, sampling; who asked for the grammar.
Idea: the library sees a token as the bytes that our own table says it stands for, so whatever the
tokenizer was built from, the mask covers exactly the model's ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from runtime.closed_schemas import closed
from runtime.errors import InvalidRequest, RequestError
from runtime.grammar import Grammar
from runtime.tokenizer.load import Tokenizer

_WHITE_SPACE = (
    r"[ \n\r\t]{0,24}"  # an endless run of it would be valid JSON, and small models do it
)
_REASON_LEN = 300


class GrammarFailure(RequestError):
    """A grammar could not be followed further: it grew too complex, or a token broke it."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer; may be used from any thread.

    Building one takes tenths of a second, more for a large vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = LLTokenizer(
            _Vocabulary(tokenizer),
            n_vocab=tokenizer.vocab_size,
            eos_token=sorted(tokenizer.eos_ids),
        )
        self._mask_bytes = -(-tokenizer.vocab_size // 32) * 4

    def compile(self, grammar: Grammar) -> GrammarConstraint:
        """Return a constraint at its beginning; releases the interpreter while it works.

        Raises InvalidRequest, with the library's reason, for a grammar that is wrong, too complex,
        or that no output can meet.
        """
        try:
            source = _library_source(grammar)
        except ValueError as error:
            raise grammar.refusal(str(error)) from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_limits(grammar))
        if matcher.is_error():
            raise grammar.refusal(_reason(matcher))
        constraint = GrammarConstraint(matcher, mask_bytes=self._mask_bytes)
        try:
            constraint.allowed()  # so that what fails at once, or takes long, does so here
        except GrammarFailure as error:
            raise grammar.refusal(str(error)) from None
        return constraint


class GrammarConstraint:
    """A grammar on its way through one output.

    Every method may raise GrammarFailure, and does so for good once it did.
    """

    def __init__(self, matcher: LLMatcher, *, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._mask: bytes | None = None

    def allowed(self) -> bytes:
        """Return one bit a token id of the model, bit i % 32 of word i // 32 of packed int32.

        An end of sequence is allowed exactly where the output may end.  Computed once for each
        token accepted: some 0.1 ms, at worst tens.
        """
        if self._mask is None:
            mask: bytes = self._matcher.compute_bitmask()
            self._check()
            self._mask = mask[: self._mask_bytes]  # the library adds a word
        return self._mask

    def accept(self, token_id: int) -> None:
        """Note the token that was drawn.  Raises GrammarFailure for one that is not allowed."""
        self._mask = None
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_done(self) -> bool:
        """True where nothing but the end may follow."""
        done: bool = self._matcher.is_stopped()
        return done

    def fork(self) -> GrammarConstraint:
        """Return another one in the same state; neither sees what the other accepts."""
        other = GrammarConstraint(self._matcher.deep_copy(), mask_bytes=self._mask_bytes)
        other._mask = self._mask
        return other

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailure(f"the grammar failed: {_reason(self._matcher)}")


class _Vocabulary:
    """What the library reads from a tokenizer, by its names."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        ends = sorted(tokenizer.eos_ids)
        if not ends:
            raise InvalidRequest("this model has no end of sequence, which a grammar needs")
        self.eos_token_id = ends[0] if tokenizer.eos_id is None else tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens: Sequence[bytes] = tokenizer.token_bytes
        self.special_token_ids: Sequence[int] = sorted(tokenizer.special_tokens.values())
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text)


def _limits(grammar: Grammar) -> LLParserLimits:
    """Return limits under which no step of the engine waits long for a mask.

    A schema has no ambiguity worth the name.  Rules from outside may, and the time for a mask grows
    with the square of it: so they get less, some 20 ms for a mask and seconds for an output.
    """
    is_foreign = grammar.kind == "lark" and not grammar.schemas
    return LLParserLimits(
        verbose_errors=False,  # which would show the grammar's inside
        step_lexer_fuel=100_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        max_items_in_row=500 if is_foreign else 2_000,
        step_max_items=5_000 if is_foreign else 20_000,
    )


def _library_source(grammar: Grammar) -> str:
    """Write a grammar as the library takes it.  Raises ValueError."""
    source: str
    match grammar.kind:
        case "json_object":
            source = _schema_source({"type": "object"}, strict=True)
        case "json_schema":
            source = _schema_source(closed(json.loads(grammar.source)), strict=grammar.strict)
        case "regex":
            source = LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            quoted = (json.dumps(choice, ensure_ascii=False) for choice in grammar.choices())
            source = LLMatcher.grammar_from_lark(f"start: {' | '.join(quoted)}\n")
        case "lark":
            rules = [grammar.source]
            for number, text in enumerate(grammar.schemas):
                is_strict = grammar.strict and number == len(grammar.schemas) - 1
                schema = closed(json.loads(text)) | {"x-guidance": _options(strict=is_strict)}
                rules.append(f"schema_{number}: %json {json.dumps(schema)}")
            source = LLMatcher.grammar_from_lark("\n".join([*rules, ""]))
    return source


def _schema_source(schema: dict[str, Any], *, strict: bool) -> str:
    source: str = LLMatcher.grammar_from_json_schema(schema, overrides=_options(strict=strict))
    return source


def _options(*, strict: bool) -> dict[str, Any]:
    return {"whitespace_pattern": _WHITE_SPACE, "lenient": not strict}


def _reason(matcher: LLMatcher) -> str:
    reason: str = matcher.get_error().replace("<non-verbose/>", "").strip()
    return reason if len(reason) <= _REASON_LEN else f"{reason[:_REASON_LEN]}…"
