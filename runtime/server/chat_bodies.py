"""The bodies of chats as records: messages, tools, and the options of their own.

Owns: field names, defaults and limits of `/v1/chat/completions`.  Does not know: HTTP, the engine's
thread, how a template renders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from runtime.errors import InvalidRequest
from runtime.grammar import Grammar
from runtime.request import SamplingParams
from runtime.server.fields import CacheOptions, Empty, NumTokens, NumTop, only, told
from runtime.server.openai import CompletionOptions, Neutral
from runtime.tokenizer.tool_calls import check_tools, tools_grammar
from runtime.tokenizer.tool_format import ToolFormat

Role = Literal["system", "developer", "user", "assistant", "tool"]

_EMPTY_IN_MESSAGES = ("refusal", "annotations", "audio", "function_call", "reasoning_content")


class TextPart(msgspec.Struct):
    """A piece of a message's content; text is the only kind served."""

    type: Literal["text"]
    text: str


class SentFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a call that the model made; its arguments are JSON, as a text."""

    name: str
    arguments: str = ""


class SentCall(msgspec.Struct):
    """A call that the model made, sent back as it came."""

    id: str
    type: Literal["function"]
    function: SentFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation; `developer` is rendered as `system`.

    A reply may be sent back as it came: fields that the server's own answers carry are taken where
    they are null or empty.
    """

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[SentCall] | None = None
    tool_call_id: str | None = None
    # refused unless empty
    refusal: Empty = None
    annotations: Empty = None
    audio: Empty = None
    function_call: Empty = None
    reasoning_content: Empty = None

    def check(self, place: int) -> None:
        """Raise InvalidRequest for a message without content, or with what its role has not."""
        for name in _EMPTY_IN_MESSAGES:
            if getattr(self, name):
                raise InvalidRequest(
                    f"`{name}` in a message is not supported here; leave it out",
                    param=f"messages[{place}].{name}",
                )
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise InvalidRequest(
                    f"`{name}` belongs to messages of role {role}, not {self.role}",
                    param=f"messages[{place}].{name}",
                )
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(
                f"the message has no content: give `content` a text (role {self.role})",
                param=f"messages[{place}].content",
            )

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text or ())
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text}
        if self.name:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call.

    parameters  JSON schema of its arguments; none: any object
    strict      taken, and changes nothing: a demanded call always follows the schema
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that the model may call; functions are the only kind."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: without what was not given."""
        fields = ("name", "description", "parameters")
        given = {name: getattr(self.function, name) for name in fields}
        function = {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "function": function}


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The one function that the model is to call."""

    type: Literal["function"]
    function: FunctionName


def template_tools(tools: Sequence[OfferedTool] | None) -> list[dict[str, Any]] | None:
    """Return the tools that a body offers, as chat templates expect them; None for none.

    Raises InvalidRequest for too many, or a name that is malformed or given twice.
    """
    if not tools:
        return None
    offered = [tool.for_template() for tool in tools]
    check_tools(offered)
    return offered


class ChatRequest(CompletionOptions, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/chat/completions`.

    logprobs      whether the log-probability of each token is told
    top_logprobs  and of so many of the likeliest ones
    tools         functions that the model may call; `tool_choice` says whether it must
    radixcache    whether the answer tells why the prompt missed
    """

    neutral: ClassVar[Neutral] = {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "audio": (),
        "moderation": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], told(minItems=1)]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    radixcache: CacheOptions | None = None
    # refused unless neutral
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    reasoning_effort: Annotated[Any, only("none")] = None
    audio: Annotated[Any, only()] = None
    moderation: Annotated[Any, only()] = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None

    def check(self) -> None:
        """Raise InvalidRequest for an empty conversation or a field that is not served."""
        super().check()
        if not self.messages:
            raise InvalidRequest("`messages` is empty: send at least one", param="messages")
        for place, message in enumerate(self.messages):
            message.check(place)
        for name in ("max_completion_tokens", "max_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise InvalidRequest(f"`{name}` is {limit}: at least 1", param=name)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`top_logprobs` goes with `logprobs`", param="top_logprobs")
        if self.demands_calls and not self.tools:
            raise InvalidRequest("`tool_choice` goes with `tools`", param="tool_choice")

    def sampling(self) -> SamplingParams:
        """Translate to the engine's parameters.  Raises InvalidRequest that names the field."""
        limit = self.max_completion_tokens
        try:
            return self.common_sampling(
                max_tokens=self.max_tokens if limit is None else limit,
                n=self.num_choices,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            )
        except InvalidRequest as error:
            if error.param != "logprobs":
                raise
            raise InvalidRequest(f"top_{error}", param="top_logprobs") from None

    @property
    def reads_calls(self) -> bool:
        """True where the output may hold calls of tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def demands_calls(self) -> bool:
        """True where the output is nothing but calls of tools."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def named_tool(self) -> str | None:
        """The one function that is to be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, ToolChoice) else None

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the conversation as chat templates expect it."""
        return [message.for_template() for message in self.messages]

    def output_grammar(
        self, tools: Sequence[Mapping[str, Any]] | None, format: ToolFormat
    ) -> Grammar | None:
        """Return what the output must look like: what a format says, calls that are demanded, or
        either of them where tools are offered beside a format of JSON.

        format  how the model writes calls

        Raises InvalidRequest where both are asked for.
        """
        demanded, named = self.grammar(), self.named_tool
        several = self.parallel_tool_calls is not False and named is None
        if not self.demands_calls:
            is_json = demanded is not None and demanded.kind in ("json_object", "json_schema")
            if not is_json or not self.reads_calls:
                return demanded
            return tools_grammar(tools or (), None, several, format=format, otherwise=demanded)
        if demanded is not None:
            raise InvalidRequest(
                "a format and a call of a tool can't both be demanded: leave out `tool_choice`",
                param="tool_choice",
            )
        return tools_grammar(tools or (), named, several, format=format)
