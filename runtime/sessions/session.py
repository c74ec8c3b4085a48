"""Sessions for a program: a branch that is appended to, generated from, forked, and closed.

Owns: turns on an engine that the caller's own thread runs.  Does not know: HTTP, how branches are
held; the book does.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from radixcache.tokens import num_tokens, pack_tokens, unpack_tokens
from runtime.completion import Completion, completion_of
from runtime.errors import InvalidRequest, SessionNotFound
from runtime.loading import Runtime
from runtime.loop import EngineLoop, Listener
from runtime.request import SamplingParams
from runtime.sessions.book import SessionBook
from runtime.sessions.records import SessionState
from runtime.sessions.scoring import Scores, compare, scoring_params
from runtime.sessions.text import (
    EMPTY,
    Addition,
    choice_tokens,
    content_of,
    extended,
    replied,
)

Choice = str | list[int]
"""A continuation to be scored: text, or token ids."""


class Session:
    """A branch of tokens whose computed prefix is held until it is closed; see `LLM.session`.

    One thread at a time, the LLM's.  Every method but `close` raises SessionNotFound once the
    session is closed or has expired.
    """

    def __init__(
        self, runtime: Runtime, loop: EngineLoop, book: SessionBook, session_id: str
    ) -> None:
        """Take up a session of the book; `LLM.session` and `fork` do it."""
        self.session_id = session_id
        self._runtime = runtime
        self._loop = loop
        self._book = book

    @property
    def state(self) -> SessionState:
        """What it has, holds, and how long; looking is no use of it."""
        return self._book.state(self.session_id)

    @property
    def token_ids(self) -> list[int]:
        """The branch so far: what was appended and generated."""
        return unpack_tokens(self.state.tokens)

    def append(self, addition: Addition, *, parse_special: bool = False) -> None:
        """Add a text, token ids or messages to the branch; nothing is computed yet.

        addition       messages ({"role": …, "content": …}) go to an empty session or a
                       conversation, which the chat template then writes anew as a whole; text is
                       encoded for itself, so that the branch keeps its tokens
        parse_special  whether control tokens written in a text act as such

        Raises InvalidRequest or PromptTooLong; the branch is as it was then.
        """
        self._loop.check_idle()
        state = self.state
        content = extended(
            self._runtime,
            content_of(state),
            addition,
            namespace=state.namespace,
            parse_special=parse_special,
        )
        self._book.replace(
            self.session_id,
            content.tokens,
            revision=state.revision,
            conversation=content.conversation,
        )

    def generate(
        self, sampling: SamplingParams | None = None, *, on_news: Listener | None = None
    ) -> Completion:
        """Continue the branch; what comes is part of it, and held.

        on_news  called with each piece of news, to stream text

        Raises InvalidRequest for an empty branch or n above 1 (fork instead), EngineFailure if a
        step fails; after any error or interrupt the branch is as it was.
        """
        self._loop.check_idle()
        if sampling is not None and getattr(sampling, "n", 1) != 1:
            raise InvalidRequest("a session is one branch: fork it for n of them", param="n")
        turn = self._book.begin(self.session_id, "generate")
        try:
            session = turn.session
            request = self._loop.request(session.tokens, sampling, namespace=session.namespace)
            (news,) = self._loop.run([request], on_news=on_news)
            done = completion_of(news)
            conversation = replied(self._runtime, session, done.text, done.token_ids)
            self._book.finish(turn, pack_tokens(done.token_ids), conversation=conversation)
        finally:
            self._book.cancel(turn)
        return done

    def fork(self) -> Session:
        """Return a second session on the same tokens; everything computed is shared."""
        self._loop.check_idle()
        twin = self._book.fork(self.session_id)
        return Session(self._runtime, self._loop, self._book, twin.session_id)

    def score(self, choices: Sequence[Choice], *, normalize: bool = False) -> Scores:
        """Say how likely each choice is behind the branch, which stays as it is.

        choices    texts or token ids, computed in one batch behind the shared prefix
        normalize  choose by the mean of a token's log-probability instead of the sum

        Raises InvalidRequest for an empty branch, no choices, or one without tokens.
        """
        self._loop.check_idle()
        turn = self._book.begin(self.session_id, "score")
        try:
            session = turn.session
            scores = score_choices(
                self._runtime,
                self._loop,
                session.tokens,
                choices,
                namespace=session.namespace,
                normalize=normalize,
            )
            self._book.finish(turn)
        finally:
            self._book.cancel(turn)
        return scores

    def hold(self, seconds: float) -> SessionState:
        """Hold what is computed for so long from now, such as while a tool runs; 0 lets go.

        What is not held stays cached until its room is needed.
        Raises InvalidRequest for a time that is none or too long.
        """
        self._loop.check_idle()
        return self._book.hold(self.session_id, seconds)

    def close(self) -> None:
        """End the session and let go of what it holds; nothing if it has ended already."""
        self._loop.check_idle()
        try:
            self._book.close(self.session_id)
        except SessionNotFound:
            return

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_session(
    runtime: Runtime,
    loop: EngineLoop,
    book: SessionBook,
    addition: Addition,
    *,
    parse_special: bool = False,
) -> Session:
    """Open a session that begins with a text, token ids or messages.

    Raises ServerBusy beyond the limits; InvalidRequest, PromptTooLong.
    """
    loop.check_idle()
    content = extended(
        runtime, EMPTY, addition, namespace=DEFAULT_NAMESPACE, parse_special=parse_special
    )
    state = book.create(content.tokens, conversation=content.conversation)
    return Session(runtime, loop, book, state.session_id)


def score_choices(
    runtime: Runtime,
    loop: EngineLoop,
    prefix: bytes,
    choices: Sequence[Choice],
    *,
    namespace: Namespace = DEFAULT_NAMESPACE,
    normalize: bool = False,
) -> Scores:
    """Score choices behind packed tokens, in one batch; see `Session.score`."""
    ids = choice_tokens(runtime, choices)
    sampling = scoring_params(num_tokens(prefix))
    requests = [
        loop.request(prefix + pack_tokens(choice), sampling, namespace=namespace) for choice in ids
    ]
    done = [completion_of(news) for news in loop.run(requests)]
    return compare([(c.prompt_logprobs, c.usage) for c in done], normalize=normalize)
