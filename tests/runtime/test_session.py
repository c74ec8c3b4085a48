"""`Session` in a program: what may be done with one when, and that nothing stays behind.

Over the real tokenizer and template, and an engine that is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from runtime.errors import (
    EngineFailure,
    InvalidRequest,
    PromptTooLong,
    ServerBusy,
    SessionNotFound,
)
from runtime.llm import Session
from runtime.loading import Runtime
from runtime.loop import EngineLoop
from runtime.request import RequestOutput, SamplingParams
from runtime.sessions.book import SessionBook
from runtime.sessions.records import SessionLimits
from runtime.sessions.session import open_session
from tests.support.served import HashExecutor, assert_nothing_held, quick_runtime

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
USER = {"role": "user", "content": "Hello"}


class Program:
    """What `LLM` puts around a runtime."""

    def __init__(self, **limits: Any) -> None:
        self.runtime: Runtime = quick_runtime()
        ids = count()
        self.book = SessionBook(
            self.runtime.engine, SessionLimits(**limits), new_id=lambda: f"s{next(ids)}"
        )
        self.loop = EngineLoop(self.runtime.engine)

    def session(self, addition: Any = "", **fields: Any) -> Session:
        """Open a session."""
        return open_session(self.runtime, self.loop, self.book, addition, **fields)

    def break_steps(self) -> None:
        """Let every step fail from now on."""
        executor = self.runtime.executor
        assert isinstance(executor, HashExecutor)
        executor.execute = self._fail  # type: ignore[method-assign]

    def _fail(self, plan: object) -> Any:
        raise RuntimeError("the device is gone")


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program(max_sessions=8)
    yield program
    program.book.check()
    program.book.close_all()
    assert_nothing_held(program.runtime)


def test_a_branch_is_what_was_appended_and_generated(program: Program) -> None:
    with program.session("Once upon a time") as session:
        first = session.generate(FOUR)
        session.append(" and")
        session.append([7, 8])
        second = session.generate(FOUR)
        encode = program.runtime.tokenizer.encode
        begin, more = encode("Once upon a time"), encode(" and")
        expected = [*begin, *first.token_ids, *more, 7, 8, *second.token_ids]
        assert session.token_ids == expected
    assert_nothing_held(program.runtime)
    assert program.book.held_tokens == 0


def test_control_tokens_in_text_act_only_where_it_is_asked_for(program: Program) -> None:
    end = program.runtime.tokenizer.special_tokens["<|im_end|>"]
    with program.session("a<|im_end|>") as session:
        assert end not in session.token_ids
        session.append("<|im_end|>\nb", parse_special=True)
        assert session.token_ids.count(end) == 1
    with program.session("<|im_end|>", parse_special=True) as session:
        assert session.token_ids == [end]


def test_a_conversation_has_the_tokens_that_the_template_gives_all_of_it(
    program: Program,
) -> None:
    with program.session([{"role": "system", "content": "Be brief."}, USER]) as session:
        reply = session.generate(FOUR)
        session.append([{"role": "user", "content": "Why?"}])
        said = [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "Why?"},
        ]
        assert session.token_ids == program.runtime.chat_tokens(said)
        assert session.generate(FOUR).usage.cached_tokens >= 16


def test_a_reply_cut_short_and_continued_is_one_message(program: Program) -> None:
    with program.session([USER]) as session:
        first, second = session.generate(FOUR), session.generate(FOUR)
        conversation = session.state.conversation
        assert conversation is not None
        text = first.text + second.text
        assert conversation.messages == [USER, {"role": "assistant", "content": text}]
        before = session.token_ids
        session.append([{"role": "user", "content": "Why?"}])
        assert session.token_ids[: len(before)] == before  # replies keep their ids


def test_forks_of_a_conversation_go_on_apart(program: Program) -> None:
    with program.session([USER]) as session:
        twin = session.fork()
        twin.append([{"role": "user", "content": "Only here"}])
        session.generate(FOUR)
        assert twin.state.parent == session.session_id
        assert twin.state.conversation is not None
        assert twin.state.conversation.messages == [USER, {"role": "user", "content": "Only here"}]


def test_messages_go_to_conversations_only(program: Program) -> None:
    with program.session("text") as session, pytest.raises(InvalidRequest, match="no messages"):
        session.append([USER])
    with program.session([USER]) as session:
        session.append(" more")
        assert session.state.conversation is None
        with pytest.raises(InvalidRequest, match="no messages"):
            session.append([USER])


@pytest.mark.parametrize("nothing", ["", []])
def test_appending_nothing_changes_nothing(program: Program, nothing: Any) -> None:
    with program.session([USER]) as session:
        before = session.state
        session.append(nothing)
        after = session.state
        assert (after.tokens, after.conversation) == (before.tokens, before.conversation)


WRONG: list[tuple[str, Callable[[Session], Any]]] = [
    ("no addition", lambda s: s.append(None)),  # type: ignore[arg-type]
    ("a number", lambda s: s.append(5)),  # type: ignore[arg-type]
    ("a mapping", lambda s: s.append({"role": "user"})),  # type: ignore[arg-type]
    ("ids that are none", lambda s: s.append([-1])),
    ("ids beyond the vocabulary", lambda s: s.append([49152])),
    ("ids and messages", lambda s: s.append([1, USER])),  # type: ignore[list-item]
    ("texts", lambda s: s.append(["a"])),  # type: ignore[list-item]
    ("a message without a role", lambda s: s.append([{"content": "x"}])),
    ("a message that is no JSON", lambda s: s.append([{**USER, "x": object()}])),
    ("half a surrogate pair", lambda s: s.append("\ud800")),
    ("half a surrogate pair in a message", lambda s: s.append([{**USER, "content": "\ud800"}])),
    ("a message too large", lambda s: s.append([{**USER, "name": "x" * (1 << 20)}])),
    ("sampling as a dict", lambda s: s.generate({"max_tokens": 1})),  # type: ignore[arg-type]
    ("several branches", lambda s: s.generate(SamplingParams(n=2))),
    ("no choices", lambda s: s.score([])),
    ("a text as choices", lambda s: s.score("abc")),
    ("a choice without tokens", lambda s: s.score(["a", ""])),
    ("a choice that is none", lambda s: s.score([None])),  # type: ignore[list-item]
    ("too many choices", lambda s: s.score(["a"] * 257)),
    ("choices beyond the vocabulary", lambda s: s.score([[49152]])),
    ("no time", lambda s: s.hold("soon")),  # type: ignore[arg-type]
    ("too many tokens", lambda s: s.append([5] * 2000)),
    ("too long a text", lambda s: s.append("x" * 10_000_000)),
    ("too long a choice", lambda s: s.score([[5] * 2000])),
]
TOO_LONG = ("too many tokens", "too long a text", "too long a choice")


@pytest.mark.parametrize("name", [name for name, _ in WRONG])
def test_a_mistake_is_an_error_of_ours_and_leaves_the_branch_as_it_was(
    program: Program, name: str
) -> None:
    with program.session([USER]) as session:
        session.generate(FOUR)
        before = session.state
        with pytest.raises(PromptTooLong if name in TOO_LONG else InvalidRequest):
            dict(WRONG)[name](session)
        after = session.state
        assert (after.tokens, after.conversation, after.held_tokens, after.is_busy) == (
            before.tokens,
            before.conversation,
            before.held_tokens,
            False,
        )


@pytest.mark.parametrize("call", [lambda s: s.generate(FOUR), lambda s: s.score(["a"])])
def test_an_empty_branch_can_neither_be_continued_nor_scored(program: Program, call: Any) -> None:
    with program.session() as session:
        with pytest.raises(InvalidRequest):
            call(session)
        session.append("Now")
        call(session)


AFTER_THE_END: list[tuple[str, Callable[[Session], Any]]] = [
    ("state", lambda s: s.state),
    ("token_ids", lambda s: s.token_ids),
    ("append", lambda s: s.append("x")),
    ("generate", lambda s: s.generate(FOUR)),
    ("fork", lambda s: s.fork()),
    ("score", lambda s: s.score(["a"])),
    ("hold", lambda s: s.hold(1)),
]


@pytest.mark.parametrize("name", [name for name, _ in AFTER_THE_END])
def test_a_closed_session_does_nothing_more(program: Program, name: str) -> None:
    session = program.session("Once")
    session.generate(FOUR)
    session.close()
    session.close()
    with pytest.raises(SessionNotFound, match="create another"):
        dict(AFTER_THE_END)[name](session)
    assert_nothing_held(program.runtime)


def test_calls_from_within_a_generation_are_refused(program: Program) -> None:
    refused = []

    def listen(output: RequestOutput) -> None:
        for call in (
            lambda: session.append("x"),
            lambda: session.generate(FOUR),
            lambda: session.fork(),
            lambda: session.score(["a"]),
            lambda: session.hold(1),
            lambda: session.close(),
            lambda: program.session("x"),
        ):
            with pytest.raises(InvalidRequest, match="middle of another call"):
                call()
            refused.append(output)

    with program.session("Once") as session:
        assert len(session.generate(FOUR, on_news=listen).token_ids) == 4
        assert len(refused) == 7 * 4


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_generation_that_is_interrupted_leaves_the_branch_as_it_was(
    program: Program, error: type[BaseException]
) -> None:
    def listen(output: RequestOutput) -> None:
        if output.usage.completion_tokens == 3:
            raise error

    with program.session([USER]) as session:
        session.generate(FOUR)
        before = session.state
        with pytest.raises(error):
            session.generate(FOUR, on_news=listen)
        after = session.state
        assert (after.tokens, after.conversation) == (before.tokens, before.conversation)
        assert not after.is_busy
        assert len(session.generate(FOUR).token_ids) == 4


@pytest.mark.parametrize("call", [lambda s: s.generate(FOUR), lambda s: s.score(["a", "b"])])
def test_a_step_that_fails_leaves_the_branch_as_it_was(program: Program, call: Any) -> None:
    with program.session("Once") as session:
        session.generate(FOUR)
        before = session.token_ids
        program.break_steps()
        with pytest.raises(EngineFailure, match="the device is gone"):
            call(session)
        assert session.token_ids == before
        assert not session.state.is_busy


def test_scoring_leaves_the_branch_and_holds_what_it_computed(program: Program) -> None:
    with program.session([5] * 40) as session:
        scores = session.score([" yes", " no", [7, 8, 9]])
        assert [choice.num_tokens for choice in scores.choices] == [1, 1, 3]
        assert [choice.usage.completion_tokens for choice in scores.choices] == [0, 0, 0]
        state = session.state
        assert (state.num_tokens, state.revision) == (40, 0)
        assert state.held_tokens == 32


def test_no_new_tokens_computes_the_branch_and_holds_it(program: Program) -> None:
    with program.session([5] * 40) as session:
        done = session.generate(SamplingParams(max_tokens=0))
        assert (done.token_ids, done.finish_reason) == ((), "length")
        assert session.state.held_tokens == 32
        assert session.fork().generate(FOUR).usage.cached_tokens >= 32


def test_more_sessions_than_allowed_are_refused(program: Program) -> None:
    sessions = [program.session("x") for _ in range(8)]
    with pytest.raises(ServerBusy, match="close those"):
        program.session("x")
    with pytest.raises(ServerBusy):
        sessions[0].fork()
    sessions.pop().close()
    program.session("x")
