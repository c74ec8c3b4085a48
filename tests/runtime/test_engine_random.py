"""The whole engine under random traffic: outputs are those of each request alone, without a cache.

Every step is checked by the engine's own `check()` and by the executor's slots; pools are as small
as the longest request, so that preemption and eviction are the rule.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixcache import DEFAULT_NAMESPACE, Namespace
from radixcache.tokens import unpack_tokens
from runtime.scheduler.ordering import ORDERINGS
from tests.support.engine_bench import EngineBench
from tests.support.fake_executor import OddThenEven, logprobs_of

VOCAB_SIZE, EOS = 8, 7
NAMESPACES = (DEFAULT_NAMESPACE, DEFAULT_NAMESPACE, Namespace(salt="a"))
PIECES = ((0,), (1,), (0, 0), (0, 1, 0), (0, 0, 0, 0), (1, 1, 0, 1, 1))


class EngineMachine(RuleBasedStateMachine):
    """Submits, steps, aborts and breaks steps, in any order."""

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        max_running=st.integers(1, 4),
        spare_budget=st.sampled_from((1, 2, 5, 50)),
        max_chunk_tokens=st.sampled_from((0, 0, 1, 2, 3)),
        enable_prefix_cache=st.sampled_from((True,) * 7 + (False,)),
        ordering=st.sampled_from(tuple(ORDERINGS)),
        max_overtaken=st.sampled_from((0, 1, 3, 64)),
        watermark=st.sampled_from((0.0, 0.0, 0.1, 0.5)),
        public=st.sampled_from(((), (), (0, 0), (0, 0, 1, 0, 0), (0, 1, 0, 0, 0, 0))),
    )
    def build(
        self, max_running: int, spare_budget: int, public: tuple[int, ...], **settings: Any
    ) -> None:
        self.now = 0.0
        self.longest = 10**9
        self.bench = EngineBench(
            **settings,
            clock=lambda: self.now,
            vocab_size=VOCAB_SIZE,
            eos_ids=frozenset({EOS}),
            max_running=max_running,
            max_step_tokens=max_running + spare_budget,
        )
        self.count = 0
        if public:
            size, max_len = self.bench.executor.block_size, self.bench.engine.config.max_len
            blocks = max(0, max_len // size - 3)  # prompts of three blocks still fit beside
            if blocks * size >= 1:
                self.bench.share_publicly(public[: blocks * size])
                self.longest = max_len - self.bench.num_public * size

    @rule(
        pieces=st.lists(st.sampled_from(PIECES), max_size=4),
        namespace=st.sampled_from(NAMESPACES),
        max_tokens=st.sampled_from((None, None, 0, 1, 2, 3, 5)),
        n=st.sampled_from((1, 1, 1, 2, 3)),
        logprobs=st.sampled_from((None, 0)),
        prompt_logprobs=st.sampled_from((None, None, 0)),
        prompt_logprobs_from=st.integers(1, 6),
        priority=st.integers(-1, 1),
        timeout_s=st.sampled_from((None, None, 1.0, 3.0)),
        has_constraint=st.booleans(),
        stop_token_ids=st.sampled_from(((), (), (2,))),
        ignore_eos=st.booleans(),
    )
    def submit(
        self, pieces: list[tuple[int, ...]], n: int, has_constraint: bool, **fields: Any
    ) -> None:
        n = 1 if fields["max_tokens"] == 0 else min(n, self.bench.engine.config.max_running)
        constraint = OddThenEven(VOCAB_SIZE) if has_constraint else None
        self._submit([0, *chain(*pieces)], n=n, constraint=constraint, **fields)

    @precondition(lambda self: self.count)
    @rule(back=st.integers(0, 5), more=st.sampled_from(PIECES))
    def submit_next_turn(self, back: int, more: tuple[int, ...]) -> None:
        tokens = self.bench.tokens(self._name(back))
        self._submit([*tokens, *more], max_tokens=4)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()

    @precondition(lambda self: self.count)
    @rule(back=st.integers(0, 5))
    def abort(self, back: int) -> None:
        name = self._name(back)
        ended = self._ended(name)
        assert bool(self.bench.abort(name)) == (not ended)

    @rule(ahead=st.sampled_from((0, 0, 0, 0, 0, 0, 1, 2)))
    def fail_soon(self, ahead: int) -> None:
        self.bench.executor.fail_at.add(len(self.bench.plans) + ahead)  # 0: too late

    @precondition(lambda self: self.count)
    @rule(back=st.integers(0, 2))
    def fail_always(self, back: int) -> None:
        if self.count % 4 == 0:
            self.bench.executor.fail_for.add(self._name(back))

    @rule(seconds=st.sampled_from((0.5, 1.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def no_step_exceeds_its_budget(self) -> None:
        if self.bench.plans:
            config, slices = self.bench.engine.config, self.bench.plans[-1].slices
            counts = [len(piece.tokens) // 4 for piece in slices]
            assert sum(counts) <= config.max_step_tokens
            assert max(counts, default=0) <= (config.max_chunk_tokens or max(counts, default=0))

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run(max_steps=self._bound())
        for name in self.bench.news:
            self._check_output(name)

    def _submit(self, prompt: list[int], **fields: Any) -> None:
        self.count += 1
        longest = min(self.bench.engine.config.max_len, self.longest)
        if self.longest < 10**9:  # or the blocks that are held leave it no room to the end
            most = longest - len(prompt[: longest - 1])
            fields["max_tokens"] = min(most, fields["max_tokens"] or most)
        self.bench.submit(f"r{self.count}", prompt[: longest - 1], **fields)

    def _name(self, back: int) -> str:
        return f"r{max(1, self.count - back)}"

    def _bound(self) -> int:
        """The oldest request gets on by a token or more in each step, so this many steps do."""
        longest = self.bench.engine.config.max_len
        live = [request for name, request in self.bench.requests.items() if not self._ended(name)]
        return sum((longest + 1) * request.sampling.n for request in live) + 2

    def _ended(self, name: str) -> bool:
        return bool(self.bench.news[name]) and self.bench.news[name][-1].is_last

    def _check_output(self, name: str) -> None:
        request, news = self.bench.requests[name], self.bench.news[name]
        assert [output.is_last for output in news] == [False] * (len(news) - 1) + [True]
        indices = {output.index for output in news}
        assert indices == set(range(request.sampling.n)) or indices == {0}
        for index in indices:
            self._check_branch(name, index)
        told = [logprobs for output in news for logprobs in output.prompt_logprobs]
        tokens = unpack_tokens(request.prompt)
        wanted = range(request.sampling.prompt_logprobs_from, len(tokens))
        if request.sampling.prompt_logprobs is None:
            wanted = range(0)
        expected = [logprobs_of(tokens[:at], tokens[at]) for at in wanted]
        assert told == expected[: len(told)]
        if self.bench.reason(name) in ("stop", "length"):
            assert told == expected

    def _check_branch(self, name: str, index: int) -> None:
        request = self.bench.requests[name]
        expected, reason = self.bench.expected(name, index), self.bench.reason(name, index)
        output = self.bench.output(name, index)
        last = [news for news in self.bench.news[name] if news.index == index][-1]
        if reason in ("abort", "error", "timeout"):
            assert output == expected.tokens[: len(output)]
            assert reason != "error" or str(last.error).startswith("InjectedFailure")
            assert reason != "timeout" or request.timeout_s
        else:
            assert (output, reason) == (expected.tokens, expected.reason)
            usage = last.usage
            assert usage.completion_tokens == len(output)
            assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
        given = [
            logprobs
            for news in self.bench.news[name]
            if news.index == index
            for logprobs in news.logprobs
        ]
        tokens = self.bench.tokens(name, index)
        begins = len(tokens) - len(output)
        if request.sampling.logprobs is not None:
            ends = range(begins, len(tokens))
            assert given == [logprobs_of(tokens[:at], tokens[at]) for at in ends]


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)
