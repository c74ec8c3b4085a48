"""An engine without a model: slots hold prefixes, and the next token is a hash of what is read.

Owns: the slots, what may be read from them, and a harness that checks an engine after each step.
Does not know: how scheduler and cache decide.
Idea: K/V of a token depends on exactly the tokens up to it, in its namespace.  So a slot "holds"
the prefix under which it was written, a slice may read no slot but those of its own prefix, and its
next token is a hash of what it reads: sharing that is wrong is seen, and changes the output too.

    bench = EngineBench(num_blocks=8, block_size=2)
    bench.submit("a", [1, 2, 3], max_tokens=4)
    bench.run()
    assert bench.output("a") == bench.expected("a").tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

from radixcache import DEFAULT_NAMESPACE, CacheConfig, Namespace, RadixCache
from radixcache.lease import PrefixKey
from radixcache.tokens import pack_tokens, unpack_tokens
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.plan import Slice, StepPlan, StepResult
from runtime.request import Request, RequestOutput, SamplingParams
from tests.support.content_oracle import WrongContent

Content = tuple[Namespace, tuple[int, ...]]
MAX_STEPS = 2000  # of one bench: a test that waits for what never comes fails, and does not hang
GARBAGE: Content = (Namespace(model="garbage"), (-1,))


class InjectedFailure(RuntimeError):
    """What a step raises that was told to fail."""


def next_token(tokens: Sequence[int], vocab_size: int) -> int:
    """The token that follows `tokens`, whatever the sampling asks for."""
    return crc32(pack_tokens(tokens)) % vocab_size


class LetterTokenizer:
    """One character for each token id, from "A" on: all of a tokenizer that an engine needs."""

    drops_first_space = False

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """The characters of these ids, in UTF-8."""
        return "".join(chr(ord("A") + token) for token in ids).encode()


class FakeExecutor:
    """Carries out plans on slots that hold prefixes.

    fail_at   which plans, counted from 1, leave garbage where they should write, and raise
    plans     every plan, in order
    wrong     what was found wrong; the engine turns what `execute` raises into news, so the
              harness looks here
    """

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.fail_at: set[int] = set()
        self.plans: list[StepPlan] = []
        self.wrong: list[str] = []
        self._blocks: list[list[Content | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._sequences: dict[str, list[tuple[Namespace, list[int]]]] = {}

    def introduce(self, request: Request) -> None:
        """Learn what a sequence consists of, so that a prefix never computed can be judged."""
        sequence = (request.namespace, unpack_tokens(request.prompt))
        self._sequences.setdefault(request.request_id, []).insert(0, sequence)

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy, write every slice's slots, then read every slice's prefix.

        Raises WrongContent where a slice would read or overwrite what is not its own.
        """
        self.plans.append(plan)
        fails = len(self.plans) in self.fail_at
        for copy in plan.copies:
            source, target = self._blocks[copy.src], self._blocks[copy.dst]
            target[: copy.num_tokens] = source[: copy.num_tokens]
        self._check_writers(plan)
        for piece in plan.slices:
            self._write(piece, garbage=fails)
        if fails:
            raise InjectedFailure(f"plan {len(self.plans)} was told to fail")
        return StepResult(
            step=plan.step,
            token_ids=tuple(t for t in map(self._read, plan.slices) if t is not None),
        )

    def _sequence(self, piece: Slice) -> tuple[Namespace, list[int]]:
        """Whose slice it is: the newest of that name, unless the one before is still closing."""
        tokens = unpack_tokens(piece.tokens)
        for namespace, own in self._sequences[piece.request_id]:
            if tokens and own[piece.start : piece.start + len(tokens)] == tokens:
                return namespace, own
        raise self._fault(f"{piece} does not hold the tokens of its sequence")

    def _write(self, piece: Slice, *, garbage: bool) -> None:
        namespace, own = self._sequence(piece)
        table, tokens = unpack_tokens(piece.block_table), unpack_tokens(piece.tokens)
        end = piece.start + len(tokens)
        if len(table) != -(-end // self.block_size):
            raise self._fault(f"{piece} has {len(table)} blocks for {end} tokens")
        for position in range(piece.start, end):
            block, slot = divmod(position, self.block_size)
            content = (namespace, tuple(own[: position + 1]))
            self._blocks[table[block]][slot] = GARBAGE if garbage else content

    def _read(self, piece: Slice) -> int | None:
        """Read a slice's whole prefix as attention would; return the token that follows."""
        namespace, own = self._sequence(piece)
        table = unpack_tokens(piece.block_table)
        end = piece.start + len(unpack_tokens(piece.tokens))
        seen = []
        for position in range(end):
            block, slot = divmod(position, self.block_size)
            held = self._blocks[table[block]][slot]
            if held != (namespace, tuple(own[: position + 1])):
                raise self._fault(
                    f"{piece.request_id} reads slot {slot} of block {table[block]} for its token "
                    f"{position} of {own}, but it holds {held}"
                )
            seen.append(held[1][-1])
        if not piece.draws:
            return None
        if end != len(own) or piece.draws[0].position != end:
            raise self._fault(f"{piece} draws behind token {end} of {len(own)}")
        own.append(next_token(seen, self.vocab_size))
        return own[-1]

    def _check_writers(self, plan: StepPlan) -> None:
        """A block that one slice writes is in no other slice's table, not even to be read."""
        users: dict[int, set[int]] = {}
        for index, piece in enumerate(plan.slices):
            for block in unpack_tokens(piece.block_table):
                users.setdefault(block, set()).add(index)
        for index, piece in enumerate(plan.slices):
            for block in unpack_tokens(piece.block_table)[piece.start // self.block_size :]:
                if users[block] != {index}:
                    raise self._fault(
                        f"slices {users[block]} use block {block}, which {index} writes"
                    )

    def _fault(self, what: str) -> WrongContent:
        self.wrong.append(what)
        return WrongContent(what)


class Expected(NamedTuple):
    """What a request must give: its tokens, and why it ends."""

    tokens: list[int]
    reason: str


class EngineBench:
    """An engine over a fake executor, its invariants and every slot checked after each step.

    news    every piece of news of each request
    limits  fields of `EngineConfig`
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
        **limits: int,
    ) -> None:
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        self.cache = RadixCache(CacheConfig(**sizes, enable_prefix_cache=enable_prefix_cache))
        self.executor = FakeExecutor(**sizes, vocab_size=vocab_size)
        self.eos_ids = eos_ids
        limits.setdefault("max_len", num_blocks * block_size)
        self.engine = Engine(
            self.cache,
            EngineConfig(**limits),
            self.executor,
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            vocab_size=vocab_size,
            draw_seed=lambda: 0,
        )
        self.news: dict[str, list[RequestOutput]] = {}
        self._requests: dict[str, Request] = {}
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
        **sampling: Any,
    ) -> None:
        """Queue a request; raises what the engine raises."""
        request = Request(
            request_id=name,
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(**sampling),
            namespace=namespace,
        )
        self.engine.submit(request)
        self.executor.introduce(request)
        self._requests[name] = request
        self.news[name] = []

    def step(self) -> list[RequestOutput]:
        """Run one step and check everything."""
        self._num_steps += 1
        assert self._num_steps <= MAX_STEPS, self.engine.stats()
        outputs = self.engine.step()
        if self.executor.wrong:
            raise WrongContent(self.executor.wrong[0])
        for output in outputs:
            assert self.reason(output.request_id) is None, "news after the last news"
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

    def abort(self, name: str) -> RequestOutput | None:
        """Abort a request and check everything."""
        output = self.engine.abort(name)
        if output is not None:
            self.news[name].append(output)
        self.engine.check()
        return output

    def check_idle(self) -> None:
        """Nothing is running, and every block is free or evictable."""
        self.engine.check()
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.cache.num_leases) == (0, 0, 0)
        assert (stats.cache.num_private, stats.cache.num_pinned) == (0, 0)

    def output(self, name: str) -> list[int]:
        """The tokens that came for a request."""
        return [token for output in self.news[name] for token in output.token_ids]

    def tokens(self, name: str) -> list[int]:
        """Prompt and output of a request so far."""
        return unpack_tokens(self._requests[name].prompt) + self.output(name)

    def text(self, name: str) -> str:
        """The text that came for a request."""
        return "".join(output.text for output in self.news[name])

    def reason(self, name: str) -> str | None:
        """Why a request ended, None while it has not."""
        return self.news[name][-1].finish_reason if self.news[name] else None

    def num_cached(self, tokens: Sequence[int], namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        """How many of these tokens are in the cache now."""
        return self.cache.match(PrefixKey.of(list(tokens), namespace)).num_tokens

    def expected(self, name: str) -> Expected:
        """What the request gives alone in an engine without cache; texts to stop at not counted."""
        request, max_len = self._requests[name], self.engine.config.max_len
        sampling, tokens = request.sampling, unpack_tokens(request.prompt)
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.eos_ids)
        output: list[int] = []
        while True:
            output.append(next_token(tokens + output, self.executor.vocab_size))
            if output[-1] in ends:
                return Expected(output, "stop")
            if len(output) == sampling.max_tokens or len(tokens + output) == max_len:
                return Expected(output, "length")
