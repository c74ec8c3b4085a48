"""The choices of a chat: from news to what the client is told, piece by piece or whole.

Owns: calls of tools in the text, and why a choice has ended.  Does not know: HTTP, the envelope.
Idea: both forms are made of the same pieces, so a stream put together is the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runtime.server.answers import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    FunctionDelta,
    ToolDelta,
)
from runtime.server.generation import News
from runtime.server.logprobs import chat_logprobs
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


class ChatForm(msgspec.Struct, frozen=True, kw_only=True):
    """How the choices of a chat are told.

    num_choices  branches of the one prompt
    num_top      alternatives told at each place; None tells no log-probabilities
    with_ids     whether token ids are told
    calls        how the model writes calls of tools, which are told as such; None: not at all
    max_calls    so many are told; None: all
    demands      whether a grammar lets it write nothing but calls
    is_named     whether the one function to call was named: such a choice ends with "stop"
    """

    num_choices: int = 1
    num_top: int | None = None
    with_ids: bool = False
    calls: ToolFormat | None = None
    max_calls: int | None = None
    demands: bool = False
    is_named: bool = False


class _Branch:
    """One branch: its text on the way to calls, and what of it was told."""

    def __init__(self, form: ChatForm) -> None:
        self.parser = None
        self.demanded = DemandedCalls() if form.demands else None
        if form.calls is not None and not form.demands:
            self.parser = ToolCallParser(form.calls, max_calls=form.max_calls)
        self.num_calls = 0
        self.texts: list[str] = []
        self.calls: list[tuple[CallBegin, list[str]]] = []  # arguments in pieces
        self.ids: list[int] = []
        self.logprobs: list[ChatLogprob] = []
        self.finish_reason = ""


class ChatChoices:
    """The choices of one chat request, by place."""

    def __init__(self, form: ChatForm, tokenizer: Tokenizer) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._branches = [_Branch(form) for _ in range(form.num_choices)]

    def opening(self) -> list[ChatChunkChoice]:
        """What a stream begins with: who speaks."""
        return [
            ChatChunkChoice(index=place, delta=ChatDelta(role="assistant", content=""))
            for place in range(len(self._branches))
        ]

    def pieces(self, news: News) -> list[ChatChunkChoice]:
        """Return what a piece of news tells the client.

        Token ids and log-probabilities stand in the first piece, the end in the last one.
        """
        place, output, form = news.place, news.output, self._form
        branch = self._branches[place]
        parts = self._parts(branch, output.text, output.finish_reason is not None)
        deltas = [_delta(branch, part) for part in parts]
        logprobs = self._logprobs(news)
        if not deltas:
            if not (output.finish_reason or logprobs or (form.with_ids and output.token_ids)):
                return []
            deltas.append(ChatDelta())
        last = len(deltas) - 1
        ids = output.token_ids if form.with_ids else msgspec.UNSET
        return [
            ChatChunkChoice(
                index=place,
                delta=delta,
                finish_reason=self._reason(branch, output.finish_reason) if at == last else None,
                logprobs=None if at else logprobs,
                token_ids=msgspec.UNSET if at else ids,
            )
            for at, delta in enumerate(deltas)
        ]

    def add(self, news: News) -> None:
        """Take a piece of news for the whole answer."""
        output, branch = news.output, self._branches[news.place]
        for part in self._parts(branch, output.text, output.finish_reason is not None):
            match part:
                case str():
                    branch.texts.append(part)
                case CallBegin():
                    branch.num_calls += 1
                    branch.calls.append((part, []))
                case CallArguments():
                    branch.calls[-1][1].append(part.text)
        branch.ids += output.token_ids
        logprobs = self._logprobs(news)
        if logprobs is not None:
            branch.logprobs += logprobs.content
        if output.finish_reason is not None:
            branch.finish_reason = self._reason(branch, output.finish_reason) or ""

    def whole(self) -> list[ChatChoice]:
        """Return the choices."""
        return [self._put_together(place, branch) for place, branch in enumerate(self._branches)]

    def _put_together(self, place: int, branch: _Branch) -> ChatChoice:
        text = "".join(branch.texts)
        calls = [
            CalledTool(call.id, CalledFunction(call.name, "".join(arguments)))
            for call, arguments in branch.calls
        ]
        return ChatChoice(
            index=place,
            message=ChatMessage(
                content=text if text or not calls else None, tool_calls=calls or msgspec.UNSET
            ),
            finish_reason=branch.finish_reason,
            logprobs=None if self._form.num_top is None else ChatLogprobs(branch.logprobs),
            token_ids=branch.ids if self._form.with_ids else msgspec.UNSET,
        )

    def _parts(self, branch: _Branch, text: str, is_last: bool) -> Sequence[Part]:
        """Cut text at the calls within it."""
        if branch.demanded is not None:
            return branch.demanded.push(text)
        if branch.parser is None:
            return (text,) if text else ()
        pieces = branch.parser.push(text) if text else []
        pieces += branch.parser.flush() if is_last else []
        return parts_of(pieces)

    def _logprobs(self, news: News) -> ChatLogprobs | None:
        output, num_top = news.output, self._form.num_top
        if num_top is None or not output.token_ids:
            return None
        return chat_logprobs(self._tokenizer, output.token_ids, output.logprobs, num_top)

    def _reason(self, branch: _Branch, reason: str | None) -> str | None:
        is_whole = branch.demanded is None or branch.demanded.is_whole
        if reason == "stop" and branch.num_calls and is_whole and not self._form.is_named:
            return "tool_calls"
        return reason


def _delta(branch: _Branch, part: Part) -> ChatDelta:
    match part:
        case str():
            return ChatDelta(content=part)
        case CallBegin(id=name, name=function):
            branch.num_calls += 1
            begin = FunctionDelta(name=function, arguments="")
            call = ToolDelta(index=branch.num_calls - 1, id=name, type="function", function=begin)
        case CallArguments(text=text):
            rest = FunctionDelta(arguments=text)
            call = ToolDelta(index=branch.num_calls - 1, function=rest)
    return ChatDelta(tool_calls=[call])
