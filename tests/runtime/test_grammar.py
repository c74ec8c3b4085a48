"""Grammars: what they allow, that forks are independent, and that hostile ones cost nothing."""

from __future__ import annotations

import builtins
import json
import re
import sys
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.decoding.grammar import GrammarFailure
from runtime.errors import InvalidRequest
from runtime.grammar import Constrainer, Grammar, choice_grammar, regex_weight
from runtime.request import Constraint
from runtime.tokenizer.load import Tokenizer
from runtime.tokenizer.tool_calls import ToolCall, ToolCallParser, tools_grammar
from runtime.tokenizer.tool_format import ToolFormat
from tests.support.smollm2 import open_smollm2

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "é"]}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
    },
    "required": ["name", "age", "next"],
    "additionalProperties": False,
    "$defs": {
        "leaf": {
            "type": "object",
            "properties": {
                "on": {"type": "boolean"},
                "half": {"type": "number", "multipleOf": 0.5},
            },
            "required": ["on"],
            "additionalProperties": False,
        }
    },
}
LIST = {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4}
MAX_STEPS = 400


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_smollm2().tokenizer()


@pytest.fixture(scope="module")
def constrainer(tokenizer: Tokenizer) -> Constrainer:
    return Constrainer(tokenizer)


def schema(value: Any, **options: Any) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(value), **options)


def allowed_ids(constraint: Constraint) -> np.ndarray[Any, Any]:
    bits = np.unpackbits(np.frombuffer(constraint.allowed(), np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def walk(constraint: Constraint, tokenizer: Tokenizer, seed: int) -> str:
    """Draw allowed tokens at random until the end is drawn."""
    random = np.random.default_rng(seed)
    ids: list[int] = []
    for step in range(MAX_STEPS):
        allowed = allowed_ids(constraint)
        ends = sorted(tokenizer.eos_ids & set(allowed.tolist()))
        assert not constraint.is_done or len(allowed) == len(ends) > 0
        if ends and (constraint.is_done or step > 20 or random.random() < 0.3):
            constraint.accept(ends[0])
            return tokenizer.decode(ids, skip_special=False)
        token = int(random.choice(allowed))
        constraint.accept(token)
        if token in tokenizer.eos_ids:
            return tokenizer.decode(ids, skip_special=False)
        ids.append(token)
    pytest.fail(f"no end after {MAX_STEPS} tokens: {tokenizer.decode(ids)!r}")


def read(text: str) -> Any:
    """Parse JSON; 8E651 is a number of JSON that no float holds, and stays a finite one."""
    return json.loads(text, parse_float=lambda number: max(-1e300, min(float(number), 1e300)))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), value=st.sampled_from([PERSON, LIST]))
def test_whatever_is_drawn_meets_the_schema(
    tokenizer: Tokenizer, constrainer: Constrainer, seed: int, value: Any
) -> None:
    text = walk(constrainer.compile(schema(value)), tokenizer, seed)
    assert jsonschema_rs.is_valid(value, read(text))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_regex_is_the_whole_output(
    tokenizer: Tokenizer, constrainer: Constrainer, seed: int
) -> None:
    regex = r"(ab|cd){2,3}-[0-9]{2}\.[^x]?"
    text = walk(constrainer.compile(Grammar(kind="regex", source=regex)), tokenizer, seed)
    assert re.fullmatch(regex, text)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_one_of_the_choices_is_the_whole_output(
    tokenizer: Tokenizer, constrainer: Constrainer, seed: int
) -> None:
    choices = ["yes", "yes, but", 'no"\n', "\\d", "<|im_end|>", "é"]
    assert walk(constrainer.compile(choice_grammar(choices)), tokenizer, seed) in choices


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from([None, "b-2"]),
    parallel=st.booleans(),
    format=st.sampled_from(["hermes", "llama", "mistral"]),
)
def test_calls_that_are_demanded_are_found_and_meet_their_schemas(
    tokenizer: Tokenizer,
    constrainer: Constrainer,
    seed: int,
    name: str | None,
    parallel: bool,
    format: Any,
) -> None:
    schemas = {"a_1": PERSON, "b-2": {"properties": {"x": LIST}, "additionalProperties": False}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in schemas.items()
    ]
    kind = ToolFormat(name=format)
    grammar = tools_grammar(tools, name, parallel, format=kind)
    text = walk(constrainer.compile(grammar), tokenizer, seed)
    parser = ToolCallParser(kind)
    calls = parser.push(text) + parser.flush()
    assert calls
    assert parallel or len(calls) == 1
    for call in calls:
        assert isinstance(call, ToolCall)
        assert name in (None, call.name)
        assert jsonschema_rs.is_valid(schemas[call.name], read(call.arguments))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), format=st.sampled_from(["hermes", "llama", "mistral"]))
def test_a_reply_calls_or_is_the_json_that_was_asked_for(
    tokenizer: Tokenizer, constrainer: Constrainer, seed: int, format: Any
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": PERSON}}
    kind = ToolFormat(name=format)
    grammar = tools_grammar([tool], format=kind, otherwise=schema(LIST))
    parser = ToolCallParser(kind)
    text = walk(constrainer.compile(grammar), tokenizer, seed)
    pieces = parser.push(text) + parser.flush()
    if any(isinstance(piece, ToolCall) for piece in pieces):
        for call in pieces:
            assert isinstance(call, ToolCall)
            assert jsonschema_rs.is_valid(PERSON, read(call.arguments))
    else:
        assert jsonschema_rs.is_valid(LIST, read("".join(map(str, pieces))))


def test_a_tool_may_have_what_can_not_be_enforced_beside_a_format_that_may_not(
    constrainer: Constrainer,
) -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": odd}}
    assert constrainer.compile(tools_grammar([tool], otherwise=schema(LIST))).allowed()
    with pytest.raises(InvalidRequest, match="not"):
        constrainer.compile(tools_grammar([tool], otherwise=schema(odd)))
    lenient = schema(odd, strict=False)
    assert constrainer.compile(tools_grammar([tool], otherwise=lenient)).allowed()


def test_forks_go_their_own_ways(tokenizer: Tokenizer, constrainer: Constrainer) -> None:
    first = constrainer.compile(choice_grammar(["ab", "ac"]))
    (a, b, c) = (tokenizer.encode(letter)[0] for letter in "abc")
    first.accept(a)
    second = first.fork()
    mask = first.allowed()
    assert second.allowed() == mask
    second.accept(b)
    assert second.is_done
    assert first.allowed() == mask
    third = first.fork()
    first.accept(c)
    assert first.is_done
    assert not third.is_done
    assert set(allowed_ids(third)) == {b, c}
    assert set(allowed_ids(first)) == set(allowed_ids(second)) == tokenizer.eos_ids


def test_the_mask_covers_the_models_ids_and_never_control_tokens(
    tokenizer: Tokenizer, constrainer: Constrainer
) -> None:
    anything = constrainer.compile(Grammar(kind="regex", source="(?s:.+)"))
    mask = anything.allowed()
    assert len(mask) == -(-tokenizer.vocab_size // 32) * 4
    assert anything.allowed() is mask
    allowed = set(allowed_ids(anything))
    assert not allowed & set(tokenizer.special_tokens.values())
    assert max(allowed) < tokenizer.vocab_size
    anything.accept(tokenizer.encode("a")[0])
    control = set(allowed_ids(anything)) & set(tokenizer.special_tokens.values())
    assert control == tokenizer.eos_ids


def test_a_token_that_is_not_allowed_breaks_the_constraint_for_good(
    tokenizer: Tokenizer, constrainer: Constrainer
) -> None:
    constraint = constrainer.compile(choice_grammar(["a"]))
    with pytest.raises(GrammarFailure, match="failed"):
        constraint.accept(tokenizer.encode("b")[0])
    with pytest.raises(GrammarFailure):
        constraint.allowed()


def test_a_grammar_that_grows_too_complex_fails_while_it_is_followed(
    tokenizer: Tokenizer, constrainer: Constrainer
) -> None:
    source = 'start: s\ns: s s | s s s | "a" |'
    constraint = constrainer.compile(Grammar(kind="lark", source=source))
    (a,) = tokenizer.encode("a")
    accepted = []

    def follow() -> None:
        for step in range(5000):
            constraint.allowed()
            constraint.accept(a)
            accepted.append(step)

    with pytest.raises(GrammarFailure, match="failed"):
        follow()
    assert len(accepted) < 150  # each costs more than the one before


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        value = {"properties": {"a": value}}
    return value


def many_ways(num: int) -> dict[str, Any]:
    either = [
        {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(4)]}
        for i in range(num)
    ]
    return {"allOf": either}


HOSTILE = [
    {"type": "integer", "multipleOf": 99999999},
    {"type": "number", "multipleOf": 0.123456789},
    {"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 83)]},
    {"properties": {"a": {"multipleOf": 1e308}}},
    {"type": "integer", "multipleOf": 10**400},
    {"type": "number", "minimum": 10**400},
    {"allOf": [{"properties": {f"p{i}_{j}": {} for j in range(500)}} for i in range(9)]},
    nested(200),
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "http://127.0.0.1:1/schema.json"},
    {"$ref": "file:///etc/passwd"},
    {"enum": ["x" * 100_000]},
    {"enum": [f"{i:09}" for i in range(40_000)]},
    many_ways(12),
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"patternProperties": {"((a{99}){99}){99}": {}}},
    {"type": "string", "pattern": "a" * 5000},
    {"properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
    {"type": "object", "x-guidance": {"whitespace_pattern": "(a|a)*"}},
    {"not": {"type": "string"}},
    {"type": "strnig"},
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: json.dumps(value)[:50])
def test_a_hostile_schema_is_refused_with_the_reason(constrainer: Constrainer, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"can't be enforced: .{10}") as caught:
        constrainer.compile(schema(value, param="guided_json"))
    assert caught.value.param == "guided_json"
    assert len(str(caught.value)) < 500


def test_a_name_that_stands_twice_hides_nothing(constrainer: Constrainer) -> None:
    source = '{"type": "integer", "multipleOf": 99999999, "multipleOf": 2}'
    with pytest.raises(InvalidRequest, match="multipleOf"):
        Grammar(kind="json_schema", source=source)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", "[" * 100_000),
        ("json_schema", '{"minimum": NaN}'),
        ("json_schema", '{"type": "number", "multipleOf": 1e999}'),
        ("json_schema", '{"type": "number", "minimum": 1e999}'),
        ("json_schema", '{"enum": ["\\ud800"]}'),
        ("regex", "(a{1000}){1000}"),
        ("regex", "a{99999999999999999999}"),
        ("regex", "(?=a)b"),
        ("regex", "(" * 3000 + ")" * 3000),
        ("regex", "\ud800"),
        ("regex", "(a"),
        ("regex", "a" * 5000),
        ("choice", "[]"),
        ("choice", '["a", ""]'),
        ("choice", '"a"'),
        ("choice", json.dumps(["a"] * 5000)),
        ("lark", "start: x"),
        ("lark", 'start: %json {"multipleOf": 99999999}'),
        ("lark", "start: /(a{1000}){1000}/"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        ("lark", "a" * 300_000),
    ],
)
def test_what_is_malformed_or_too_large_is_refused(
    constrainer: Constrainer, kind: Any, source: str
) -> None:
    with pytest.raises(InvalidRequest, match="can't be enforced") as caught:
        constrainer.compile(Grammar(kind=kind, source=source))
    assert caught.value.param == "response_format"


def test_a_keyword_that_cant_be_enforced_is_passed_over_where_that_is_wanted(
    tokenizer: Tokenizer, constrainer: Constrainer
) -> None:
    value = {"type": "boolean", "not": {"const": True}}
    with pytest.raises(InvalidRequest, match="not"):
        constrainer.compile(schema(value))
    text = walk(constrainer.compile(schema(value, strict=False)), tokenizer, 1)
    assert json.loads(text) in (True, False)


def test_any_object_meets_json_object(tokenizer: Tokenizer, constrainer: Constrainer) -> None:
    constraint = constrainer.compile(Grammar(kind="json_object"))
    for token in tokenizer.encode('{"a": [1, {"b": null}], "c": "é"}'):
        assert token in allowed_ids(constraint)
        constraint.accept(token)
    assert constraint.is_done


@pytest.mark.parametrize(
    ("regex", "weight"),
    [
        ("abc", 3),
        ("a{3}b", 4),
        ("(ab){2,5}", 10),
        ("((a{2}){3}){4}", 24),
        (r"\{3}[a{9}]", 4),
        ("a{2,}", 2),
        (")a{2}", 3),
        ("[]a]{3}", 3),
        ("", 0),
    ],
)
def test_a_regex_weighs_what_it_has_when_written_out(regex: str, weight: int) -> None:
    assert regex_weight(regex) == weight


def test_without_the_library_the_field_is_refused_and_the_rest_works(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "runtime.decoding.grammar")
    whole_import = builtins.__import__

    def without_library(name: str, *rest: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return whole_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_library)
    grammar = choice_grammar(["a"])
    with pytest.raises(InvalidRequest, match=r"radixcache\[grammar\]") as caught:
        Constrainer(tokenizer).compile(grammar)
    assert caught.value.param == "guided_choice"
