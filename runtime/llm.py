"""The library's front door: a model that continues prompts, in one object.

Owns: what a program may ask of a model.  Does not know: HTTP, threads.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, overload

import msgspec

from runtime.completion import Completion, completion_of
from runtime.config import DEFAULT_MODEL, RuntimeConfig
from runtime.engine_stats import EngineStats
from runtime.errors import InvalidRequest
from runtime.loading import Runtime, load_runtime
from runtime.loop import EngineLoop, Listener
from runtime.request import SamplingParams, pack_prompt
from runtime.sessions.book import SessionBook
from runtime.sessions.records import SessionLimits
from runtime.sessions.scoring import Scores
from runtime.sessions.session import Choice, Session, open_session, score_choices
from runtime.sessions.text import Addition
from runtime.weights.pull import Progress

__all__ = ["LLM", "Completion", "Listener", "Prompt", "Session", "SessionLimits"]

Prompt = str | list[int]
"""Text, or token ids."""


class LLM:
    """A model with a prefix cache.

    model     name, file or folder; see `RuntimeConfig.model`
    progress  told of downloads and loading
    session_limits
              how much its sessions may take
    settings  fields of `RuntimeConfig`

    Loading takes seconds; later prompts that begin like earlier ones are prefilled from where
    they differ.  One thread at a time.  Raises ModelFileError, InvalidSetting.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        progress: Progress | None = None,
        session_limits: SessionLimits | None = None,
        **settings: Any,
    ) -> None:
        config = RuntimeConfig(model=model, **settings)
        self.runtime: Runtime = load_runtime(config, progress=progress)
        engine = self.runtime.engine
        self.sessions = SessionBook(engine, session_limits, new_id=lambda: uuid.uuid4().hex)
        self._loop = EngineLoop(engine)

    @classmethod
    def from_config(cls, config: RuntimeConfig, *, progress: Progress | None = None) -> LLM:
        """Build from settings made elsewhere."""
        return cls(progress=progress, **msgspec.structs.asdict(config))

    # A str is itself a sequence of strs, but only the first form is meant for one.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str,
        sampling: SamplingParams | None = None,
        *,
        on_news: Listener | None = None,
    ) -> Completion:
        """Continue one text."""

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        on_news: Listener | None = None,
    ) -> list[Completion]:
        """Continue several prompts in one batch."""

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        on_news: Listener | None = None,
    ) -> Completion | list[Completion]:
        """Continue one text, or a list of texts and token-id lists in one batch.

        Special tokens in a text are text; give token ids (such as `chat_tokens`) for control.
        on_news  called with each piece of news, to show progress and stream text
        returns  one completion a prompt; with `SamplingParams.n` above 1 each has `others`

        Raises InvalidRequest or PromptTooLong before anything runs, EngineFailure if a step fails.
        """
        if isinstance(prompts, str):
            return self._run([self._ids(prompts)], sampling, on_news=on_news)[0]
        if not isinstance(prompts, (list, tuple)):
            raise InvalidRequest(
                f"prompts are a text or a list of prompts, not {prompts!r:.60}", param="prompt"
            )
        return self._run([self._ids(prompt) for prompt in prompts], sampling, on_news=on_news)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        on_news: Listener | None = None,
    ) -> Completion:
        """Answer a conversation: a list of {"role": …, "content": …}.

        on_news  called with each piece of news, to show prefill progress and stream text
        """
        prompt = self.chat_tokens(messages)
        (completion,) = self._run([prompt], sampling, on_news=on_news)
        for branch in completion.branches:
            self.runtime.remember_reply(pack_prompt(prompt), branch.text, branch.token_ids)
        return completion

    def score(
        self, prompt: Prompt, choices: Sequence[Choice], *, normalize: bool = False
    ) -> Scores:
        """Say how likely each choice is behind a prompt, and which is likeliest.

        choices    texts or token ids, computed in one batch behind the shared prompt
        normalize  choose by the mean of a token's log-probability instead of the sum

        Raises InvalidRequest for an empty prompt, no choices, or one without tokens.
        """
        packed = pack_prompt(self._ids(prompt))
        return score_choices(self.runtime, self._loop, packed, choices, normalize=normalize)

    def session(self, addition: Addition = "", *, parse_special: bool = False) -> Session:
        """Open a session: a branch whose computed prefix is held until it is closed.

        addition  a text, token ids or messages that it begins with

        Use it in a `with` statement, or close it.  Raises ServerBusy where too many are open;
        InvalidRequest, PromptTooLong.
        """
        return open_session(
            self.runtime, self._loop, self.sessions, addition, parse_special=parse_special
        )

    def chat_tokens(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids of a conversation under the model's chat template.

        Raises InvalidRequest for what is no conversation, or one that the template refuses.
        """
        if not isinstance(messages, (list, tuple)) or not all(
            isinstance(message, dict) for message in messages
        ):
            raise InvalidRequest(
                'a conversation is a list of {"role": …, "content": …}', param="messages"
            )
        return self.runtime.chat_tokens(messages)

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self.runtime.engine.stats()

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.runtime.prompt_tokens(prompt)
        if isinstance(prompt, (list, tuple)):
            return list(prompt)
        raise InvalidRequest(
            f"a prompt is a text or a list of token ids, not {prompt!r:.60}", param="prompt"
        )

    def _run(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams | None,
        *,
        on_news: Listener | None = None,
    ) -> list[Completion]:
        requests = [self._loop.request(ids, sampling) for ids in prompts]
        return [completion_of(news) for news in self._loop.run(requests, on_news=on_news)]
