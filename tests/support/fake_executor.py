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

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from radixcache import DEFAULT_NAMESPACE, CacheConfig, Namespace, RadixCache
from radixcache.lease import PrefixKey
from radixcache.tokens import pack_tokens, unpack_tokens
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.errors import CopiesFailed
from runtime.plan import Slice, StepPlan, StepResult, TokenLogprobs
from runtime.request import Request, RequestOutput, SamplingParams
from runtime.scheduler.public import PUBLIC
from tests.support.content_oracle import WrongContent

Content = tuple[Namespace, tuple[int, ...]]
MAX_STEPS = 2000  # of one bench: a test that waits for what never comes fails, and does not hang
GARBAGE: Content = (Namespace(model="garbage"), (-1,))


REQUEST_FIELDS = {"priority", "timeout_s", "retentions", "constraint"}


class InjectedFailure(RuntimeError):
    """What a step raises that was told to fail."""


def next_token(
    tokens: Sequence[int], vocab_size: int, *, index: int = 0, allowed: bytes = b""
) -> int:
    """The token that follows `tokens` in a branch: a hash, one of those allowed."""
    drawn = crc32(pack_tokens([*tokens, index] if index else tokens))
    if not allowed:
        return drawn % vocab_size
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")
    ids = np.flatnonzero(bits)
    return int(ids[drawn % len(ids)])


def logprobs_of(tokens: Sequence[int], token: int) -> TokenLogprobs:
    """What a token is worth behind `tokens`: a hash again."""
    return TokenLogprobs(-crc32(pack_tokens([*tokens, token])) / 2**32)


class LetterTokenizer:
    """One character for each token id, from "A" on: all of a tokenizer that an engine needs."""

    drops_first_space = False

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """The characters of these ids, in UTF-8."""
        return "".join(chr(ord("A") + token) for token in ids).encode()


class OddThenEven:
    """A constraint: odd and even ids in turn, beginning with an odd one; the last id always."""

    is_done = False

    def __init__(self, vocab_size: int, *, is_odd: bool = True) -> None:
        self._vocab_size = vocab_size
        self._is_odd = is_odd

    def allowed(self) -> bytes:
        """Every second id, and the last one."""
        bits = np.arange(self._vocab_size) % 2 == self._is_odd
        bits[-1] = True
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token_id: int) -> None:
        """Raises where the id was not allowed."""
        assert token_id % 2 == self._is_odd or token_id == self._vocab_size - 1
        self._is_odd = not self._is_odd

    def fork(self) -> OddThenEven:
        """Another one in the same state."""
        return OddThenEven(self._vocab_size, is_odd=self._is_odd)


class FakeExecutor:
    """Carries out plans on slots that hold prefixes.

    fail_at   which plans, counted from 1, leave garbage where they should write, and raise
    fail_for  requests whose slices do so in whatever plan they are
    public    tokens whose K/V every namespace may read
    fail_next_copies
              whether the copies of the next plan fail
    plans     every plan, in order
    wrong     what was found wrong; the engine turns what `execute` raises into news, so the
              harness looks here
    """

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.fail_at: set[int] = set()
        self.fail_for: set[str] = set()
        self.fail_next_copies = False
        self.public: tuple[int, ...] = ()
        self.plans: list[StepPlan] = []
        self.wrong: list[str] = []
        self._blocks: list[list[Content | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._sequences: dict[tuple[str, int], list[tuple[Namespace, list[int]]]] = {}

    def introduce(self, request: Request) -> None:
        """Learn what a sequence consists of, so that a prefix never computed can be judged."""
        sequence = (request.namespace, unpack_tokens(request.prompt))
        self._sequences.setdefault((request.request_id, 0), []).insert(0, sequence)

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy, write every slice's slots, then read every slice's prefix.

        Raises WrongContent where a slice would read or overwrite what is not its own.
        """
        self.plans.append(plan)
        if self.fail_next_copies:
            self.fail_next_copies = False
            raise CopiesFailed("the copies were told to fail")
        fails = len(self.plans) in self.fail_at
        fails |= any(piece.request_id in self.fail_for for piece in plan.slices)
        for copy in plan.copies:
            source, target = self._blocks[copy.src], self._blocks[copy.dst]
            target[: copy.num_tokens] = source[: copy.num_tokens]
        self._check_writers(plan)
        for piece in plan.slices:
            self._write(piece, garbage=fails)
        if fails:
            raise InjectedFailure(f"plan {len(self.plans)} was told to fail")
        for piece in plan.slices:
            self._check_prefix(piece)
        scored = tuple(chain.from_iterable(map(self._score, plan.slices)))
        drawn = tuple(chain.from_iterable(map(self._draw, plan.slices)))
        return StepResult(
            step=plan.step,
            token_ids=tuple(token for token, _ in drawn),
            logprobs=tuple(logprobs for _, logprobs in drawn),
            target_logprobs=scored,
        )

    def _sequence(self, piece: Slice) -> tuple[Namespace, list[int]]:
        """Whose slice it is: the newest of that name, unless the one before is still closing."""
        tokens = unpack_tokens(piece.tokens)
        for namespace, own in self._sequences[piece.request_id, piece.index]:
            if tokens and own[piece.start : piece.start + len(tokens)] == tokens:
                return namespace, own
        raise self._fault(f"{piece} does not hold the tokens of its sequence")

    def _write(self, piece: Slice, *, garbage: bool) -> None:
        namespace, own = self._sequence(piece)
        table, tokens = unpack_tokens(piece.block_table), unpack_tokens(piece.tokens)
        end = piece.start + len(tokens)
        if len(table) != -(-end // self.block_size):
            raise self._fault(f"{piece} has {len(table)} blocks for {end} tokens")
        for position in range(piece.start + piece.num_kept, end):
            block, slot = divmod(position, self.block_size)
            content = (namespace, tuple(own[: position + 1]))
            self._blocks[table[block]][slot] = GARBAGE if garbage else content

    def _check_prefix(self, piece: Slice) -> None:
        """Read a slice's whole prefix as attention would."""
        namespace, own = self._sequence(piece)
        table = unpack_tokens(piece.block_table)
        for position in range(piece.start + len(unpack_tokens(piece.tokens))):
            block, slot = divmod(position, self.block_size)
            held = self._blocks[table[block]][slot]
            prefix = tuple(own[: position + 1])
            is_public = held == (PUBLIC, prefix) and self.public[: position + 1] == prefix
            if held != (namespace, prefix) and not is_public:
                raise self._fault(
                    f"{piece.request_id} reads slot {slot} of block {table[block]} for its token "
                    f"{position} of {own}, but it holds {held}"
                )

    def _score(self, piece: Slice) -> list[TokenLogprobs]:
        """What the targets of a slice are worth."""
        _, own = self._sequence(piece)
        first = piece.start + piece.first_target + 1
        targets = unpack_tokens(piece.targets)
        if own[first : first + len(targets)] != targets:
            raise self._fault(f"{piece} is asked for other tokens than follow")
        return [logprobs_of(own[:at], own[at]) for at in range(first, first + len(targets))]

    def _draw(self, piece: Slice) -> list[tuple[int, TokenLogprobs]]:
        """The token that follows in each branch; branches begin where there are several."""
        namespace, own = self._sequence(piece)
        end = piece.start + len(unpack_tokens(piece.tokens))
        before, drawn = list(own), []
        for index, draw in enumerate(piece.draws, piece.index):
            if end != len(before) or draw.position != end:
                raise self._fault(f"{piece} draws behind token {end} of {len(before)}")
            token = next_token(before, self.vocab_size, index=index, allowed=draw.allowed)
            drawn.append((token, logprobs_of(before, token)))
            if index == piece.index:
                own.append(token)
            else:
                branches = self._sequences.setdefault((piece.request_id, index), [])
                branches.insert(0, (namespace, [*before, token]))
        return drawn

    def _check_writers(self, plan: StepPlan) -> None:
        """A block that one slice writes is in no other slice's table, not even to be read."""
        users: dict[int, set[int]] = {}
        for index, piece in enumerate(plan.slices):
            for block in unpack_tokens(piece.block_table):
                users.setdefault(block, set()).add(index)
        for index, piece in enumerate(plan.slices):
            first = piece.start + piece.num_kept
            if first == piece.start + len(unpack_tokens(piece.tokens)):
                continue  # it writes nothing
            for block in unpack_tokens(piece.block_table)[first // self.block_size :]:
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
        self.cache = RadixCache(
            CacheConfig(**sizes, enable_prefix_cache=enable_prefix_cache), clock=clock
        )
        self.executor = FakeExecutor(**sizes, vocab_size=vocab_size)
        self.eos_ids = eos_ids
        limits = {"max_len": num_blocks * block_size, "watermark": 0.0} | limits
        self.engine = Engine(
            self.cache,
            EngineConfig(**limits),
            self.executor,
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
