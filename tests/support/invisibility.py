"""A real engine beside what its sequences must be: each alone, whole, without a cache, bit for bit.

Owns: the reference, the engine that is held against it, and the comparison.  Does not know: which
schedules are worth a try.
Idea: K/V, logits and draws of a token depend on the tokens up to it, and on nothing else.  So a
reference is found by its tokens alone, whoever computes them, when, and in which company.

    alone = Alone(model, torch.float32)
    engine = WatchedEngine(alone, num_blocks=64, block_size=16)
    engine.submit("a", prompt, SamplingParams(max_tokens=4))
    engine.run()                                             # raises Visible at the first odd bit
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from msgspec import structs

from radixcache import CacheConfig, Lease, RadixCache
from radixcache.tokens import TOKEN_BYTES, pack_tokens
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.executor.executor import ModelExecutor
from runtime.kv.store import KVStore
from runtime.models.llama import LlamaModel
from runtime.plan import StepPlan, StepResult, TokenLogprobs
from runtime.request import Request, SamplingParams
from runtime.sequence import Sequence as Branch

CPU = torch.device("cpu")
EVERY = 8  # steps between two looks at the whole pool
_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class Visible(AssertionError):
    """Something differs that depends on the tokens alone: the cache can be seen."""


class Record(NamedTuple):
    """One sequence, computed alone.

    tokens  packed ids
    logits  [T, vocab] behind each of them
    kv      [layers, 2, T, kv heads, head dim]
    """

    tokens: bytes
    logits: torch.Tensor
    kv: torch.Tensor


@dataclass
class Answer:
    """What a branch of a request gave."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


Answers = dict[int, Answer]
"""By the branch's index."""

Told = Callable[[Branch, int, torch.Tensor, torch.Tensor], None]
"""Called with a sequence, the position of its first row, and the rows' logits and K/V."""


def differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True unless both hold the same bits; NaN is like itself, and -0 unlike 0."""
    words = _WORDS[a.dtype]
    return a.dtype != b.dtype or not torch.equal(
        a.contiguous().view(words), b.contiguous().view(words)
    )


class WatchedModel:
    """Passes everything on, and keeps what it gave in the latest step."""

    def __init__(self, model: LlamaModel) -> None:
        self.inner = model
        self.config = model.config
        self.hidden: torch.Tensor | None = None
        self.projected: list[torch.Tensor] = []

    def forward(self, batch: Any, store: KVStore) -> torch.Tensor:
        """The model's own, kept."""
        self.projected = []
        self.hidden = self.inner.forward(batch, store)
        return self.hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own, kept."""
        self.projected.append(self.inner.logits(hidden))
        return self.projected[-1]


class WatchedExecutor(ModelExecutor):
    """Tells of every row that it computes; the logits that tokens were drawn from included."""

    def __init__(self, model: LlamaModel, store: KVStore, planned: Callable[[], list[Branch]]):
        super().__init__(WatchedModel(model), store)  # type: ignore[arg-type]
        self._planned = planned
        self.told: Told = lambda sequence, start, logits, kv: None
        self.odd: list[str] = []  # the engine turns what `execute` raises into news

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step, then tell of its rows; `odd` has what is wrong with them."""
        result = super().execute(plan)
        model: Any = self.model
        with torch.inference_mode():
            every = model.inner.logits(model.hidden)
        ends: list[int] = []
        row = 0
        for sequence, piece in zip(self._planned(), plan.slices, strict=True):
            count = len(piece.tokens) // TOKEN_BYTES
            assert sequence.lease is not None
            kv = rows_of(self.store, sequence.lease.block_table, piece.start, piece.start + count)
            self.told(sequence, piece.start, every[row : row + count], kv)
            row += count
            ends += [row - 1] * len(piece.draws)
        if ends and differs(model.projected[0], every[ends]):
            self.odd.append("logits of rows that draw differ from those of all rows")
        return result

    def _refuse(self) -> None:
        """Let pass what is no number: it is seen in the rows, and in which."""


def rows_of(store: KVStore, table: Sequence[int], start: int, end: int) -> torch.Tensor:
    """K/V of the tokens `start … end` of a sequence: [layers, 2, T, kv heads, head dim]."""
    size = store.block_size
    first, last = start // size, -(-end // size)
    blocks = store.pool[:, :, torch.tensor(list(table[first:last]), dtype=torch.int64)]
    return blocks.flatten(2, 3)[:, :, start - first * size : end - first * size]


def new_engine(
    model: LlamaModel,
    dtype: torch.dtype,
    *,
    num_blocks: int,
    block_size: int,
    cached: bool,
    **limits: Any,
) -> tuple[Engine, WatchedExecutor]:
    """An engine over a pool of its own, filled with NaN: what is read unwritten shows."""
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    store = KVStore(model.config, **sizes, dtype=dtype, device=CPU)
    store.pool.fill_(torch.nan)
    capacity = min(model.config.max_len, num_blocks * block_size)
    limits = {"max_len": capacity, "max_step_tokens": 8192, "watermark": 0.0} | limits
    executor = WatchedExecutor(model, store, lambda: engine.scheduler.planned())
    engine = Engine(
        RadixCache(CacheConfig(**sizes, enable_prefix_cache=cached)),
        EngineConfig(**limits),
        executor,
        tokenizer=None,
        eos_ids=frozenset(),
        vocab_size=model.config.vocab_size,
        draw_seed=lambda: 1,
    )
    return engine, executor


class Alone:
    """What each request gives on its own: no cache, no company, its prompt in one piece."""

    def __init__(self, model: LlamaModel, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        self._records: list[Record] = []
        self._answers: dict[tuple[bytes, SamplingParams], Answers] = {}

    def answers(self, request: Request) -> Answers:
        """Tokens and log-probabilities of each branch; computed once."""
        key = request.prompt, request.sampling
        if key not in self._answers:
            self._answers[key] = self._compute(request)
        return self._answers[key]

    def record(self, tokens: bytes) -> Record:
        """Return a sequence computed alone that begins with these tokens."""
        for record in self._records:
            if record.tokens.startswith(tokens):
                return record
        raise Visible(f"{len(tokens) // TOKEN_BYTES} tokens that no request has when it is alone")

    def _compute(self, request: Request) -> Answers:
        limit = request.sampling.max_tokens
        assert limit is not None
        # One token more: where the last one fills a block, its K/V is computed, too.
        sampling = structs.replace(request.sampling, max_tokens=limit + 1)
        count = request.sampling.n * (len(request.prompt) // TOKEN_BYTES + limit + 33)
        engine, executor = new_engine(
            self.model, self.dtype, num_blocks=-(-count // 16), block_size=16, cached=False
        )
        rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

        def note(branch: Branch, start: int, logits: torch.Tensor, kv: torch.Tensor) -> None:
            rows.setdefault(branch.index, []).append((logits, kv))

        executor.told = note
        engine.submit(structs.replace(request, request_id="alone", sampling=sampling))
        answers: Answers = {}
        while engine.has_work:
            take_news(answers, engine.step(), "alone")
        for index, answer in answers.items():
            parts = rows[index] if not index else [rows[0][0], *rows[index]]
            self._records.append(
                Record(
                    request.prompt + pack_tokens(answer.tokens[:-1]),
                    torch.cat([logits for logits, _ in parts]),
                    torch.cat([kv for _, kv in parts], 2),
                )
            )
            del answer.tokens[limit:], answer.logprobs[limit:]
        return answers


def take_news(answers: Answers, outputs: Sequence[Any], request_id: str) -> None:
    """Add what came for a request to its answers."""
    for news in outputs:
        if news.request_id == request_id:
            assert news.error is None, news.error
            answer = answers.setdefault(news.index, Answer())
            answer.tokens += news.token_ids
            answer.logprobs += news.logprobs
            answer.prompt_logprobs += news.prompt_logprobs


class WatchedEngine:
    """An engine each of whose rows, blocks and answers is held against the reference.

    chunk   tokens of a prompt computed in one step; 0: all
    limits  fields of `EngineConfig`
    """

    def __init__(
        self,
        alone: Alone,
        *,
        num_blocks: int,
        block_size: int,
        cached: bool = True,
        chunk: int = 0,
        **limits: Any,
    ) -> None:
        self.alone = alone
        self.engine, self.executor = new_engine(
            alone.model,
            alone.dtype,
            num_blocks=num_blocks,
            block_size=block_size,
            cached=cached,
            max_chunk_tokens=chunk,
            **limits,
        )
        self.executor.told = self._compare
        self.cache = self.engine.cache
        self.answers: dict[str, Answers] = {}
        self.forks: list[tuple[Lease, int]] = []
        self._requests: dict[str, Request] = {}
        self._got_on: dict[tuple[str, int], tuple[int, int]] = {}
        self._num_steps = 0

    def submit(self, name: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Queue a request; what it must give is computed first."""
        request = Request(request_id=name, prompt=pack_tokens(prompt), sampling=sampling)
        self.alone.answers(request)
        self._requests[name] = request
        self.answers[name] = {}
        self.engine.submit(request)

    def step(self) -> None:
        """Run one step and compare what it computed; now and then the whole pool."""
        self._num_steps += 1
        outputs = self.engine.step()
        if self.executor.odd:
            raise Visible(self.executor.odd[0])
        for name in {news.request_id for news in outputs}:
            take_news(self.answers[name], outputs, name)
        if self._num_steps % EVERY == 0:
            self.check_pool()

    def run(self) -> None:
        """Step until nothing is left to do, then compare everything."""
        while self.engine.has_work:
            self.step()
        self.check_pool()
        for name in self.answers:
            self.check_answer(name)

    def abort(self, name: str) -> None:
        """End a request now; what it gave so far stays to be compared."""
        self.engine.abort(name)

    def preempt(self, *, only_who_got_on: bool = False) -> None:
        """Take their blocks from all that run.

        only_who_got_on  leave those alone that drew and published nothing since they were
                         admitted, or they would begin anew for ever
        """
        for sequence in list(self.engine.scheduler.running):
            assert sequence.lease is not None
            name = sequence.request.request_id, sequence.index
            state = len(sequence.output), sequence.lease.num_committed
            if only_who_got_on and state <= self._got_on.get(name, (0, 0)):
                continue
            self._got_on[name] = state
            self.engine.scheduler.preempt(sequence)

    def fork(self) -> None:
        """Fork every running sequence: whoever writes next into a shared block must copy it."""
        for sequence in self.engine.scheduler.running:
            assert sequence.lease is not None
            if not sequence.num_computed % self.cache.config.block_size:
                continue  # no block is shared that anybody would write to
            self.engine.scheduler.settle(sequence)
            self.forks.append((self.cache.fork(sequence.lease), sequence.num_computed))

    def release_forks(self, *, keep: int = 0) -> None:
        """Compare the forks with the reference and let them go, but for the newest `keep`."""
        for _ in range(len(self.forks) - keep):
            lease, num_computed = self.forks.pop(0)
            self._compare_lease(lease, num_computed)
            self.cache.release(lease)

    def check_answer(self, name: str) -> None:
        """Compare what a request gave with what it gives alone; an ended one gave its begin."""
        expected = self.alone.answers(self._requests[name])
        for index, answer in self.answers[name].items():
            whole, count = expected[index], len(answer.tokens)
            if answer.tokens != whole.tokens[:count]:
                raise Visible(f"{name}, branch {index}: {answer.tokens} is not {whole.tokens}")
            for told in ("logprobs", "prompt_logprobs"):
                ours, right = getattr(answer, told), getattr(whole, told)
                if ours != right[: len(ours)]:
                    raise Visible(f"{name}, branch {index}: its {told} are others")

    def check_pool(self) -> None:
        """Compare K/V of every token in the pool, found through leases and through the tree."""
        self.cache.check()
        for sequence in self.engine.scheduler.running:
            if sequence.lease is not None:
                self._compare_lease(sequence.lease, sequence.num_computed)
        for lease, num_computed in self.forks:
            self._compare_lease(lease, num_computed)
        for node in self.cache.tree.walk():
            if not node.children and node.parent is not None:
                table, edges, above = self.cache.tree.blocks(node, None), [], node
                while above.parent is not None:
                    edges.append(bytes(above.edge))
                    above = above.parent
                self._compare_blocks(b"".join(reversed(edges)), table, f"the leaf {node!r}")

    def _compare_lease(self, lease: Lease, num_computed: int) -> None:
        tokens = bytes(lease.tokens[: num_computed * TOKEN_BYTES])
        self._compare_blocks(tokens, lease.block_table, repr(lease))

    def _compare_blocks(self, tokens: bytes, table: Sequence[int], who: str) -> None:
        count = len(tokens) // TOKEN_BYTES
        right = self.alone.record(tokens).kv[:, :, :count]
        if differs(rows_of(self.executor.store, table, 0, count), right):
            raise Visible(f"K/V in the pool differs, at {who}")

    def _compare(
        self, sequence: Branch, start: int, logits: torch.Tensor, kv: torch.Tensor
    ) -> None:
        """Compare the rows that a step has just computed."""
        end = start + len(logits)
        try:  # not by the lease, which lacks the newest tokens of one that stands in a row
            record = self.alone.record(sequence.all_tokens()[: end * TOKEN_BYTES])
        except Visible as error:
            self.executor.odd.append(str(error))
            return
        for what, ours, right in (
            ("logits", logits, record.logits[start:end]),
            ("K/V", kv, record.kv[:, :, start:end]),
        ):
            if differs(ours, right):
                name = sequence.request.request_id
                self.executor.odd.append(f"{what} of {name} differs in tokens {start} … {end}")
