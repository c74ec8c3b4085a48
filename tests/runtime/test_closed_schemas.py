"""Closing schemas: no property that nobody named, and nothing that the open schema would refuse."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.closed_schemas import closed
from runtime.decoding.grammar import GrammarCompiler, GrammarFailure
from runtime.grammar import Grammar
from runtime.tokenizer.load import Tokenizer
from runtime.tokenizer.tool_calls import tools_grammar
from tests.support.smollm2 import open_smollm2

TOWN: dict[str, Any] = {"properties": {"town": {"type": "string"}}, "required": ["town"]}
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
}
MORE = {"town": "Rome", "more": 1}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(open_smollm2().tokenizer())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_smollm2().tokenizer()


def takes(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """True where the grammar lets a model write the text and end there."""
    constraint = compiler.compile(grammar)
    try:
        for token in tokenizer.encode(text):
            constraint.accept(token)
    except GrammarFailure:
        return False
    may_follow = constraint.allowed()
    return any(may_follow[end // 8] >> end % 8 & 1 for end in tokenizer.eos_ids)


@pytest.mark.parametrize(
    "schema",
    [
        TOWN,
        {"$defs": {"a": TOWN}, "$ref": "#/$defs/a"},
        {"anyOf": [TOWN, {"type": "null"}]},
        {"items": TOWN},
    ],
)
def test_an_object_that_names_properties_has_no_others(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    wrapped = (lambda value: [value]) if "items" in schema else (lambda value: value)
    assert jsonschema_rs.is_valid(schema, wrapped(MORE))
    assert not jsonschema_rs.is_valid(closed(schema), wrapped(MORE))
    assert jsonschema_rs.is_valid(closed(schema), wrapped({"town": "Rome"}))
    assert json.dumps(schema) == before


@pytest.mark.parametrize("required", ["town", [["town"]], [{}], {}, None, 5])
def test_a_schema_that_is_none_is_left_to_whoever_reads_it(required: Any) -> None:
    schema = TOWN | {"required": required}
    assert closed(schema) == schema
    odd: Any = {"properties": required, "anyOf": required, "$defs": required, "items": required}
    assert closed(odd) == odd


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {}},
        TOWN | {"additionalProperties": True},
        TOWN | {"additionalProperties": {"type": "integer"}},
        TOWN | {"patternProperties": {"^m": {}}},
        TOWN | {"minProperties": 2},
        TOWN | {"required": ["more"]},
        TOWN | {"anyOf": [{"required": ["more"]}, {"required": ["town"]}]},
        {"allOf": [TOWN, {"properties": {"more": {}}, "required": ["more"]}]},
        {"$defs": {"base": TOWN}, "$ref": "#/$defs/base", "properties": {"more": {}}},
        {"$defs": {"base": TOWN, "both": {"allOf": [{"$ref": "#/$defs/base"}]}}, **TOWN},
        {"oneOf": [TOWN, {"properties": {"other": {}}, "required": ["other"]}]},
        TOWN | {"if": {"properties": {"town": {"const": "Rome"}}}, "then": {"required": ["more"]}},
    ],
)
def test_an_object_that_others_speak_of_stays_open(schema: dict[str, Any]) -> None:
    assert jsonschema_rs.is_valid(schema, MORE)
    assert jsonschema_rs.is_valid(closed(schema), MORE)


def test_properties_with_the_names_of_keywords_are_properties() -> None:
    inner = {"properties": {"type": "object", "properties": {"a": {}}}, "enum": {"const": 1}}
    schema = {"properties": inner, "required": ["properties"], "default": {"properties": {"b": 1}}}
    found = closed(schema)
    assert found["properties"].keys() == inner.keys()
    assert found["default"] == schema["default"]
    assert jsonschema_rs.is_valid(found, {"properties": {"a": 1}, "enum": 1})
    assert not jsonschema_rs.is_valid(found, {"properties": {"b": 1}})


@pytest.mark.parametrize("name", ["dependencies", "not", "if", "allOf", "extends", "$ref"])
@pytest.mark.parametrize("keyword", ["properties", "$defs"])
def test_a_name_that_is_a_keyword_elsewhere_leaves_nothing_open(keyword: str, name: str) -> None:
    named = {keyword: {name: {"type": "string"}, "properties": {}}}
    schema = {
        "properties": {"inner": TOWN | named | {"required": []}, **named.get("properties", {})}
    }
    assert jsonschema_rs.is_valid(schema, {"inner": {"more": 1}})
    assert not jsonschema_rs.is_valid(closed(schema), {"inner": {"more": 1}})
    assert not jsonschema_rs.is_valid(closed(schema), MORE)


names = st.sampled_from(["a", "b", "items", "anyOf", "allOf", "properties", "required"])
values = st.recursive(
    st.none() | st.integers(0, 2), lambda v: st.dictionaries(names, v, max_size=3), max_leaves=5
)
schemas = st.recursive(
    st.sampled_from([{}, {"type": "integer"}, {"type": "object"}, {"$ref": "#/$defs/it"}]),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"properties": st.dictionaries(names, inner, max_size=3)},
            optional={
                "required": st.lists(names, max_size=2, unique=True),
                "additionalProperties": st.booleans() | inner,
                "minProperties": st.integers(0, 2),
                "anyOf": st.lists(inner, min_size=1, max_size=2),
            },
        ),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts: {"allOf": parts}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda parts: {"oneOf": parts}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda part: {"items": part}, inner),
    ),
    max_leaves=8,
)


@given(schema=schemas, it=schemas, value=values)
def test_what_meets_the_closed_schema_meets_the_open_one(schema: Any, it: Any, value: Any) -> None:
    it = {} if "$ref" in it else it  # which would refer to itself
    whole = schema | {"$defs": {"it": it}}
    if jsonschema_rs.is_valid(closed(whole), value):
        assert jsonschema_rs.is_valid(whole, value)


def test_a_model_can_write_no_property_that_nobody_named(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    recursive = NODE | {"$defs": {"node": NODE}}
    for schema, good, bad in (
        (TOWN | {"type": "object"}, {"town": "Rome"}, MORE),
        (recursive, {"next": {"next": None}}, {"next": {"next": None, "b": 1}}),
    ):
        grammar = Grammar(kind="json_schema", source=json.dumps(schema))
        assert takes(compiler, tokenizer, grammar, json.dumps(good))
        assert not takes(compiler, tokenizer, grammar, json.dumps(bad))
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        calls = tools_grammar([tool], "f", parallel=False)
        for arguments, is_taken in ((good, True), (bad, False)):
            body = json.dumps({"name": "f", "arguments": arguments})
            text = f"<tool_call>\n{body}\n</tool_call>"
            assert takes(compiler, tokenizer, calls, text) == is_taken
