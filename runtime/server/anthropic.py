"""Anthropic's bodies as records, and what they ask of the engine.

Owns: field names, defaults and limits of `/v1/messages`.  Does not know: HTTP, the engine's thread,
what a message is made of.
Idea: as in OpenAI's bodies, a field is served, ignored because it changes no answer, or refused by
name; one that nobody heard of is refused too.  What agents send with every request, such as how
much thinking they allow, is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from runtime.errors import InvalidRequest
from runtime.grammar import Grammar
from runtime.request import SamplingParams
from runtime.server.anthropic_blocks import (
    Block,
    CacheControl,
    MessageParam,
    TemplateMessage,
    TextBlock,
    system_message,
    template_messages,
)
from runtime.server.fields import CacheOptions
from runtime.tokenizer.tool_calls import check_tools, tools_grammar
from runtime.tokenizer.tool_format import ToolFormat

MAX_BREAKPOINTS = 4
"""Blocks with `cache_control` in one request, as Anthropic has it."""


class ToolParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may call and the client carries out; the only kind."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    # ignored
    strict: Any = None
    eager_input_streaming: Any = None
    defer_loading: Any = None
    allowed_callers: Any = None
    input_examples: Any = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class _Choice(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool = False


class ChooseAuto(_Choice, tag="auto"):
    """The model decides."""


class ChooseAny(_Choice, tag="any"):
    """The model must call a tool."""


class ChooseTool(_Choice, tag="tool", kw_only=True):
    """The model must call this tool."""

    name: str


class ChooseNone(msgspec.Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    """The model is not to call tools."""


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """How much thinking is allowed; a reply makes no use of it: it has no such block."""

    type: Literal["disabled", "enabled", "adaptive", "between_tools"]
    budget_tokens: Any = None
    display: Any = None


class ClearThinking(msgspec.Struct, forbid_unknown_fields=True):
    """Which thoughts of earlier turns leave the prompt: here all do, so it changes nothing."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    """What the server is to leave out of a long conversation."""

    edits: list[ClearThinking] = []


class JsonFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """The output is JSON that meets a schema."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the output must look like; the effort changes nothing."""

    effort: Any = None
    format: JsonFormat | None = None


class Conversation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What counts towards the prompt: the body of `/v1/messages/count_tokens`."""

    model: str
    messages: list[MessageParam]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ChooseAuto | ChooseAny | ChooseTool | ChooseNone | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    # ignored
    speed: Any = None

    def check(self) -> None:
        """Raise InvalidRequest for what is not served."""
        if not self.messages:
            raise InvalidRequest("`messages` is empty: send at least one", param="messages")
        for place, message in enumerate(self.messages):
            message.check(place)
        check_tools(self.template_tools() or (), param="tools[{}].name")
        if self.demands_call and self.output_format is not None:
            raise InvalidRequest(
                "a format and a call of a tool can't both be demanded: leave out `tool_choice`",
                param="tool_choice",
            )
        if self.demands_call and not self.tools:
            raise InvalidRequest("`tool_choice` goes with `tools`", param="tool_choice")
        if len(self.breakpoints()) > MAX_BREAKPOINTS:
            raise InvalidRequest(
                f"at most {MAX_BREAKPOINTS} blocks take `cache_control`", param="cache_control"
            )

    @property
    def reads_calls(self) -> bool:
        """True where the output may hold calls of tools."""
        return bool(self.tools) and not isinstance(self.tool_choice, ChooseNone)

    @property
    def demands_call(self) -> bool:
        """True where the output must be a call."""
        return isinstance(self.tool_choice, ChooseAny | ChooseTool)

    @property
    def demanded_tool(self) -> str | None:
        """The one tool that must be called."""
        return self.tool_choice.name if isinstance(self.tool_choice, ChooseTool) else None

    @property
    def output_format(self) -> JsonFormat | None:
        """What the output must look like; None for any text."""
        return None if self.output_config is None else self.output_config.format

    def grammar(self, format: ToolFormat) -> Grammar | None:
        """Return the grammar of what is demanded, or of that and calls; None for any text.

        format  how the model writes calls

        Raises InvalidRequest.
        """
        demanded = None
        if self.output_format is not None:
            source = msgspec.json.encode(self.output_format.schema).decode()
            demanded = Grammar(kind="json_schema", source=source, param="output_config")
        if not self.demands_call and (demanded is None or not self.reads_calls):
            return demanded
        tools, name = self.template_tools() or (), self.demanded_tool
        return tools_grammar(tools, name, self.parallel, format=format, otherwise=demanded)

    @property
    def parallel(self) -> bool:
        """True where one reply may make several calls."""
        return not (
            isinstance(self.tool_choice, _Choice) and self.tool_choice.disable_parallel_tool_use
        )

    @property
    def prefill(self) -> str | None:
        """The text that the reply goes on from, where the last message is the model's."""
        last = self.messages[-1]
        if last.role != "assistant" or not all(isinstance(b, TextBlock) for b in last.blocks()):
            return None
        return "".join(block.text for block in last.blocks() if isinstance(block, TextBlock))

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as chat templates expect them; None for none."""
        return [tool.for_template() for tool in self.tools] if self.tools else None

    def template_messages(self, *, without_prefill: bool = True) -> list[TemplateMessage]:
        """Return the conversation as chat templates expect it."""
        given = self.messages
        if without_prefill and self.prefill is not None:
            given = given[:-1]
        messages = system_message(self.system)
        for message in given:
            messages += template_messages(message.role, message.blocks())
        return messages

    def breakpoints(self) -> list[tuple[CacheControl, Conversation]]:
        """Return each mark with the conversation up to its block."""
        marks: list[tuple[CacheControl, Conversation]] = []
        replace = msgspec.structs.replace
        bare = replace(self, cache_control=None)
        nobody = [MessageParam("user", "")]  # some templates take no conversation without a message
        for end, tool in enumerate(self.tools or (), start=1):
            if tool.cache_control:
                head = replace(bare, tools=(self.tools or [])[:end], messages=nobody)
                marks.append((tool.cache_control, head))
        system = self.system if isinstance(self.system, list) else []
        for end, text in enumerate(system, start=1):
            if text.cache_control:
                marks.append(
                    (text.cache_control, replace(bare, system=system[:end], messages=nobody))
                )
        for place, message in enumerate(self.messages):
            for control, blocks in _marked_blocks(message.blocks()):
                head_message = MessageParam(message.role, [*blocks])
                head = replace(bare, messages=[*self.messages[:place], head_message])
                marks.append((control, head))
        if self.cache_control:
            marks.append((self.cache_control, bare))
        return marks


class MessagesRequest(Conversation, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/messages`; see docs/server.md for each field."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    radixcache: CacheOptions | None = None
    # ignored
    metadata: Any = None
    service_tier: Any = None
    diagnostics: Any = None

    def check(self) -> None:
        """Raise InvalidRequest for what is not served."""
        super().check()
        if self.max_tokens < 1:
            raise InvalidRequest(
                f"`max_tokens` is {self.max_tokens}: at least 1", param="max_tokens"
            )

    def sampling(self) -> SamplingParams:
        """Translate to the engine's parameters.  Raises InvalidRequest that names the field."""
        try:
            return SamplingParams(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=0 if self.top_k is None else self.top_k,
                max_tokens=self.max_tokens,
                stop=tuple(self.stop_sequences or ()),
            )
        except InvalidRequest as error:
            if error.param != "stop":
                raise
            raise InvalidRequest(f"stop_sequences: {error}", param="stop_sequences") from None


def _marked_blocks(blocks: Sequence[Block]) -> Iterator[tuple[CacheControl, list[Block]]]:
    for end, block in enumerate(blocks, start=1):
        if block.cache_control:
            yield block.cache_control, list(blocks[:end])
