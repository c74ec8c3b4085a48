"""Demanded calls: told piece by piece, whatever the pieces are and wherever a limit cuts them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.tokenizer.demanded_calls import CallArguments, CallBegin, DemandedCalls
from runtime.tokenizer.tool_calls import tools_grammar
from runtime.tokenizer.tool_format import ToolFormat, written_calls

texts = st.text('{}[]"\\\n</tool_call>é a')
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(st.sampled_from(["f", "get-it", "A_1"]), st.dictionaries(texts, values, max_size=3)),
    min_size=1,
    max_size=3,
)
formats = st.sampled_from(
    [ToolFormat(name="hermes"), ToolFormat(name="llama"), ToolFormat(name="mistral")]
)


def told(pieces: Sequence[CallBegin | CallArguments]) -> list[tuple[str, str]]:
    """Name and arguments of each call."""
    found: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            found.append((piece.name, ""))
        else:
            name, so_far = found[-1]
            found[-1] = (name, so_far + piece.text)
    return found


@given(made=calls, format=formats, indent=st.sampled_from([None, 1]), size=st.integers(1, 9))
def test_calls_are_told_whole_whatever_pieces_they_come_in(
    made: list[tuple[str, dict[str, object]]], format: ToolFormat, indent: int | None, size: int
) -> None:
    written = [(name, json.dumps(value, indent=indent)) for name, value in made]
    text = written_calls("", written, format)
    parser = DemandedCalls()
    pieces: list[CallBegin | CallArguments] = []
    for at in range(0, len(text), size):
        pieces += parser.push(text[at : at + size])
    assert told(pieces) == written
    assert parser.is_whole
    names = [piece.id for piece in pieces if isinstance(piece, CallBegin)]
    assert len(set(names)) == len(names)


@given(made=calls, format=formats, cut=st.integers(0, 200))
def test_a_call_that_is_cut_has_what_came_of_its_arguments(
    made: list[tuple[str, dict[str, object]]], format: ToolFormat, cut: int
) -> None:
    written = [(name, json.dumps(value)) for name, value in made]
    text = written_calls("", written, format)[:cut]
    parser = DemandedCalls()
    found = told(parser.push(text))
    assert [name for name, _ in found] == [name for name, _ in written[: len(found)]]
    assert found[:-1] == written[: max(0, len(found) - 1)]
    if found:
        whole = written[len(found) - 1][1]
        assert whole.startswith(found[-1][1])
        assert parser.is_whole == (whole == found[-1][1])


@pytest.mark.parametrize("kind", ["string", "array", None, ["object", "null"]])
def test_parameters_that_are_no_object_are_refused(kind: object) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
    with pytest.raises(InvalidRequest, match="object"):
        tools_grammar([tool])
