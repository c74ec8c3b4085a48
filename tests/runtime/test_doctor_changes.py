"""What changed from one text or request to the next: each kind, and what is no change at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixcache.tokens import pack_tokens
from runtime.doctor.changes import change_between
from runtime.doctor.log import request_of
from runtime.doctor.pieces import Neighbours, blocks_of, pieces_of
from runtime.doctor.reasons import WORDS, Reason
from runtime.doctor.replay import shared_beyond
from runtime.doctor.text_changes import as_before, changes_of, hunks
from runtime.doctor.values import kind_of_value

RULES = "You help people who repair bicycles. Say which tool is needed first. Be brief."

VALUES = [
    ("2026-03-01T10:30:00Z", "Now: ", "clock"),
    ("10:30", "It is ", "clock"),
    ("9:05 pm", "", "clock"),
    ("1712345678", "ts=", "clock"),
    ("1712345678901", "", "clock"),
    ("half past nine", "Current time: ", "clock"),
    ("2026-03-01", "", "date"),
    ("3/4/2026", "", "date"),
    ("4 March 2026", "as of ", "date"),
    ("March 4, 2026", "", "date"),
    ("Tuesday", "Today is ", "date"),
    ("123e4567-e89b-12d3-a456-426614174000", "request id: ", "uuid"),
    ("req_8f3kd92ls0", "", "request_id"),
    ("9f86d081884c7d65", "", "request_id"),
    ("17", "Session id: ", "request_id"),
    ("/home/ann/shop", "", "directory"),
    ("~/shop", "cwd ", "directory"),
    ("C:\\Users\\ann", "in ", "directory"),
    ("shop", "Working directory: ", "directory"),
    ("main", "On branch ", "git"),
    ("a.py", "git status:\n modified: ", "git"),
    ("Ann Smith", "User: ", "caller"),
    ("Ann", "You are talking to ", "caller"),
    ("ann@example.org", "", "caller"),
    ("192.168.0.7", "from ", "caller"),
    ("1,234", "Tokens left: ", "number"),
    ("73%", "", "number"),
    ("21 °C", "", "number"),
    ("helpful", "You are a ", None),
    ("be useful", "At the same time you must ", None),
    ("the whole of this sentence is about 10:30 and goes on for long", "", None),
    ("", "Now: ", None),
]


@pytest.mark.parametrize(("value", "label", "kind"), VALUES)
def test_a_value_is_known_by_its_form_or_by_the_words_before_it(
    value: str, label: str, kind: str | None
) -> None:
    assert kind_of_value(value, label) == kind


TEXTS = [
    (f"<think>Hm.</think>{RULES}", RULES, "thinking_removed"),
    (f"{RULES}\r\n", RULES, "whitespace"),
    (RULES.replace(". ", ".\n"), RULES, "whitespace"),
    ('Say {"a": 1, "b": [2]}!', 'Say {"b": [2], "a": 1}!', "json_keys"),
    ("One.\n\nTwo.\n\nThree.", "Three.\n\nOne.\n\nTwo.", "examples_shuffled"),
    ("- one\n- two\n- three", "- three\n- one\n- two", "examples_shuffled"),
    ("⟦image http://a/b⟧Look", "Look⟦image http://a/b⟧", "image_moved"),
    ("⟦image http://a/b?s=1⟧Look", "⟦image http://a/b?s=2⟧Look", "image_address"),
    (f"Now: 10:30\n{RULES}", f"Now: 10:31\n{RULES}", "clock"),
    (RULES, RULES.replace("brief", "friendly"), "prompt_edited"),
    (RULES, "Something else altogether, in which nothing is the same as it was there.", None),
]


@pytest.mark.parametrize(("theirs", "ours", "reason"), TEXTS)
def test_two_texts_are_compared_by_the_plainest_explanation(
    theirs: str, ours: str, reason: str | None
) -> None:
    assert [change.reason for change in changes_of(theirs, ours)] == [reason]
    assert changes_of(ours, ours) == []


def test_the_first_difference_is_shown_in_whole_words() -> None:
    (change,) = changes_of(f"Now: 10:30:15 UTC\n{RULES}", f"Now: 10:31:07 UTC\n{RULES}")
    assert (change.before, change.theirs, change.ours) == ("Now: ", "10:30:15", "10:31:07")
    assert change.after.startswith(" UTC\nYou help")


def test_a_text_that_changed_for_several_reasons_is_told_by_each() -> None:
    theirs = f'Now: 10:30\nUser: Ann\nStock: {{"a": 1, "b": 2, "c": [3, 4]}}\n{RULES}'
    changed = f'Now: 10:31\nUser: Bo\nStock: {{"c": [3, 4], "b": 2, "a": 1}}\n{RULES}'
    ours = changed.replace("brief", "friendly")
    reasons = [change.reason for change in changes_of(theirs, ours)]
    assert reasons == ["json_keys", "clock", "caller", "prompt_edited"]


@pytest.mark.parametrize(
    ("ours", "before", "reason", "expected"),
    [
        ("It is 9:30. Be kind.", "It is 9:15. Be brief.", "prompt_edited", "It is 9:30. Be brief."),
        ("b\n\na\n\nlast", "a\n\nb\n\nx", "examples_shuffled", "a\n\nb\n\nlast"),
        ("a  b", "a b", "whitespace", "a b"),
        ("a  c", "a b", "whitespace", "a  c"),
        ("Hi", "<think>x</think>Hi", "thinking_removed", "<think>x</think>Hi"),
        ("[cleared]", "All of it.", "history_edited", "All of it."),
        ('{"b": 1, "a": 2} 9', '{"a": 2, "b": 1} 8', "json_keys", '{"a": 2, "b": 1} 9'),
        ("⟦image u?s=2⟧ at 9", "⟦image u?s=1⟧ at 8", "image_address", "⟦image u?s=1⟧ at 9"),
    ],
)
def test_a_mend_takes_back_what_changed_for_its_reason_alone(
    ours: str, before: str, reason: str, expected: str
) -> None:
    assert as_before(ours, before, Reason(reason)) == expected


def words(draw_from: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(draw_from.split("|")), max_size=12).map("".join)


@given(words("a|b|c| |\n|."), words("a|b|c| |\n|."))
def test_what_lies_between_hunks_is_equal(theirs: str, ours: str) -> None:
    at = (0, 0)
    for hunk in hunks(theirs, ours):
        assert theirs[at[0] : hunk.theirs[0]] == ours[at[1] : hunk.ours[0]]
        assert hunk.theirs[0] <= hunk.theirs[1]
        assert hunk.ours[0] <= hunk.ours[1]
        at = hunk.theirs[1], hunk.ours[1]
    assert theirs[at[0] :] == ours[at[1] :]


@given(st.text(alphabet="ab.!? \n", max_size=40))
def test_pieces_together_are_the_text(text: str) -> None:
    assert "".join(pieces_of(text)) == text
    assert all(blocks_of(text))


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(0, 40),
)
def test_tokens_in_common_are_those_in_runs_that_both_have(
    earlier: list[int], prompt: list[int], start: int
) -> None:
    runs = {tuple(earlier[i : i + 8]) for i in range(len(earlier) - 7)}
    rest = prompt[start:]
    covered = {
        at + k for at in range(len(rest) - 7) if tuple(rest[at : at + 8]) in runs for k in range(8)
    }
    assert shared_beyond(pack_tokens(earlier), pack_tokens(prompt), start) == len(covered)


def change(*bodies: list[tuple[str, str]], **fields: Any) -> list[tuple[str, str]]:
    """Reasons and places of what changed between two conversations."""
    first, second = (
        request_of({"messages": [{"role": r, "content": c} for r, c in body]} | fields)
        for body in bodies
    )
    return [(found.reason.value, found.place) for found in change_between(first, second)]


U = [("user", f"Question {n}: how do I mend what is broken number {n}?") for n in range(6)]
A = [
    ("assistant", f"Answer {n}: take the tool that is on shelf number {n}, please.")
    for n in range(6)
]
S = ("system", RULES)


def test_a_conversation_that_goes_on_goes_back_or_is_another_is_no_change() -> None:
    assert change([S, U[0]], [S, U[0], A[0], U[1]]) == []
    assert change([S, U[0], A[0], U[1]], [S, U[0]]) == []
    assert change([S, U[0]], [S, U[0]]) == []
    other = ("user", "Tell me of the sea, and of those that sail on it in the night.")
    assert change([S, U[0], A[0], U[1]], [S, other]) == []
    assert (
        change([S, U[0]], [("system", "Quite another program with rules of its own."), U[0]]) == []
    )


def test_history_that_moved_up_was_trimmed_or_a_message_moved() -> None:
    whole = [S, U[0], A[0], U[1], A[1], U[2]]
    assert change(whole, [S, U[1], A[1], U[2], A[2], U[3]]) == [
        ("history_trimmed", "messages[1] (user)")
    ]
    note = ("user", "Remember to be brief.")
    assert change([S, note, U[0]], [S, U[0], A[0], note, U[1]]) == [
        ("message_moved", "messages[1] (user)")
    ]


def test_messages_of_the_history_that_say_something_else_were_rewritten() -> None:
    whole = [S, U[0], A[0], U[1], A[1], U[2]]
    cleared = [S, U[0], ("assistant", "[cleared]"), U[1], A[1], U[2], A[2], U[3]]
    assert change(whole, cleared) == [("history_edited", "messages[2] (assistant)")]
    swapped = [S, U[1], A[1], U[0], A[0], U[2]]
    assert change(whole, swapped) == [("examples_shuffled", "messages[1] (user)")]


def test_another_sample_of_a_reply_is_no_rewriting() -> None:
    other = ("assistant", "Oil the chain, then ride a mile and look at it again in the light.")
    assert change([S, U[0], A[0], ("user", "Why?")], [S, U[0], other, ("user", "Why?")]) == []


def test_changes_of_tools_and_messages_are_both_told() -> None:
    def tool(name: str, **more: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "description": "Does it.", **more}}

    def body(text: str, *tools: dict[str, Any]) -> Any:
        return request_of({"messages": [{"role": "system", "content": text}], "tools": list(tools)})

    first = body(f"Now: 10:30\n{RULES}", tool("a"), tool("b"))
    cases = {
        ("tool_order", "clock"): body(f"Now: 10:31\n{RULES}", tool("b"), tool("a")),
        ("tools_changed",): body(f"Now: 10:30\n{RULES}", tool("a")),
        ("tool_edited",): body(f"Now: 10:30\n{RULES}", tool("a"), tool("b", strict=True)),
        ("clock",): body(f"Now: 10:31\n{RULES}", tool("a"), tool("b")),
        (): body(f"Now: 10:30\n{RULES}", tool("a"), tool("b")),
    }
    for expected, second in cases.items():
        assert tuple(one.reason.value for one in change_between(first, second)) == expected


def test_a_value_that_changes_in_a_tool_is_told_as_what_it_is() -> None:
    def body(day: int) -> Any:
        function = {"name": "a", "description": f"Orders. Today is {day} March 2025. Asks."}
        tools = [{"type": "function", "function": function}]
        return request_of({"messages": [{"role": "user", "content": "Hi"}], "tools": tools})

    (found,) = change_between(body(4), body(5))
    assert (found.reason, found.tool) == (Reason.DATE, "a")


def test_the_nearest_request_is_the_one_with_most_in_common_and_then_the_latest() -> None:
    neighbours = Neighbours()
    logs = [[S, U[0]], [S, U[1]], [S, U[0], A[0], U[2]], [S, U[1], A[1], U[2]]]
    requests = [
        request_of({"messages": [{"role": r, "content": c} for r, c in said]}) for said in logs
    ]
    assert [neighbours.add(request) for request in requests] == [None, 0, 0, 1]


def test_every_reason_has_its_words() -> None:
    assert set(WORDS) == set(Reason)
    assert len({words.title for words in WORDS.values()}) == len(Reason)
