"""What an output must look like: the record, and the bounds that keep a hostile one from costing.

Owns: kinds of grammars, how large and how nested each may be.  Does not know: tokens, and how a
grammar is enforced; `runtime.decoding.grammar` does, if its optional library is there.
Idea: nothing can stop a grammar that is being compiled, so what would take long is refused before:
by size, by nesting, and by how many states its repetitions and multiples stand for.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal

import msgspec

from runtime.errors import InvalidRequest
from runtime.request import Constraint
from runtime.tokenizer.load import Tokenizer

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

MAX_SOURCE_BYTES = 256 << 10
MAX_SCHEMA_DEPTH = 64
"""Objects and arrays within each other in a JSON schema."""
MAX_SCHEMA_TEXT_LEN = 16 << 10
"""Characters of one string in a JSON schema."""
MAX_PROPERTIES = 2_000
"""Properties in all schemas of a grammar: the cost grows with their square."""
MAX_MULTIPLE = 10_000
"""Product of the different `multipleOf` of a schema; decimals count by their digits."""
MAX_REGEX_LEN = 4096
MAX_REGEX_WEIGHT = 50_000
"""Characters of a regex once its counted repetitions are written out."""
MAX_CHOICES = 4096

_LARK_SCHEMA = re.compile(r"%\s*(json|lark|regex)\b")
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_COUNT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What an output must look like, not compiled yet.

    kind     json_object  any JSON object; `source` is not used
             json_schema  a JSON schema, as JSON
             regex        a regular expression for the whole output, in Rust's syntax
             choice       a JSON list of texts, one of which is the output
             lark         a context-free grammar in llguidance's dialect of Lark; `start` begins it
    source   the text of it
    schemas  of kind lark: JSON schemas that its rules name as schema_0, schema_1, …
    strict   whether a keyword of a schema that can't be enforced is refused, or passed over; where
             there are `schemas`, this is of the last one, and the others pass it over
    param    the field of the request that it came from, for messages

    Raises InvalidRequest for one that is malformed as JSON or over a limit.

    >>> Grammar(kind="choice", source='["yes", "no"]').source
    '["yes", "no"]'
    """

    kind: GrammarKind
    source: str = ""
    schemas: tuple[str, ...] = ()
    strict: bool = True
    param: str = "response_format"

    def __post_init__(self) -> None:
        size = sum(len(text.encode("utf-8", "replace")) for text in (self.source, *self.schemas))
        if size > MAX_SOURCE_BYTES:
            raise self.refusal(f"it has {size} bytes, and at most {MAX_SOURCE_BYTES} are allowed")
        if self.schemas and self.kind != "lark":
            raise self.refusal("only a grammar of kind lark refers to schemas")
        match self.kind:
            case "json_schema":
                self._check_schemas(self.source)
            case "regex":
                self._check_regex(self.source)
            case "choice":
                self.choices()
            case "lark":
                self._check_lark()

    def refusal(self, reason: str) -> InvalidRequest:
        """Return the error that says why this grammar is not served."""
        kind = "json schema" if self.schemas else self.kind.replace("_", " ")
        return InvalidRequest(f"the {kind} can't be enforced: {reason}", param=self.param)

    def choices(self) -> list[str]:
        """Return the texts of kind choice.  Raises InvalidRequest for anything but 1 to 4,096."""
        try:
            choices = msgspec.json.decode(self.source, type=list[str])
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            raise self.refusal(f"its choices must be a list of texts: {error}") from None
        if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
            raise self.refusal(f"give 1 to {MAX_CHOICES} choices, none of them empty")
        return choices

    def _check_lark(self) -> None:
        found = _LARK_SCHEMA.search(self.source)
        if found:
            raise self.refusal(f"{found[0]} is not served; ask for a json_schema or a regex")
        if regex_weight(self.source, classes=False) > MAX_REGEX_WEIGHT + len(self.source):
            raise self.refusal("its repetitions multiply to too much")
        self._check_schemas(*self.schemas)

    def _check_regex(self, regex: str) -> None:
        if len(regex) > MAX_REGEX_LEN:
            raise self.refusal(f"a regex has at most {MAX_REGEX_LEN} characters, not {len(regex)}")
        if regex_weight(regex) > MAX_REGEX_WEIGHT:
            raise self.refusal(f"the repetitions of /{regex[:80]}/ multiply to too much")

    def _check_schemas(self, *sources: str) -> None:
        num = 0
        for source in sources:
            for name, value in self._checked_pairs(source):
                num += len(value) if name == "properties" and isinstance(value, dict) else 0
        if num > MAX_PROPERTIES:
            raise self.refusal(f"it has {num} properties, and at most {MAX_PROPERTIES} are allowed")

    def _checked_pairs(self, source: str) -> list[tuple[str, Any]]:
        """Return every name in a schema with its value.  Raises InvalidRequest for a bad one."""
        pairs: list[tuple[str, Any]] = []

        def note(found: list[tuple[str, Any]]) -> dict[str, Any]:
            """Take every pair of an object on the way."""
            pairs.extend(found)  # every one: of a name given twice only the last stays in a dict
            return dict(found)

        try:
            schema = json.loads(source, object_pairs_hook=note, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise self.refusal(f"the schema is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise self.refusal("a schema is a JSON object")
        for depth, text in _walk(schema):
            if depth > MAX_SCHEMA_DEPTH:
                raise self.refusal(f"it nests deeper than {MAX_SCHEMA_DEPTH} levels")
            if len(text) > MAX_SCHEMA_TEXT_LEN:
                raise self.refusal(f"a text in it has more than {MAX_SCHEMA_TEXT_LEN} characters")
        multiples = {v for k, v in pairs if k == "multipleOf" and isinstance(v, int | float)}
        if math.prod(map(_num_states, multiples)) > MAX_MULTIPLE:
            raise self.refusal(f"its multipleOf multiply to more than {MAX_MULTIPLE}")
        for name, value in pairs:
            if name == "x-guidance":
                raise self.refusal("x-guidance is not served; leave it out")
            if name == "pattern" and isinstance(value, str):
                self._check_regex(value)
            if name == "patternProperties" and isinstance(value, dict):
                for regex in value:
                    self._check_regex(regex)
        return pairs


class Constrainer:
    """Compiles grammars for one tokenizer; what they need of it is built at the first one.

    May be used from any thread.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compile: Callable[[Grammar], Constraint] | None = None
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Constraint:
        """Return a constraint at its beginning; milliseconds, after tenths of a second once.

        Raises InvalidRequest for a grammar that is wrong or too complex, or where the optional
        library is not installed.
        """
        with self._lock:
            if self._compile is None:
                self._compile = _compiler(self._tokenizer, grammar)
        return self._compile(grammar)


def _compiler(tokenizer: Tokenizer, grammar: Grammar) -> Callable[[Grammar], Constraint]:
    try:
        from runtime.decoding.grammar import GrammarCompiler
    except ImportError:
        raise InvalidRequest(
            f"`{grammar.param}` needs an optional library on the server: "
            "pip install 'radixcache[grammar]'",
            param=grammar.param,
        ) from None
    return GrammarCompiler(tokenizer).compile


def choice_grammar(choices: Sequence[str], *, param: str = "guided_choice") -> Grammar:
    """Return the grammar whose output is one of the texts.  Raises InvalidRequest."""
    return Grammar(kind="choice", source=json.dumps(list(choices)), param=param)


def regex_weight(regex: str, *, classes: bool = True) -> int:
    """Return how many characters a regex has once its counted repetitions are written out.

    By brackets and counts alone; O(length).
    classes  whether square brackets hold a class of characters, which counts as one

    >>> regex_weight("(a{10}b){3}"), regex_weight("[0-9]{4}-x")
    (33, 6)
    """
    weights = [0]  # of each group that is open, outermost first
    last = at = 0  # weight of the latest atom, which a count would multiply
    while at < len(regex):
        letter = regex[at]
        count = _COUNT.match(regex, at) if letter == "{" else None
        if letter == "(":
            weights.append(0)
            last = 0
        elif letter == ")" and len(weights) > 1:
            last = weights.pop()
            weights[-1] += last
        elif count is not None:
            times = int((count[3] or count[1] or "1")[:9])
            weights[-1] += last * (max(times, 1) - 1)
            last *= max(times, 1)
            at = count.end() - 1
        else:
            found = _ATOM.match(regex, at) if classes or letter != "[" else None
            last = 1
            weights[-1] += 1
            at = found.end() - 1 if found else at
        at += 1
    return sum(weights)


def _walk(value: Any, depth: int = 1) -> Iterator[tuple[int, str]]:
    """Yield every string of a JSON value, names included, and "" for a container; with depths."""
    if isinstance(value, str):
        yield depth, value
    elif isinstance(value, dict | list):
        yield depth, ""
        if depth > MAX_SCHEMA_DEPTH:
            return
        for item in value:
            yield from _walk(item, depth + 1)
        if isinstance(value, dict):
            for item in value.values():
                yield from _walk(item, depth + 1)


def _num_states(multiple: int | float) -> int:
    """Return about how many states a machine has that tells multiples of a number."""
    if isinstance(multiple, float):
        multiple = (
            Fraction(str(multiple)).numerator if math.isfinite(multiple) else MAX_MULTIPLE + 1
        )
    return max(1, abs(multiple))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
