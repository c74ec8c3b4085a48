"""The library's front door: a model that continues prompts, in one object.

Owns: the loop that runs the engine for a caller who waits.  Does not know: HTTP, threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, overload

import msgspec

from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from runtime.config import DEFAULT_MODEL, RuntimeConfig
from runtime.engine import EngineStats
from runtime.errors import EngineFailure, InvalidRequest
from runtime.loading import Runtime, load_runtime
from runtime.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    Usage,
    pack_prompt,
)
from runtime.weights.pull import Progress

Prompt = str | list[int]
"""Text, or token ids."""

Listener = Callable[[RequestOutput], None]
"""Called with each piece of news of a request."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one prompt.

    token_ids  new tokens; the text is theirs, less the stop
    usage      tokens of the prompt, and how many of them were found in the cache
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage


class LLM:
    """A model with a prefix cache.

    model     name, file or folder; see `RuntimeConfig.model`
    progress  told of downloads and loading
    settings  fields of `RuntimeConfig`

    Loading takes seconds; later prompts that begin like earlier ones are prefilled from where
    they differ.  One thread at a time.  Raises ModelFileError, InvalidSetting.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, progress: Progress | None = None, **settings: Any
    ) -> None:
        config = RuntimeConfig(model=model, **settings)
        self.runtime: Runtime = load_runtime(config, progress=progress)
        self._num_requests = 0
        self._is_running = False

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
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        on_news: Listener | None = None,
    ) -> list[Completion]: ...

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
        self.runtime.remember_reply(pack_prompt(prompt), completion.text, completion.token_ids)
        return completion

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
        namespace: Namespace = DEFAULT_NAMESPACE,
        on_news: Listener | None = None,
    ) -> list[Completion]:
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise InvalidRequest(f"sampling is a SamplingParams, not {sampling!r:.60}")
        engine = self.runtime.engine
        if self._is_running:
            raise InvalidRequest("this LLM is in the middle of another call: wait until it ends")
        requests = [self._request(ids, sampling, namespace) for ids in prompts]
        for request in requests:
            engine.validate(request)
        queue = deque(requests)
        news: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        self._is_running = True
        try:
            while queue or engine.has_work:  # until the K/V of the last tokens is there, too
                while queue and not engine.is_full:
                    engine.submit(queue.popleft())
                for output in engine.step():
                    news[output.request_id].append(output)
                    if on_news:
                        on_news(output)
        finally:  # after an error or an interrupt nothing of ours stays behind
            for request in requests:
                engine.abort(request.request_id)
            engine.let_go()
            self._is_running = False
        return [_completion(told) for told in news.values()]

    def _request(
        self, ids: list[int], sampling: SamplingParams | None, namespace: Namespace
    ) -> Request:
        self._num_requests += 1
        return Request(
            request_id=f"prompt-{self._num_requests}",
            prompt=pack_prompt(ids),
            sampling=sampling or SamplingParams(),
            namespace=namespace,
        )


def _completion(news: list[RequestOutput]) -> Completion:
    last = news[-1]
    if last.finish_reason is None or last.finish_reason == "error":
        raise EngineFailure(last.error or "the engine stopped before the request ended")
    return Completion(
        text="".join(output.text for output in news),
        token_ids=tuple(token for output in news for token in output.token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage,
    )
