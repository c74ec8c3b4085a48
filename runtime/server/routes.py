"""The endpoints.

Owns: from a body to requests, and from their news to answers.  Does not know: the engine's inside.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from runtime.metrics import CONTENT_TYPE
from runtime.request import RequestOutput, SamplingParams, Usage
from runtime.server.answers import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    Choice,
    ErrorAnswer,
    ErrorBody,
    ModelCard,
    ModelList,
    TextChoice,
    sum_usage,
)
from runtime.server.bodies import read_body
from runtime.server.context import Served, caller_of
from runtime.server.disconnect import EventStream, until_disconnect
from runtime.server.errors import json_response
from runtime.server.generation import Ask, News, generate
from runtime.server.openai import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
)

FAILED = ("error", "abort", "timeout")
"""Finish reasons of requests that gave no whole answer."""

Body = TypeVar("Body", bound=CompletionOptions)
MakeChoice = Callable[[int, str, "tuple[int, ...]", "str | None"], Choice]


class Endpoints:
    """The server's endpoints over one engine."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def health(self, request: HttpRequest) -> Response:
        """`GET /health`: 200 while the engine serves, 503 with the reason when it broke."""
        failure = self._served.engine.failure
        if failure is not None:
            raise HTTPException(503, failure)
        return json_response({"status": "ok"})

    async def metrics(self, request: HttpRequest) -> Response:
        """`GET /metrics`: Prometheus' text form."""
        return Response(self._served.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: HttpRequest) -> Response:
        """`GET /v1/models`: the one model that is served."""
        return json_response(ModelList(data=[self._card()]))

    async def model(self, request: HttpRequest) -> Response:
        """`GET /v1/models/{name}`: that model, or 404."""
        self._served.check_model(request.path_params["name"])
        return json_response(self._card())

    async def chat(self, request: HttpRequest) -> Response:
        """`POST /v1/chat/completions`."""
        body = await self._read(request, ChatRequest)
        self._served.check_model(body.model)
        ids = await run_in_threadpool(self._served.runtime.chat_tokens, body.template_messages())
        max_tokens = body.max_completion_tokens
        if max_tokens is None:
            max_tokens = body.max_tokens
        return await self._answer(
            request, body, [ids], body.sampling(max_tokens), "chat.completion"
        )

    async def completions(self, request: HttpRequest) -> Response:
        """`POST /v1/completions`."""
        body = await self._read(request, CompletionRequest)
        self._served.check_model(body.model)
        prompts = [
            await run_in_threadpool(
                self._served.runtime.prompt_tokens, prompt, parse_special=body.parse_special
            )
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompts()
        ]
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return await self._answer(
            request, body, prompts, body.sampling(max_tokens), "text_completion"
        )

    async def _answer(
        self,
        request: HttpRequest,
        body: CompletionOptions,
        prompts: list[list[int]],
        sampling: SamplingParams,
        kind: str,
    ) -> Response:
        chat = kind == "chat.completion"
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        news = await generate(
            self._served,
            Ask(
                name=answer_id,
                prompts=prompts,
                sampling=sampling,
                caller=caller_of(request),
                remembers=chat,
            ),
        )
        envelope = Answer(
            id=answer_id,
            object="chat.completion.chunk" if chat and body.stream else kind,
            created=int(time.time()),
            model=self._served.runtime.name,
            choices=(),
        )
        if body.stream:
            make = _choice_maker(chat=chat, whole=False, with_ids=body.return_token_ids)
            return EventStream(_events(news, envelope, make, body.include_usage))
        make = _choice_maker(chat=chat, whole=True, with_ids=body.return_token_ids)
        num_choices = len(prompts) * sampling.n
        return await until_disconnect(request.receive, _whole(news, num_choices, envelope, make))

    async def _read(self, request: HttpRequest, kind: type[Body]) -> Body:
        body = await read_body(request, kind, max_bytes=self._served.config.max_body_bytes)
        body.check()
        return body

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self._served.runtime.name,
            created=self._served.created,
            max_model_len=self._served.runtime.engine.config.max_len,
        )


def _choice_maker(*, chat: bool, whole: bool, with_ids: bool) -> MakeChoice:
    """Return what turns a piece of output into a choice of the right form."""

    def make(place: int, text: str, ids: tuple[int, ...], reason: str | None) -> Choice:
        token_ids = ids if with_ids else msgspec.UNSET
        if not chat:
            return TextChoice(index=place, text=text, finish_reason=reason, token_ids=token_ids)
        if whole:
            return ChatChoice(
                index=place,
                message=ChatMessage(text),
                finish_reason=reason or "stop",
                token_ids=token_ids,
            )
        return ChatChunkChoice(
            index=place, delta=ChatDelta(text), finish_reason=reason, token_ids=token_ids
        )

    return make


async def _whole(
    news: AsyncGenerator[News, None], num_choices: int, envelope: Answer, make: MakeChoice
) -> Response:
    texts = [""] * num_choices
    ids: list[tuple[int, ...]] = [()] * num_choices
    last: dict[int, RequestOutput] = {}
    async with aclosing(news):
        async for piece in news:
            place, output = piece.place, piece.output
            texts[place] += output.text
            ids[place] += output.token_ids
            last[place] = output
            if output.finish_reason in FAILED:
                raise HTTPException(500, _failure_text(output))
    choices = [make(p, texts[p], ids[p], last[p].finish_reason) for p in range(num_choices)]
    usage = sum_usage([last[p].usage for p in range(num_choices)])
    return json_response(msgspec.structs.replace(envelope, choices=choices, usage=usage))


async def _events(
    news: AsyncGenerator[News, None], envelope: Answer, make: MakeChoice, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a stream, as JSON: a first one for each chat choice, pieces, usage, done."""
    encode = msgspec.json.encode
    if include_usage:
        envelope = msgspec.structs.replace(envelope, usage=None)
    usages: dict[int, Usage] = {}
    if envelope.object == "chat.completion.chunk":
        opening = ChatChunkChoice(
            index=0, delta=ChatDelta("", role="assistant"), finish_reason=None
        )
        yield encode(msgspec.structs.replace(envelope, choices=(opening,)))
    failed = False
    async with aclosing(news):
        async for piece in news:
            place, output = piece.place, piece.output
            usages[place] = output.usage
            if output.finish_reason in FAILED:
                failed = True
                yield encode(
                    ErrorAnswer(ErrorBody(message=_failure_text(output), type="server_error"))
                )
                break
            if output.text or output.token_ids or output.finish_reason:
                choice = make(place, output.text, output.token_ids, output.finish_reason)
                yield encode(msgspec.structs.replace(envelope, choices=(choice,)))
    if include_usage and not failed:
        usage = sum_usage(list(usages.values()))
        yield encode(msgspec.structs.replace(envelope, choices=(), usage=usage))
    yield b"[DONE]"


def _failure_text(output: RequestOutput) -> str:
    return output.error or "the request was ended by the server"
