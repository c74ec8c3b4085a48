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

from runtime.async_engine import AsyncEngine, RequestStream
from runtime.errors import ModelNotFound
from runtime.loading import Runtime
from runtime.metrics import CONTENT_TYPE, ServerMetrics
from runtime.request import Request, RequestOutput, SamplingParams, Usage, pack_prompt
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
from runtime.server.disconnect import EventStream, until_disconnect
from runtime.server.errors import BodyTooLarge, MalformedBody, json_response
from runtime.server.openai import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
)

MAX_BODY_BYTES = 8 << 20
"""Largest request body, in bytes."""

Body = TypeVar("Body", bound=CompletionOptions)
MakeChoice = Callable[[int, str, "tuple[int, ...]", "str | None"], Choice]


class Endpoints:
    """The server's endpoints over one engine.

    clock  monotonic seconds, for durations
    """

    def __init__(
        self,
        runtime: Runtime,
        engine: AsyncEngine,
        metrics: ServerMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtime = runtime
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._created = int(time.time())

    async def health(self, request: HttpRequest) -> Response:
        """`GET /health`: 200 while the engine serves, 503 with the reason when it broke."""
        failure = self._engine.failure
        if failure is not None:
            raise HTTPException(503, failure)
        return json_response({"status": "ok"})

    async def metrics(self, request: HttpRequest) -> Response:
        """`GET /metrics`: Prometheus' text form."""
        return Response(self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: HttpRequest) -> Response:
        """`GET /v1/models`: the one model that is served."""
        return json_response(ModelList(data=[self._card()]))

    async def model(self, request: HttpRequest) -> Response:
        """`GET /v1/models/{name}`: that model, or 404."""
        self._check_model(request.path_params["name"])
        return json_response(self._card())

    async def chat(self, request: HttpRequest) -> Response:
        """`POST /v1/chat/completions`."""
        body = await _read(request, ChatRequest)
        self._check_model(body.model)
        ids = await run_in_threadpool(self._runtime.chat_tokens, body.template_messages())
        max_tokens = body.max_completion_tokens
        if max_tokens is None:
            max_tokens = body.max_tokens
        return await self._answer(
            request, body, [ids], body.sampling(max_tokens), "chat.completion"
        )

    async def completions(self, request: HttpRequest) -> Response:
        """`POST /v1/completions`."""
        body = await _read(request, CompletionRequest)
        self._check_model(body.model)
        prompts = [
            await run_in_threadpool(
                self._runtime.prompt_tokens, prompt, parse_special=body.parse_special
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
        began = self._clock()
        chat = kind == "chat.completion"
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        names = [f"{answer_id}/{place}" for place in range(len(prompts))]
        stream = await self._engine.submit(
            *(
                Request(request_id=name, prompt=pack_prompt(ids), sampling=sampling)
                for name, ids in zip(names, prompts, strict=True)
            )
        )
        envelope = Answer(
            id=answer_id,
            object="chat.completion.chunk" if chat and body.stream else kind,
            created=int(time.time()),
            model=self._runtime.name,
            choices=(),
        )
        news = self._observed(stream, began)
        if chat:
            news = self._remembered(news, pack_prompt(prompts[0]))
        places = {name: place for place, name in enumerate(names)}
        if body.stream:
            make = _choice_maker(chat=chat, whole=False, with_ids=body.return_token_ids)
            return EventStream(_events(news, places, envelope, make, body.include_usage))
        make = _choice_maker(chat=chat, whole=True, with_ids=body.return_token_ids)
        return await until_disconnect(request.receive, _whole(news, places, envelope, make))

    async def _observed(
        self, stream: RequestStream, began: float
    ) -> AsyncGenerator[RequestOutput, None]:
        """Pass news on, observe durations, and abort what has not ended when closed."""
        started: set[str] = set()
        async with aclosing(stream):
            async for output in stream:
                if output.token_ids and output.request_id not in started:
                    started.add(output.request_id)
                    cached = "yes" if output.usage.cached_tokens else "no"
                    self._metrics.time_to_first_token.labels(cached).observe(self._clock() - began)
                if output.finish_reason is not None:
                    self._metrics.request_duration.observe(self._clock() - began)
                yield output

    async def _remembered(
        self, news: AsyncGenerator[RequestOutput, None], prompt: bytes
    ) -> AsyncGenerator[RequestOutput, None]:
        """Pass a chat's news on, and note which ids its text was made of."""
        texts: list[str] = []
        ids: list[int] = []
        async with aclosing(news):
            async for output in news:
                texts.append(output.text)
                ids += output.token_ids
                if output.finish_reason in ("stop", "length"):
                    self._runtime.remember_reply(prompt, "".join(texts), ids)
                yield output

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self._runtime.name,
            created=self._created,
            max_model_len=self._runtime.engine.config.max_len,
        )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._runtime.name:
            raise ModelNotFound(
                f"this server serves {self._runtime.name!r}, not {name!r}: see /v1/models",
                param="model",
            )


async def _read(request: HttpRequest, kind: type[Body]) -> Body:
    """Read and check a body.  Raises BodyTooLarge, MalformedBody, msgspec.ValidationError."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body exceeds {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    try:
        body = msgspec.json.decode(b"".join(chunks), type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the body is not JSON: {error}") from None
    body.check()
    return body


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
    news: AsyncGenerator[RequestOutput, None],
    places: dict[str, int],
    envelope: Answer,
    make: MakeChoice,
) -> Response:
    texts = [""] * len(places)
    ids: list[tuple[int, ...]] = [()] * len(places)
    last: dict[int, RequestOutput] = {}
    async with aclosing(news):
        async for output in news:
            place = places[output.request_id]
            texts[place] += output.text
            ids[place] += output.token_ids
            last[place] = output
            if output.finish_reason in ("error", "abort"):
                raise HTTPException(500, _failure_text(output))
    choices = [make(p, texts[p], ids[p], last[p].finish_reason) for p in range(len(places))]
    usage = sum_usage([last[p].usage for p in range(len(places))])
    return json_response(msgspec.structs.replace(envelope, choices=choices, usage=usage))


async def _events(
    news: AsyncGenerator[RequestOutput, None],
    places: dict[str, int],
    envelope: Answer,
    make: MakeChoice,
    include_usage: bool,
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
        async for output in news:
            place = places[output.request_id]
            usages[place] = output.usage
            if output.finish_reason in ("error", "abort"):
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
