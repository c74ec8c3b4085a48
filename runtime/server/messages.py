"""Anthropic's two endpoints: answer a conversation, and count its tokens.

Owns: from a body to what is asked of the engine, and from its news to a message, whole or as
events.  Does not know: the engine's inside; OpenAI's forms.
Idea: both forms are made of the same blocks, so a stream put together is the whole message.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixcache.retention import Retention
from runtime.misses.records import CacheReport
from runtime.request import Constraint, RequestOutput, Usage
from runtime.server.anthropic import Conversation, MessagesRequest
from runtime.server.anthropic_answers import (
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    StopDelta,
    StopReason,
    TextAnswer,
    TextDelta,
    TokenCount,
    ToolUseAnswer,
    usage_of,
)
from runtime.server.bodies import read_body
from runtime.server.context import Caller, Served, caller_of
from runtime.server.disconnect import EventStream, until_disconnect
from runtime.server.errors import FAILED, anthropic_error, failure_of, json_response
from runtime.server.explaining import explained, spoken_by
from runtime.server.generation import Ask, News, generate
from runtime.server.prompts import anthropic_prompt, marked_ends
from runtime.tokenizer.demanded_calls import (
    CallArguments,
    CallBegin,
    DemandedCalls,
    Part,
    parts_of,
)
from runtime.tokenizer.load import Tokenizer
from runtime.tokenizer.tool_calls import ToolCallParser
from runtime.tokenizer.tool_format import ToolFormat

RETENTION_PRIORITY = 1
"""Worth of a marked prefix to the cache; what is not marked has 0."""

Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping


class MessageEndpoints:
    """Anthropic's API over one engine."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def create(self, request: HttpRequest) -> Response:
        """`POST /v1/messages`: answer a conversation."""
        body = await read_body(request, MessagesRequest, self._served.config)
        body.check()
        self._served.check_model(body.model)
        caller = caller_of(request)
        grammar = body.grammar(self._served.runtime.tool_format)
        constraint = await self._served.constrain(grammar)
        ask, marked = await run_in_threadpool(self._ask, body, caller, constraint)
        runtime = self._served.runtime
        parser = parser_of(body, runtime.tool_format)
        spoken = spoken_by(self._served, body.template_messages(), body.template_tools())
        report = await explained(
            self._served, request, body.radixcache, caller, ask.prompts, spoken
        )
        reply = Reply(
            ask.name, body, parser, runtime.tokenizer, marked_tokens=marked, report=report
        )
        news = await generate(self._served, ask)
        if body.stream:
            return EventStream(_events(news, reply), is_framed=True)
        return await until_disconnect(request.receive, _whole(news, reply))

    async def count_tokens(self, request: HttpRequest) -> Response:
        """`POST /v1/messages/count_tokens`: how many tokens a conversation has as a prompt."""
        body = await read_body(request, Conversation, self._served.config)
        body.check()
        self._served.check_model(body.model)
        runtime, caller = self._served.runtime, caller_of(request)
        ids = await run_in_threadpool(anthropic_prompt, runtime, body, caller.namespace)
        return json_response(TokenCount(len(ids)))

    def _ask(
        self, body: MessagesRequest, caller: Caller, constraint: Constraint | None
    ) -> tuple[Ask, int]:
        """Return what is asked of the engine, and the tokens before the last mark."""
        runtime = self._served.runtime
        ids = anthropic_prompt(runtime, body, caller.namespace)
        retentions = tuple(
            Retention(priority=RETENTION_PRIORITY, end=end, duration_s=control.duration_s)
            for control, end in marked_ends(runtime, body, caller.namespace, ids)
            if end
        )
        ask = Ask(
            name=f"msg_{uuid.uuid4().hex[:24]}",
            prompts=[ids],
            sampling=body.sampling(),
            caller=caller,
            remembers=body.prefill is None,  # else the message is more than what was generated
            retentions=retentions,
            constraint=constraint,
            is_streamed=body.stream,
        )
        return ask, max((retention.end or 0 for retention in retentions), default=0)


def parser_of(body: MessagesRequest, format: ToolFormat) -> ToolCallParser | DemandedCalls | None:
    """Return what finds the calls in a reply, as many as the client wants; None for no calls."""
    if body.demands_call:  # how many, its grammar bounds
        return DemandedCalls(new_id=_new_call_id)
    if not body.reads_calls:
        return None
    return ToolCallParser(format, max_calls=None if body.parallel else 1, new_id=_new_call_id)


class Reply:
    """A message on its way: from pieces of text to blocks, and why it ended."""

    def __init__(
        self,
        name: str,
        body: MessagesRequest,
        parser: ToolCallParser | DemandedCalls | None,
        tokenizer: Tokenizer,
        *,
        marked_tokens: int,
        report: CacheReport | msgspec.UnsetType = msgspec.UNSET,
    ) -> None:
        self.name = name
        self._body = body
        self._parser = parser
        self._tokenizer = tokenizer
        self._marked_tokens = marked_tokens
        self._report = report
        self._text = ""
        self._ids: list[int] = []
        self._num_calls = 0

    @property
    def is_cut(self) -> bool:
        """True where a call has begun that did not end."""
        return isinstance(self._parser, DemandedCalls) and not self._parser.is_whole

    def add(self, output: RequestOutput) -> list[Part]:
        """Take a piece of output; return what is certain now."""
        self._text += output.text
        self._ids += output.token_ids
        match self._parser:
            case None:
                return [output.text] if output.text else []
            case DemandedCalls() as calls:
                parts = calls.push(output.text)
            case parser:
                pieces = parser.push(output.text)
                pieces += parser.flush() if output.finish_reason is not None else []
                parts = parts_of(pieces)
        self._num_calls += sum(isinstance(part, CallBegin) for part in parts)
        return parts

    def message(
        self,
        usage: Usage,
        content: Sequence[TextAnswer | ToolUseAnswer] = (),
        stop: StopDelta | None = None,
    ) -> MessageAnswer:
        """Return the message as a record."""
        return MessageAnswer(
            id=self.name,
            model=self._body.model,
            content=content,
            usage=usage_of(usage, marked_tokens=self._marked_tokens),
            stop_reason=stop.stop_reason if stop else None,
            stop_sequence=stop.stop_sequence if stop else None,
            radixcache=self._report if stop else msgspec.UNSET,
        )

    def end(self, output: RequestOutput) -> MessageDelta:
        """Return how the message ended, from its last piece."""
        usage = usage_of(output.usage, marked_tokens=self._marked_tokens)
        return MessageDelta(self._stop(output), usage, self._report)

    def _stop(self, output: RequestOutput) -> StopDelta:
        if output.finish_reason == "length":
            is_limit = output.usage.completion_tokens >= self._body.max_tokens
            return StopDelta("max_tokens" if is_limit else "model_context_window_exceeded")
        sequence = self._stop_sequence()
        if sequence is not None:
            return StopDelta("stop_sequence", sequence)
        reason: StopReason = "tool_use" if self._num_calls else "end_turn"
        return StopDelta(reason)

    def _stop_sequence(self) -> str | None:
        """Return the text that ended the reply: it follows what was shown; the shortest was first.

        None where an end of sequence did.
        """
        if not self._ids or self._ids[-1] in self._tokenizer.eos_ids:
            return None
        rest = self._tokenizer.decode(self._ids)[len(self._text) :]
        found = [stop for stop in self._body.stop_sequences or () if rest.startswith(stop)]
        return min(found, key=len, default=None)


async def _whole(news: AsyncGenerator[News, None], reply: Reply) -> Response:
    """Gather the news into one message, and close them.  Raises what a failure stands for."""
    parts: list[Part] = []
    async with aclosing(news):
        async for piece in news:
            output = piece.output
            if output.finish_reason in FAILED:
                raise failure_of(output)
            parts += reply.add(output)
    content = _put_together(parts, is_cut=reply.is_cut)
    return json_response(reply.message(output.usage, content, reply.end(output).delta))


def _put_together(parts: Sequence[Part], *, is_cut: bool) -> list[TextAnswer | ToolUseAnswer]:
    """Return the blocks that parts make; the input of a call that was cut is no JSON, so empty."""
    blocks: list[tuple[CallBegin | None, list[str]]] = []
    for part in parts:
        match part:
            case CallBegin():
                blocks.append((part, []))
            case CallArguments():
                blocks[-1][1].append(part.text)
            case str():
                if not blocks or blocks[-1][0] is not None:
                    blocks.append((None, []))
                blocks[-1][1].append(part)
    if is_cut:
        blocks[-1][1][:] = ["{}"]
    return [
        TextAnswer("".join(texts))
        if begin is None
        else ToolUseAnswer(begin.id, begin.name, msgspec.Raw("".join(texts).encode()))
        for begin, texts in blocks
    ]


async def _events(news: AsyncGenerator[News, None], reply: Reply) -> AsyncGenerator[bytes, None]:
    """The events of a stream; the last one may say what went wrong.

    Raises nothing but OSError, of a client that is gone or too slow to be told of anything.
    """
    blocks = _Blocks()
    has_begun = False
    try:
        async with aclosing(news):
            async for piece in news:
                output = piece.output
                if output.finish_reason in FAILED:
                    raise failure_of(output)
                if not has_begun:
                    has_begun = True
                    yield MessageStart(reply.message(output.usage)).encoded()
                for part in reply.add(output):
                    for event in blocks.take(part):
                        yield event.encoded()
                if output.finish_reason is not None:
                    for event in (*blocks.end(), reply.end(output), MessageStop()):
                        yield event.encoded()
    except OSError:
        raise
    except Exception as error:
        yield anthropic_error(error, reply.name)[1].encoded()


class _Blocks:
    """The blocks of a stream, one after the other."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def take(self, part: Part) -> Iterator[Event]:
        """Yield the events of a piece of text, of a call's begin, or of its arguments."""
        match part:
            case CallBegin(id=name, name=tool):
                yield from self._begin("tool_use", ToolUseAnswer(name, tool, msgspec.Raw(b"{}")))
            case CallArguments(text=text):
                yield BlockDelta(self._index, InputDelta(text))
            case str():
                if self._open != "text":
                    yield from self._begin("text", TextAnswer(""))
                yield BlockDelta(self._index, TextDelta(part))

    def end(self) -> Iterator[Event]:
        """Yield the end of the block that is open, if one is."""
        if self._open is not None:
            self._open = None
            yield BlockStop(self._index)

    def _begin(self, kind: str, block: TextAnswer | ToolUseAnswer) -> Iterator[Event]:
        yield from self.end()
        self._index += 1
        self._open = kind
        yield BlockStart(self._index, block)
        if not self._index:
            yield Ping()


def _new_call_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"
