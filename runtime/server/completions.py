"""OpenAI's two endpoints that generate.

Owns: from a body to what is asked of the engine, and how the answer is to be told.  Does not know:
the engine's inside, how news become an answer.
"""

from __future__ import annotations

import time
import uuid
from typing import TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.grammar import Grammar
from runtime.misses.records import CacheReport
from runtime.request import SamplingParams
from runtime.server.answering import Choices, answer_events, whole_answer
from runtime.server.answers import Answer, ChatChoice, Choice, TextChoice
from runtime.server.bodies import read_body
from runtime.server.chat_bodies import ChatRequest, template_tools
from runtime.server.chat_choices import ChatChoices, ChatForm
from runtime.server.context import Caller, Served, caller_of
from runtime.server.disconnect import EventStream, until_disconnect
from runtime.server.explaining import explained, spoken_by
from runtime.server.generation import Ask, generate
from runtime.server.openai import CompletionOptions, CompletionRequest
from runtime.server.openapi import Endpoint
from runtime.server.text_choices import TextChoices, TextForm

Body = TypeVar("Body", bound=CompletionOptions)


class Completions:
    """Chat and completions over one engine."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._tool_format = served.runtime.tool_format

    def endpoints(self) -> list[Endpoint]:
        """Return what is served, as it is routed and documented."""
        return [
            Endpoint(
                "POST",
                "/v1/chat/completions",
                self.chat,
                "Answer a conversation, streamed or whole",
                body=ChatRequest,
                answer=Answer[ChatChoice],
                is_streamed=True,
            ),
            Endpoint(
                "POST",
                "/v1/completions",
                self.completions,
                "Continue a text, token ids, or several of either",
                body=CompletionRequest,
                answer=Answer[TextChoice],
                is_streamed=True,
            ),
        ]

    async def chat(self, request: HttpRequest) -> Response:
        """`POST /v1/chat/completions`: answer a conversation."""
        body = await self._read(request, ChatRequest)
        caller = caller_of(request).narrowed(body.cache_salt)
        sampling, tools = body.sampling(), template_tools(body.tools)
        grammar = body.output_grammar(tools, self._tool_format)
        ids = await run_in_threadpool(
            self._served.runtime.chat_tokens,
            body.template_messages(),
            tools=tools,
            namespace=caller.namespace,
        )
        form = ChatForm(
            num_choices=sampling.n,
            num_top=sampling.logprobs,
            with_ids=body.return_token_ids,
            calls=self._tool_format if body.reads_calls else None,
            max_calls=1 if body.parallel_tool_calls is False else None,
            demands=body.demands_calls,
            is_named=body.named_tool is not None,
        )
        ask = await self._ask("chatcmpl", body, [ids], sampling, caller, grammar)
        spoken = spoken_by(self._served, body.template_messages(), tools)
        report = await explained(self._served, request, body.radixcache, caller, [ids], spoken)
        envelope: Answer[Choice] = self._envelope(
            ask, "chat.completion.chunk" if body.stream else "chat.completion", report
        )
        if body.return_token_ids:
            envelope = msgspec.structs.replace(envelope, prompt_token_ids=ids)
        choices = ChatChoices(form, self._served.runtime.tokenizer)
        return await self._answer(request, body, ask, envelope, choices)

    async def completions(self, request: HttpRequest) -> Response:
        """`POST /v1/completions`: continue prompts."""
        body = await self._read(request, CompletionRequest)
        caller = caller_of(request).narrowed(body.cache_salt)
        sampling = body.sampling()
        most = self._served.runtime.engine.config.max_running
        if sampling.n > max(most, body.num_choices):  # of `n` itself the engine says so
            raise InvalidRequest(f"`best_of` takes at most {most} here", param="best_of")
        prompts = await run_in_threadpool(self._prompts, body)
        form = TextForm(
            num_choices=body.num_choices,
            num_branches=sampling.n,
            num_top=body.logprobs,
            with_ids=body.return_token_ids,
            echoes=bool(body.echo),
            parse_special=body.parse_special,
        )
        ids = [ids for _, ids in prompts]
        body.check_echo(sum(map(len, ids)))
        ask = await self._ask("cmpl", body, ids, sampling, caller, body.grammar())
        choices = TextChoices(form, prompts, self._served.runtime.tokenizer)
        report = await explained(self._served, request, body.radixcache, caller, ids)
        envelope = self._envelope(ask, "text_completion", report)
        return await self._answer(request, body, ask, envelope, choices)

    async def _read(self, request: HttpRequest, kind: type[Body]) -> Body:
        body = await read_body(request, kind, self._served.config)
        body.check()
        self._served.check_model(body.model)
        return body

    def _prompts(self, body: CompletionRequest) -> list[tuple[str, list[int]]]:
        """Text and ids of each prompt; the text of ids is found only where it is echoed."""
        runtime, prompts = self._served.runtime, []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                ids = runtime.prompt_tokens(prompt, parse_special=body.parse_special)
                prompts.append((prompt, ids))
            else:
                prompts.append((self._text_of(prompt) if body.echo else "", prompt))
        return prompts

    def _text_of(self, ids: list[int]) -> str:
        try:
            return self._served.runtime.tokenizer.decode(ids)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param="prompt") from None

    async def _ask(
        self,
        kind: str,
        body: CompletionOptions,
        prompts: list[list[int]],
        sampling: SamplingParams,
        caller: Caller,
        grammar: Grammar | None,
    ) -> Ask:
        constraint = await self._served.constrain(grammar)
        return Ask(
            name=f"{kind}-{uuid.uuid4().hex}",
            prompts=prompts,
            sampling=sampling,
            caller=caller,
            remembers=kind == "chatcmpl",
            priority=body.priority,
            timeout_s=body.timeout_s,
            constraint=constraint,
            is_streamed=bool(body.stream),
        )

    def _envelope(
        self, ask: Ask, kind: str, report: CacheReport | msgspec.UnsetType
    ) -> Answer[Choice]:
        return Answer(
            id=ask.name,
            object=kind,
            created=int(time.time()),
            model=self._served.runtime.name,
            choices=(),
            radixcache=report,
        )

    async def _answer(
        self,
        request: HttpRequest,
        body: CompletionOptions,
        ask: Ask,
        envelope: Answer[Choice],
        choices: Choices,
    ) -> Response:
        news = await generate(self._served, ask)
        branches = ask.sampling.n
        if body.stream:
            return EventStream(answer_events(news, envelope, choices, body.options, branches))
        work = whole_answer(news, envelope, choices, branches)
        return await until_disconnect(request.receive, work)
