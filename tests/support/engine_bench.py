"""An engine over a fake executor, its invariants and every slot checked after each step.

Owns: the harness, and what a request must give.  Does not know: how scheduler and cache decide.

    bench = EngineBench(num_blocks=8, block_size=2)
    bench.submit("a", [1, 2, 3], max_tokens=4)
    bench.run()
    assert bench.output("a") == bench.expected("a").tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from radixcache import DEFAULT_NAMESPACE, CacheConfig, Namespace, RadixCache, Seals
from radixcache.lease import PrefixKey
from radixcache.tokens import pack_tokens, unpack_tokens
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.plan import StepPlan
from runtime.request import Request, RequestOutput, SamplingParams
from runtime.sealed import SealedExecutor
from tests.support.content_oracle import WrongContent
from tests.support.fake_executor import FakeExecutor, OddThenEven, next_token

MAX_STEPS = 2000  # of one bench: a test that waits for what never comes fails, and does not hang
REQUEST_FIELDS = {"priority", "timeout_s", "retentions", "constraint"}


class Expected(NamedTuple):
    """What a request must give: its tokens, and why it ends."""

    tokens: list[int]
    reason: str


class EngineBench:
    """An engine over a fake executor, its invariants and every slot checked after each step.

    Every block that a step reads is checked against its seal.
    news      every piece of news of each request
    requests  each of them
    limits    fields of `EngineConfig`
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 1,
        vocab_size: int = 97,
        eos_ids: frozenset[int] = frozenset(),
        tokenizer: Any = None,
        enable_prefix_cache: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
        **limits: Any,
    ) -> None:
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        self.seals = Seals(block_size)
        self.cache = RadixCache(
            CacheConfig(**sizes, enable_prefix_cache=enable_prefix_cache),
            observers=[self.seals],
            clock=clock,
        )
        self.executor = FakeExecutor(**sizes, vocab_size=vocab_size)
        self.eos_ids = eos_ids
        limits = {"max_len": num_blocks * block_size, "watermark": 0.0} | limits
        self.engine = Engine(
            self.cache,
            EngineConfig(**limits),
            SealedExecutor(self.executor, self.cache, self.seals),
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            vocab_size=vocab_size,
            draw_seed=lambda: 0,
            clock=clock,
        )
        self.news: dict[str, list[RequestOutput]] = {}
        self.requests: dict[str, Request] = {}
        self.num_public = 0  # blocks held
        self._num_steps = 0

    @property
    def plans(self) -> list[StepPlan]:
        """Every plan so far."""
        return self.executor.plans

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        **fields: Any,
    ) -> None:
        """Queue a request, with fields of its own or of its sampling; raises what submit does."""
        own = {name: fields.pop(name) for name in REQUEST_FIELDS & fields.keys()}
        request = Request(
            request_id=name,
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(**fields),
            namespace=namespace,
            **own,
        )
        self.engine.submit(request)
        self.executor.introduce(request)
        self.requests[name] = request
        self.news[name] = []

    def share_publicly(self, tokens: Sequence[int]) -> None:
        """Compute a public prefix and hold it, or as much of it as there is room for."""
        request = self.engine.share_publicly(pack_tokens(tokens))
        self.executor.public = tuple(tokens)
        self.engine.submit(request)
        self.executor.introduce(request)
        while self.engine.has_work:
            self.engine.step()
            self.engine.check()
        self.num_public = self.engine.hold_public() // self.executor.block_size

    def step(self) -> list[RequestOutput]:
        """Run one step and check everything."""
        self._num_steps += 1
        assert self._num_steps <= MAX_STEPS, self.engine.stats()
        outputs = self.engine.step()
        if self.executor.wrong:
            raise WrongContent(self.executor.wrong[0])
        for output in outputs:
            ended = self.reason(output.request_id, output.index)
            assert ended is None, "news after the last news"
            self.news[output.request_id].append(output)
        self.engine.check()
        return outputs

    def run(self, max_steps: int = 1000) -> int:
        """Step until nothing is left to do, then check that nothing is held; return the steps."""
        steps = 0
        while self.engine.has_work:
            assert steps < max_steps, f"no end after {steps} steps: {self.engine.stats()}"
            self.step()
            steps += 1
        self.check_idle()
        return steps

    def abort(self, name: str) -> list[RequestOutput]:
        """Abort a request and check everything."""
        outputs = self.engine.abort(name)
        for output in outputs:
            self.news[name].append(output)
        self.engine.check()
        return outputs

    def waiting(self) -> list[str]:
        """Names of those that wait, by arrival."""
        return [sequence.request.request_id for sequence in self.engine.scheduler.waiting]

    def check_idle(self) -> None:
        """Nothing is running, and every block is free or evictable."""
        self.engine.check()
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.cache.num_leases) == (0, 0, 0)
        assert (stats.cache.num_private, stats.cache.num_pinned) == (0, self.num_public)

    def output(self, name: str, index: int = 0) -> list[int]:
        """The tokens that came for a branch of a request."""
        return [token for output in self._news(name, index) for token in output.token_ids]

    def tokens(self, name: str, index: int = 0) -> list[int]:
        """Prompt and output of a branch so far."""
        return unpack_tokens(self.requests[name].prompt) + self.output(name, index)

    def text(self, name: str, index: int = 0) -> str:
        """The text that came for a branch of a request."""
        return "".join(output.text for output in self._news(name, index))

    def reason(self, name: str, index: int = 0) -> str | None:
        """Why a branch ended, None while it has not."""
        news = self._news(name, index)
        return news[-1].finish_reason if news else None

    def _news(self, name: str, index: int) -> list[RequestOutput]:
        return [output for output in self.news[name] if output.index == index]

    def num_cached(self, tokens: Sequence[int], namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        """How many of these tokens are in the cache now."""
        return self.cache.match(PrefixKey.of(list(tokens), namespace)).num_tokens

    def expected(self, name: str, index: int = 0) -> Expected:
        """What a branch gives alone in an engine without cache; texts to stop at not counted."""
        request, max_len = self.requests[name], self.engine.config.max_len
        sampling, tokens = request.sampling, unpack_tokens(request.prompt)
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.eos_ids)
        output: list[int] = []
        constraint = OddThenEven(self.executor.vocab_size) if request.constraint else None
        while len(output) != sampling.max_tokens and len(tokens + output) != max_len:
            output.append(
                next_token(
                    tokens + output,
                    self.executor.vocab_size,
                    index=index,
                    allowed=constraint.allowed() if constraint else b"",
                )
            )
            if constraint:
                constraint.accept(output[-1])
            if output[-1] in ends:
                return Expected(output, "stop")
        return Expected(output, "length")
