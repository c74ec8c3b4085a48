"""Endpoints that generate nothing: whether the server is well, what it serves, tokens and text.

Owns: their bodies and answers.  Does not know: completions.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from runtime.engine import Engine
from runtime.errors import InvalidRequest
from runtime.metrics import CONTENT_TYPE
from runtime.server.bodies import read_body
from runtime.server.chat_bodies import Message, OfferedTool, template_tools
from runtime.server.context import Caller, Served, caller_of
from runtime.server.errors import json_response
from runtime.server.openapi import Endpoint
from runtime.server.scrape import scraped_metrics

MAX_DETOKENIZED = 1 << 17
"""Token ids that `/detokenize` takes at once: more than any prompt that is served here has."""


class StatusAnswer(msgspec.Struct, frozen=True):
    """That all is well; what is not is told as an error."""

    status: Literal["ok"]


class ReadyAnswer(msgspec.Struct, frozen=True):
    """That requests are taken, and whether the cache changes no bit of their answers.

    exact  true: checked at the start; false: refused, a token's bits depend on its batch on this
           machine; null: not checked
    """

    status: Literal["ready"]
    exact: bool | None


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is served, as clients of either API read it.

    created        seconds since 1970 at which serving began; `created_at` is the same as a text
    max_model_len  longest sequence, prompt and output, in tokens
    """

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "radixcache"
    type: Literal["model"] = "model"
    display_name: str
    created_at: str


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models served: one, so that there is no page behind the first."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
    first_id: str
    last_id: str
    has_more: bool = False


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `/tokenize`: a prompt, or a conversation.

    add_special_tokens     whether a prompt gets the tokens that begin a sequence; a conversation
                           has those of its template
    add_generation_prompt  whether a conversation ends where the reply begins
    return_token_strs      whether the text of each token is wanted
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[OfferedTool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    parse_special: bool = False
    return_token_strs: bool = False


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, as a request with that prompt would have them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """The text of token ids, control tokens shown as their text."""

    prompt: str


class ResetAnswer(msgspec.Struct, frozen=True):
    """How many blocks came free; what running requests stand on stays."""

    freed_blocks: int


class Operations:
    """The endpoints that generate nothing, over one engine."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def endpoints(self) -> list[Endpoint]:
        """Return what is served, as it is routed and documented."""
        return [
            Endpoint("GET", "/v1/models", self.models, "The model served", answer=ModelList),
            Endpoint("GET", "/v1/models/{name:path}", self.model, "That model", answer=ModelCard),
            Endpoint(
                "POST",
                "/tokenize",
                self.tokenize,
                "The token ids of a prompt or a conversation",
                body=TokenizeRequest,
                answer=TokenizeAnswer,
            ),
            Endpoint(
                "POST",
                "/detokenize",
                self.detokenize,
                "The text of token ids",
                body=DetokenizeRequest,
                answer=DetokenizeAnswer,
            ),
            Endpoint(
                "POST",
                "/reset_prefix_cache",
                self.reset_prefix_cache,
                "Give up what the caller's requests cached",
                answer=ResetAnswer,
            ),
            Endpoint(
                "GET", "/health", self.health, "Whether the engine serves", answer=StatusAnswer
            ),
            Endpoint("GET", "/ready", self.ready, "Whether requests are taken", answer=ReadyAnswer),
            Endpoint("GET", "/metrics", self.metrics, "Prometheus' text form"),
        ]

    async def health(self, request: HttpRequest) -> Response:
        """`GET /health`: 200 while the engine serves, 503 with the reason when it broke."""
        failure = self._served.engine.failure
        if failure is not None:
            raise HTTPException(503, failure)
        return json_response(StatusAnswer("ok"))

    async def ready(self, request: HttpRequest) -> Response:
        """`GET /ready`: 200 while requests are taken; 503 with the reason while they are not."""
        engine, limit = self._served.engine, self._served.runtime.engine.config.max_waiting
        if engine.failure is not None:
            raise HTTPException(503, engine.failure)
        if engine.is_stopping:
            raise HTTPException(503, "the server is shutting down")
        if engine.latest_stats.waiting >= limit:
            raise HTTPException(503, f"the queue is full: {limit} requests wait")
        return json_response(ReadyAnswer("ready", self._served.runtime.exactness.holds))

    async def metrics(self, request: HttpRequest) -> Response:
        """`GET /metrics`: Prometheus' text form."""
        text = await scraped_metrics(self._served, caller_of(request))
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: HttpRequest) -> Response:
        """`GET /v1/models`: the one model that is served."""
        card = await self._card(request)
        return json_response(ModelList(data=[card], first_id=card.id, last_id=card.id))

    async def model(self, request: HttpRequest) -> Response:
        """`GET /v1/models/{name}`: that model, or 404."""
        self._served.check_model(request.path_params["name"])
        return json_response(await self._card(request))

    async def tokenize(self, request: HttpRequest) -> Response:
        """`POST /tokenize`: the ids of a prompt or a conversation."""
        body = await read_body(request, TokenizeRequest, self._served.config)
        self._served.check_model(body.model)
        ids, texts = await run_in_threadpool(self._tokens_and_texts, body, caller_of(request))
        return json_response(
            TokenizeAnswer(
                count=len(ids),
                max_model_len=await self._max_len(request),
                tokens=ids,
                token_strs=texts,
            )
        )

    async def detokenize(self, request: HttpRequest) -> Response:
        """`POST /detokenize`: the text of ids."""
        body = await read_body(request, DetokenizeRequest, self._served.config)
        self._served.check_model(body.model)
        if len(body.tokens) > MAX_DETOKENIZED:
            raise InvalidRequest(
                f"{len(body.tokens)} tokens, and at most {MAX_DETOKENIZED} are taken at once: send "
                "them in parts",
                param="tokens",
            )
        decode = self._served.runtime.tokenizer.decode
        try:
            text = await run_in_threadpool(decode, body.tokens, skip_special=False)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param="tokens") from None
        return json_response(DetokenizeAnswer(text))

    async def reset_prefix_cache(self, request: HttpRequest) -> Response:
        """`POST /reset_prefix_cache`: give up what the caller's requests cached and nobody uses."""
        caller = caller_of(request)

        def drop(engine: Engine) -> int:
            """Return how many blocks came free."""
            cache = engine.cache
            mine = [namespace for namespace in cache.namespaces() if caller.may_see(namespace)]
            return sum(cache.drop(namespace) for namespace in mine)

        return json_response(ResetAnswer(await self._served.engine.call(drop)))

    def _tokens_and_texts(
        self, body: TokenizeRequest, caller: Caller
    ) -> tuple[list[int], list[str] | None]:
        ids = self._tokens(body, caller)
        if not body.return_token_strs:
            return ids, None
        decode = self._served.runtime.tokenizer.decode
        return ids, [decode([token], skip_special=False) for token in ids]

    def _tokens(self, body: TokenizeRequest, caller: Caller) -> list[int]:
        runtime = self._served.runtime
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either `prompt` or `messages`", param="prompt")
        if body.prompt is not None:
            if body.add_special_tokens:
                return runtime.prompt_tokens(body.prompt, parse_special=body.parse_special)
            return runtime.tokenizer.encode(body.prompt, parse_special=body.parse_special)
        if not body.messages:
            raise InvalidRequest("`messages` is empty: send at least one", param="messages")
        messages: list[dict[str, Any]] = []
        for place, message in enumerate(body.messages):
            message.check(place)
            messages.append(message.for_template())
        return runtime.chat_tokens(
            messages,
            tools=template_tools(body.tools),
            add_generation_prompt=body.add_generation_prompt,
            namespace=caller.namespace,
        )

    async def _max_len(self, request: HttpRequest) -> int:
        namespace = caller_of(request).namespace
        return await self._served.engine.call(lambda engine: engine.longest_of(namespace))

    async def _card(self, request: HttpRequest) -> ModelCard:
        name, created = self._served.runtime.name, self._served.created
        return ModelCard(
            id=name,
            created=created,
            max_model_len=await self._max_len(request),
            display_name=name,
            created_at=datetime.fromtimestamp(created, UTC).isoformat(),
        )
