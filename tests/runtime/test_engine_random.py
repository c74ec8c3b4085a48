"""The whole engine under random traffic: outputs are those of each request alone, without a cache.

Every step is checked by the engine's own `check()` and by the executor's slots; pools are as small
as the longest request, so that preemption and eviction are the rule.
"""

from __future__ import annotations

from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixcache import DEFAULT_NAMESPACE, Namespace
from tests.support.fake_executor import EngineBench

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
    )
    def build(self, max_running: int, spare_budget: int, **sizes: int) -> None:
        self.bench = EngineBench(
            **sizes,
            vocab_size=VOCAB_SIZE,
            eos_ids=frozenset({EOS}),
            max_running=max_running,
            max_step_tokens=max_running + spare_budget,
        )
        self.count = 0

    @rule(
        pieces=st.lists(st.sampled_from(PIECES), max_size=4),
        namespace=st.sampled_from(NAMESPACES),
        max_tokens=st.sampled_from((None, None, 1, 2, 3, 5)),
        stop_token_ids=st.sampled_from(((), (), (2,))),
        ignore_eos=st.booleans(),
    )
    def submit(self, pieces: list[tuple[int, ...]], **sampling: object) -> None:
        self._submit([0, *chain(*pieces)], **sampling)

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
        ended = self.bench.reason(name)
        output = self.bench.abort(name)
        assert (output is None) == (ended is not None)

    @rule(ahead=st.sampled_from((0, 0, 0, 0, 0, 0, 1, 2)))
    def fail_soon(self, ahead: int) -> None:
        self.bench.executor.fail_at.add(len(self.bench.plans) + ahead)  # 0: too late

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

    def _submit(self, prompt: list[int], **sampling: object) -> None:
        self.count += 1
        longest = self.bench.engine.config.max_len - 1
        self.bench.submit(f"r{self.count}", prompt[:longest], **sampling)

    def _name(self, back: int) -> str:
        return f"r{max(1, self.count - back)}"

    def _bound(self) -> int:
        """The oldest request gets on by a token or more in each step, so this many steps do."""
        longest = self.bench.engine.config.max_len
        return sum(longest + 1 for name in self.bench.news if self.bench.reason(name) is None) + 2

    def _check_output(self, name: str) -> None:
        expected, reason = self.bench.expected(name), self.bench.reason(name)
        output, last = self.bench.output(name), self.bench.news[name][-1]
        if reason in ("abort", "error"):
            assert output == expected.tokens[: len(output)]
            assert reason == "abort" or str(last.error).startswith("InjectedFailure")
        else:
            assert (output, reason) == (expected.tokens, expected.reason)
            assert last.usage.completion_tokens == len(output)
            assert last.usage.cached_tokens + last.usage.computed_tokens == last.usage.prompt_tokens


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)
