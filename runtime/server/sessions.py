"""Sessions over HTTP: branches that stay cached between the calls of a chat or an agent.

Owns: from a body to the book of sessions and back.  Does not know: how branches are held, how an
answer is written.
Idea: the book lives on the engine's thread; text is encoded on others, from a state that the book
then checks to be still the session's.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixcache.tokens import unpack_tokens
from runtime.engine import Engine
from runtime.misses.records import CacheReport
from runtime.plan import TokenLogprobs
from runtime.request import Usage
from runtime.server.answering import answer_events, whole_answer
from runtime.server.answers import Answer, Choice, TextChoice, sum_usage
from runtime.server.bodies import read_body
from runtime.server.context import Caller, Served, caller_of
from runtime.server.disconnect import EventStream, until_disconnect
from runtime.server.errors import FAILED, failure_of, json_response
from runtime.server.explaining import explained, spoken_by
from runtime.server.generation import Ask
from runtime.server.openapi import Endpoint
from runtime.server.session_bodies import (
    AppendRequest,
    ChoiceAnswer,
    CreateRequest,
    GenerateRequest,
    HoldRequest,
    ScoreAnswer,
    ScoreRequest,
    SessionAnswer,
    SessionClosed,
)
from runtime.server.session_turns import TurnEvents, TurnNews, take_turn
from runtime.server.text_choices import TextChoices, TextForm
from runtime.sessions.book import SessionBook
from runtime.sessions.records import SessionState, Turn
from runtime.sessions.scoring import compare, scoring_params
from runtime.sessions.text import EMPTY, choice_tokens, content_of, extended

T = TypeVar("T")


class SessionEndpoints:
    """The endpoints of sessions over one engine; each caller finds its tenant's only."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.book = SessionBook(
            served.runtime.engine,
            served.config.session_limits,
            new_id=lambda: f"sess-{uuid.uuid4().hex}",
        )

    def endpoints(self) -> list[Endpoint]:
        """Return what is to be routed."""
        one = "/v1/sessions/{session}"
        return [
            Endpoint(
                "POST",
                "/v1/sessions",
                self.create,
                "Open a session",
                body=CreateRequest,
                answer=SessionAnswer,
            ),
            Endpoint("GET", one, self.state, "What a session has and holds", answer=SessionAnswer),
            Endpoint("DELETE", one, self.close, "Close a session", answer=SessionClosed),
            Endpoint(
                "POST",
                f"{one}/append",
                self.append,
                "Add text, token ids or messages to a session",
                body=AppendRequest,
                answer=SessionAnswer,
            ),
            Endpoint(
                "POST",
                f"{one}/generate",
                self.generate,
                "Continue a session, streamed or whole",
                body=GenerateRequest,
                answer=Answer[TextChoice],
                is_streamed=True,
            ),
            Endpoint(
                "POST",
                f"{one}/fork",
                self.fork,
                "Open a second session that begins as this one",
                answer=SessionAnswer,
            ),
            Endpoint(
                "POST",
                f"{one}/score",
                self.score,
                "Compare continuations of a session",
                body=ScoreRequest,
                answer=ScoreAnswer,
            ),
            Endpoint(
                "POST",
                f"{one}/hold",
                self.hold,
                "Keep a session cached for a time",
                body=HoldRequest,
                answer=SessionAnswer,
            ),
        ]

    async def create(self, request: HttpRequest) -> Response:
        """`POST /v1/sessions`: open a session."""
        body = await read_body(request, CreateRequest, self._served.config)
        body.check()
        self._served.check_model(body.model)
        caller = caller_of(request).narrowed(body.cache_salt)
        content = await run_in_threadpool(
            extended,
            self._served.runtime,
            EMPTY,
            body.addition,
            namespace=caller.namespace,
            parse_special=body.parse_special,
        )
        state = await self._call(
            lambda: self.book.create(
                content.tokens,
                owner=caller.tenant,
                namespace=caller.namespace,
                conversation=content.conversation,
            )
        )
        return json_response(SessionAnswer.of(state))

    async def state(self, request: HttpRequest) -> Response:
        """`GET /v1/sessions/{id}`: what it has and holds; no use of it."""
        return json_response(SessionAnswer.of(await self._state(request)))

    async def append(self, request: HttpRequest) -> Response:
        """`POST /v1/sessions/{id}/append`: add a text, token ids or messages."""
        body = await read_body(request, AppendRequest, self._served.config)
        body.check()
        before = await self._state(request)
        content = await run_in_threadpool(
            extended,
            self._served.runtime,
            content_of(before),
            body.addition,
            namespace=before.namespace,
            parse_special=body.parse_special,
        )
        state = await self._call(
            lambda: self.book.replace(
                before.session_id,
                content.tokens,
                revision=before.revision,
                owner=caller_of(request).tenant,
                conversation=content.conversation,
            )
        )
        return json_response(SessionAnswer.of(state))

    async def fork(self, request: HttpRequest) -> Response:
        """`POST /v1/sessions/{id}/fork`: open a second session that shares everything."""
        session_id, owner = _named(request)
        state = await self._call(lambda: self.book.fork(session_id, owner=owner))
        return json_response(SessionAnswer.of(state))

    async def hold(self, request: HttpRequest) -> Response:
        """`POST /v1/sessions/{id}/hold`: keep what is computed for so many seconds."""
        body = await read_body(request, HoldRequest, self._served.config)
        session_id, owner = _named(request)
        state = await self._call(lambda: self.book.hold(session_id, body.seconds, owner=owner))
        return json_response(SessionAnswer.of(state))

    async def close(self, request: HttpRequest) -> Response:
        """`DELETE /v1/sessions/{id}`: end it, and whatever it is doing."""
        session_id, owner = _named(request)
        turn = await self._call(lambda: self.book.close(session_id, owner=owner))
        if turn is not None:
            await self._served.engine.abort(*turn.requests)
        return json_response(SessionClosed(id=session_id))

    async def generate(self, request: HttpRequest) -> Response:
        """`POST /v1/sessions/{id}/generate`: continue the branch, streamed or whole."""
        body = await read_body(request, GenerateRequest, self._served.config)
        body.check()
        self._served.check_model(body.model)
        state = await self._state(request)
        sampling = body.sampling(is_conversation=state.conversation is not None)
        constraint = await self._served.constrain(body.grammar())
        report = await self._explained(request, body, state)
        turn = await self._begin(request, f"gen-{uuid.uuid4().hex}", 1)
        ids = unpack_tokens(turn.session.tokens)

        def ask_for(turn: Turn) -> Ask:
            """Ask for the branch to be continued."""
            return Ask(
                name=turn.name,
                prompts=[ids],
                sampling=sampling,
                caller=_caller(request, turn),
                priority=body.priority,
                timeout_s=body.timeout_s,
                constraint=constraint,
                is_streamed=bool(body.stream),
            )

        news = await take_turn(self._served, self.book, turn, ask_for)
        form = TextForm(num_top=body.logprobs, with_ids=body.return_token_ids)
        choices = TextChoices(form, [("", ids)], self._served.runtime.tokenizer)
        envelope: Answer[Choice] = Answer(
            id=turn.name,
            object="text_completion",
            created=int(time.time()),
            model=self._served.runtime.name,
            choices=(),
            radixcache=report,
        )
        if body.stream:
            events = answer_events(news, envelope, choices, body.options, 1)
            return EventStream(TurnEvents(events, news))
        return await until_disconnect(request.receive, whole_answer(news, envelope, choices, 1))

    async def score(self, request: HttpRequest) -> Response:
        """`POST /v1/sessions/{id}/score`: say which continuation is the likeliest."""
        body = await read_body(request, ScoreRequest, self._served.config)
        self._served.check_model(body.model)
        runtime = self._served.runtime
        choices = await run_in_threadpool(choice_tokens, runtime, body.choices)
        turn = await self._begin(request, f"score-{uuid.uuid4().hex}", len(choices))

        def ask_for(turn: Turn) -> Ask:
            """Ask for each choice behind the branch."""
            prefix = unpack_tokens(turn.session.tokens)
            return Ask(
                name=turn.name,
                prompts=[prefix + choice for choice in choices],
                sampling=scoring_params(len(prefix)),
                caller=_caller(request, turn),
                priority=body.priority,
                timeout_s=body.timeout_s,
            )

        news = await take_turn(self._served, self.book, turn, ask_for)
        scored = await until_disconnect(request.receive, _scores(news, len(choices)))
        scores = compare(scored, normalize=body.normalize)
        return json_response(
            ScoreAnswer(
                id=turn.name,
                model=runtime.name,
                best=scores.best,
                choices=[
                    ChoiceAnswer(
                        index=index,
                        num_tokens=choice.num_tokens,
                        logprob=choice.logprob,
                        mean_logprob=choice.mean_logprob,
                    )
                    for index, choice in enumerate(scores.choices)
                ],
                usage=sum_usage({place: usage for place, (_, usage) in enumerate(scored)}),
            )
        )

    async def _explained(
        self, request: HttpRequest, body: GenerateRequest, state: SessionState
    ) -> CacheReport | msgspec.UnsetType:
        """Explain a branch as it stands before its turn, where the answer or the log tells it."""
        caller = msgspec.structs.replace(caller_of(request), namespace=state.namespace)
        said = state.conversation
        spoken = None if said is None else spoken_by(self._served, said.messages, None)
        ids = unpack_tokens(state.tokens)
        return await explained(self._served, request, body.radixcache, caller, [ids], spoken)

    async def _state(self, request: HttpRequest) -> SessionState:
        session_id, owner = _named(request)
        return await self._call(lambda: self.book.state(session_id, owner=owner))

    async def _begin(self, request: HttpRequest, name: str, num_requests: int) -> Turn:
        """Reserve the session; a caller that is gone before it is known gives it back."""
        session_id, owner = _named(request)
        names = tuple(f"{name}/{number}" for number in range(num_requests))
        begun: list[Turn] = []

        def begin() -> Turn:
            begun.append(self.book.begin(session_id, name, requests=names, owner=owner))
            return begun[0]

        def give_back(engine: Engine) -> None:
            for turn in begun:
                self.book.cancel(turn)

        try:
            return await self._call(begin)
        except asyncio.CancelledError:
            self._served.engine.post(give_back)
            raise

    async def _call(self, function: Callable[[], T]) -> T:
        return await self._served.engine.call(lambda engine: function())


def _named(request: HttpRequest) -> tuple[str, str]:
    """The session that a request is about, and who its owner must be."""
    return request.path_params["session"], caller_of(request).tenant


def _caller(request: HttpRequest, turn: Turn) -> Caller:
    """The caller within the session's namespace, which may be narrower than its tenant's."""
    return msgspec.structs.replace(caller_of(request), namespace=turn.session.namespace)


async def _scores(news: TurnNews, num_choices: int) -> list[tuple[list[TokenLogprobs], Usage]]:
    """Gather the log-probabilities of each choice, and what it cost."""
    logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_choices)]
    usages: dict[int, Usage] = {}
    async with aclosing(news):
        async for piece in news:
            if piece.output.finish_reason in FAILED:
                raise failure_of(piece.output)
            logprobs[piece.place] += piece.output.prompt_logprobs
            usages[piece.place] = piece.output.usage
    return [(logprobs[place], usages[place]) for place in range(num_choices)]
