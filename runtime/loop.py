"""The loop that runs an engine for a caller who waits.

Owns: names of requests, and that nothing of a call stays behind in the engine.  Does not know:
text, HTTP, threads (one at a time).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from runtime.engine import Engine
from runtime.errors import InvalidRequest
from runtime.request import Request, RequestOutput, SamplingParams, pack_prompt

Listener = Callable[[RequestOutput], None]
"""Called with each piece of news of a request."""


class EngineLoop:
    """Runs requests on an engine that nobody else uses meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_requests = 0
        self._is_running = False

    def check_idle(self) -> None:
        """Raise InvalidRequest within another call, such as from its listener."""
        if self._is_running:
            raise InvalidRequest("this LLM is in the middle of another call: wait until it ends")

    def request(
        self,
        prompt: Sequence[int] | bytes,
        sampling: SamplingParams | None,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> Request:
        """Return a request with a name of its own.

        prompt  token ids, packed or not
        Raises InvalidRequest for what is no id, or no `SamplingParams`.
        """
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise InvalidRequest(f"sampling is a SamplingParams, not {sampling!r:.60}")
        self._num_requests += 1
        return Request(
            request_id=f"prompt-{self._num_requests}",
            prompt=prompt if isinstance(prompt, bytes) else pack_prompt(prompt),
            sampling=sampling or SamplingParams(),
            namespace=namespace,
        )

    def run(
        self, requests: Sequence[Request], *, on_news: Listener | None = None
    ) -> list[list[RequestOutput]]:
        """Run requests in one batch until all have ended; return the news of each.

        Raises InvalidRequest or PromptTooLong before anything runs.
        """
        engine = self._engine
        self.check_idle()
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
        return list(news.values())
