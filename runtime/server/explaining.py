"""Why a prompt misses, over HTTP: the two endpoints, and what answers of others carry.

Owns: the bodies, who may be told what, the headers, and which misses are logged.  Does not know:
how a cause is found.
Idea: a prompt is explained as the cache stands before it is queued, so it never explains itself.
What one namespace has is not told to a caller of another; an administrator's key is told numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixcache.lease import PrefixKey
from runtime.engine import Engine
from runtime.errors import InvalidRequest
from runtime.misses.finding import Finding, Spoken, find_miss, tell_miss
from runtime.misses.records import CacheReport, MissReport
from runtime.request import Request, SamplingParams, pack_prompt
from runtime.server.anthropic import Conversation
from runtime.server.bodies import read_body
from runtime.server.chat_bodies import ChatRequest, Message, OfferedTool, template_tools
from runtime.server.context import Caller, Served, caller_of
from runtime.server.errors import json_response
from runtime.server.fields import CacheOptions, TokenId, told
from runtime.server.journal import Journal
from runtime.server.openai import CompletionOptions, CompletionRequest, Neutral
from runtime.server.prompts import anthropic_prompt

EXPLAIN_HEADER = "x-radixcache-explain"
"""Asks for an explanation with any value but 0 and false, and carries it in one line."""

_log = logging.getLogger("radixcache.misses")


class ExplainRequest(CompletionOptions, kw_only=True, forbid_unknown_fields=True):
    """Body of `/cache/explain`: a chat's or a completion's, whatever else it asks for.

    prompt    a text or token ids; either this or `messages`
    messages  a conversation, with its `tools`
    """

    neutral: ClassVar[Neutral] = CompletionRequest.neutral | {
        name: ChatRequest.neutral[name] for name in ("functions", "function_call")
    }

    prompt: str | Annotated[list[TokenId], told(minItems=1)] | None = None
    messages: Annotated[list[Message], told(minItems=1)] | None = None
    tools: list[OfferedTool] | None = None
    parse_special: bool = False
    # of no account to the prompt
    radixcache: CacheOptions | None = None
    max_completion_tokens: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    echo: Any = None
    best_of: Any = None
    # refused unless neutral
    functions: Any = None
    function_call: Any = None
    suffix: Any = None

    def check(self) -> None:
        """Raise InvalidRequest for both or neither of prompt and messages, or a wrong one."""
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either `prompt` or `messages`", param="prompt")
        if self.messages is not None and not self.messages:
            raise InvalidRequest("`messages` is empty: send at least one", param="messages")
        for place, message in enumerate(self.messages or ()):
            message.check(place)


class Explaining:
    """The endpoints that say why a prompt would miss, and compute nothing."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def explain(self, request: HttpRequest) -> Response:
        """`POST /cache/explain`: of a prompt, or a conversation in OpenAI's words."""
        body = await read_body(request, ExplainRequest, self._served.config)
        body.check()
        self._served.check_model(body.model)
        caller = caller_of(request).narrowed(body.cache_salt)
        ids, spoken = await run_in_threadpool(prompt_of, self._served, body, caller)
        (report,) = await explain_prompts(self._served, caller, [ids], spoken)
        return json_response(report)

    async def explain_messages(self, request: HttpRequest) -> Response:
        """`POST /cache/explain/messages`: of a conversation in Anthropic's words."""
        body = await read_body(request, Conversation, self._served.config)
        body.check()
        self._served.check_model(body.model)
        caller, runtime = caller_of(request), self._served.runtime
        ids = await run_in_threadpool(anthropic_prompt, runtime, body, caller.namespace)
        spoken = spoken_by(self._served, body.template_messages(), body.template_tools())
        (report,) = await explain_prompts(self._served, caller, [ids], spoken)
        return json_response(report)


def prompt_of(
    served: Served, body: ExplainRequest, caller: Caller
) -> tuple[list[int], Spoken | None]:
    """Return the token ids of a body, and the conversation where it is one."""
    runtime = served.runtime
    if isinstance(body.prompt, str):
        return runtime.prompt_tokens(body.prompt, parse_special=body.parse_special), None
    if body.prompt is not None:
        return body.prompt, None
    messages = [message.for_template() for message in body.messages or ()]
    tools = template_tools(body.tools)
    ids = runtime.chat_tokens(messages, tools=tools, namespace=caller.namespace)
    return ids, spoken_by(served, messages, tools)


def wants_explanation(request: HttpRequest, options: CacheOptions | None) -> bool:
    """Return whether body or header asks for one; the body's word goes before."""
    if options is not None:
        return options.explain
    return request.headers.get(EXPLAIN_HEADER, "0").strip().lower() not in ("0", "false", "")


def spoken_by(
    served: Served, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
) -> Spoken | None:
    """Return a conversation as what its parts are found by; None without a chat template."""
    template = served.runtime.chat_template
    if template is None:
        return None
    return Spoken(
        render=lambda messages, tools: template.render(messages, tools=tools),
        messages=messages,
        tools=tools,
    )


async def explain_prompts(
    served: Served,
    caller: Caller,
    prompts: Sequence[Sequence[int]],
    spoken: Spoken | None = None,
) -> list[MissReport]:
    """Explain prompts as the cache stands now, for a caller; compute nothing, change nothing.

    spoken  the conversation, where there is one prompt that is one

    Raises what a request with such a prompt would be refused by; EngineFailure where the engine is
    gone.
    """
    packed = [pack_prompt(ids) for ids in prompts]

    def find(engine: Engine) -> list[Finding]:
        """Look each prompt up, as the request with it would be."""
        namespace = engine.cache.epochs.current(caller.namespace)  # callers know of no epochs
        for tokens in packed:
            engine.validate(
                Request(
                    request_id="explain",
                    prompt=tokens,
                    sampling=SamplingParams(max_tokens=1),
                    namespace=namespace,
                )
            )
        return [
            find_miss(
                engine.cache,
                PrefixKey(namespace, tokens),
                now=served.clock(),
                public=engine.scheduler.admission.public,
                may_see=caller.may_be_told_of,
            )
            for tokens in packed
        ]

    found = await served.engine.call(find)
    tokenizer = served.runtime.tokenizer
    return await run_in_threadpool(lambda: [tell_miss(one, tokenizer, spoken) for one in found])


async def explained(
    served: Served,
    request: HttpRequest,
    options: CacheOptions | None,
    caller: Caller,
    prompts: Sequence[Sequence[int]],
    spoken: Spoken | None = None,
) -> CacheReport | msgspec.UnsetType:
    """Explain the prompts of a request before it is queued, where it or the log wants to know.

    returns  what the answer is to carry; unset where nobody asked for it
    """
    wanted = wants_explanation(request, options)
    if not wanted and not served.config.slow_miss_s:
        return msgspec.UNSET
    reports = await explain_prompts(served, caller, prompts, spoken)
    journal = caller.journal
    if journal is not None:
        journal.misses = [report.fields() for report in reports]
        if wanted:
            lines = ", ".join(report.header() for report in reports[:MAX_IN_HEADER])
            journal.answer_headers.append((EXPLAIN_HEADER.encode(), lines.encode()))
    return CacheReport(tuple(reports)) if wanted else msgspec.UNSET


MAX_IN_HEADER = 8
"""Prompts of one request that the header tells of."""


def log_slow_misses(journal: Journal, slow_miss_s: float) -> None:
    """Log why a request missed, where its first token took longer than `slow_miss_s` seconds.

    Numbers and places only: no text of a prompt.
    """
    waited = journal.time_to_first_token_s
    if not slow_miss_s or waited is None or waited < slow_miss_s:
        return
    line = journal.fields()
    shown = {
        name: line[name] for name in ("id", "tenant", "prompt", "cached", "ttft_s") if name in line
    }
    for miss in journal.misses:
        if miss["cause"] != "hit":
            _log.warning("slow miss", extra={"fields": shown | miss})
