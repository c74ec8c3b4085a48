"""One scenario, run by the real engine and executor, and held to what each sequence is alone.

Owns: the engine over memory of its own, what is noted of a run, and the comparison.  Does not know:
which scenarios there are, what is made of their outcomes.
Idea: the reference is no second engine: each sequence that a run ends with is computed again in one
whole pass, and the run's K/V, logits and tokens must be those.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from kernels.row_check import same_bits
from radixcache.cache import RadixCache
from radixcache.config import CacheConfig
from radixcache.tokens import TOKEN_BYTES, pack_tokens
from runtime.config import EngineConfig
from runtime.decoding.sampler import choose_tokens
from runtime.engine import Engine
from runtime.errors import EngineFailure
from runtime.exactness.recompute import Difference, first_difference, kept, recompute
from runtime.exactness.scenarios import Scenario, companions, prompts
from runtime.executor.executor import ModelExecutor
from runtime.kv.store import KVStore
from runtime.models.batch import Batch
from runtime.models.llama import LlamaModel
from runtime.plan import Draw, Slice, StepPlan, StepResult
from runtime.request import Request, SamplingParams
from runtime.sequence import Sequence

NEW_TOKENS = 6
BRANCHES = 3
MAX_STEP_TOKENS = 8192


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one scenario.

    sequences      compared with what they are alone
    logit_rows     compared, [vocab] each
    kv_tokens      compared, K and V of all layers each
    cached_tokens  prompt tokens that came from the cache
    request        the first that differs, "" for none
    difference     where it does
    """

    scenario: Scenario
    sequences: int
    logit_rows: int
    kv_tokens: int
    cached_tokens: int
    preemptions: int
    forks: int
    evicted_blocks: int
    seconds: float
    request: str = ""
    difference: Difference | None = None


class Alone(NamedTuple):
    """A sequence computed whole and alone.

    kv      [layers, 2, T, kv heads, head dim]
    logits  [NEW_TOKENS, vocab] behind its last tokens
    """

    kv: torch.Tensor
    logits: torch.Tensor


class Notes:
    """What a run showed of one sequence.

    tokens  packed ids that its K/V is of: all but the last one drawn
    output  tokens drawn, from which logits, and how
    kv      of `tokens`, as it stood in the pool when the last token was drawn
    """

    __slots__ = ("draws", "kv", "logits", "output", "tokens")

    def __init__(self) -> None:
        self.tokens = b""
        self.output: list[int] = []
        self.draws: list[Draw] = []
        self.logits: list[torch.Tensor] = []
        self.kv: torch.Tensor | None = None


Branch = tuple[str, int]
"""A request's id, and which of its branches."""


class NotingExecutor(ModelExecutor):
    """Computes steps, and notes what sequences that draw a token look like."""

    def __init__(self, model: LlamaModel, store: KVStore) -> None:
        super().__init__(model, store)
        self.notes: defaultdict[Branch, Notes] = defaultdict(Notes)
        self._slices: tuple[Slice, ...] = ()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step; then note its tokens and the K/V below them."""
        self._slices = plan.slices
        result = super().execute(plan)
        tokens = iter(result.token_ids)
        for piece in plan.slices:
            if piece.draws:
                table = np.frombuffer(piece.block_table, np.int32).tolist()
                kv = kept(self.store, table, piece.start + len(piece.tokens) // TOKEN_BYTES)
            for branch, draw in zip(_branches(piece), piece.draws, strict=True):
                notes = self.notes[branch]
                notes.kv = kv
                notes.draws.append(draw)
                notes.output.append(next(tokens))
        return result

    def _drawn_from(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        rows = super()._drawn_from(hidden, batch)
        drawing = [branch for piece in self._slices for branch in _branches(piece)]
        for branch, row in zip(drawing, rows.clone(), strict=True):
            self.notes[branch].logits.append(row)
        return rows

    def _refuse(self) -> None:
        """Let pass what is no number: the comparison says in which layer it began."""


def _branches(piece: Slice) -> list[Branch]:
    """The branches that a slice draws a token for; all of a request where they begin."""
    return [(piece.request_id, piece.index + i) for i in range(len(piece.draws))]


class Laboratory:
    """A model, and what its sequences are when they are alone; each is computed once.

    seed  of the prompts and the draws
    """

    def __init__(self, model: LlamaModel, *, seed: int = 0) -> None:
        self.model = model
        self.seed = seed
        self._alone: dict[bytes, Alone] = {}  # by tokens

    def run(self, scenario: Scenario) -> Outcome:
        """Play a scenario and compare every sequence of it; seconds.

        Raises EngineFailure where a step fails.
        """
        begun = time.perf_counter()
        rounds = self._rounds(scenario)
        engine, executor = self._engine(scenario, [r for requests in rounds for r in requests])
        cached_tokens = 0
        for requests in rounds:
            for request in requests:
                engine.submit(request)
            cached_tokens += _drain(engine, preempting=scenario.preempted)
        engine.check()
        stats = engine.stats()
        for request in (request for requests in rounds for request in requests):
            for index in range(request.sampling.n):
                note = executor.notes[request.request_id, index]
                note.tokens = request.prompt + pack_tokens(note.output[:-1])
        wrong = self._first_wrong(executor.notes)
        notes = executor.notes.values()
        return Outcome(
            scenario=scenario,
            sequences=len(notes),
            logit_rows=sum(len(note.logits) for note in notes),
            kv_tokens=sum(note.kv.shape[2] for note in notes if note.kv is not None),
            cached_tokens=cached_tokens,
            preemptions=stats.preemptions,
            forks=sum(branch > 0 for _, branch in executor.notes),
            evicted_blocks=stats.cache.evicted_blocks,
            seconds=time.perf_counter() - begun,
            request=wrong[0] if wrong else "",
            difference=wrong[1] if wrong else None,
        )

    def digested(self, scenario: Scenario) -> list[torch.Tensor]:
        """Return the K/V and logits of a scenario's prompts, alone, in a fixed order."""
        made = self._prompts(scenario)
        return [tensor for ids in made for tensor in self._alone_of(pack_tokens(ids))]

    def _prompts(self, scenario: Scenario) -> list[list[int]]:
        config = self.model.config
        length = min(scenario.length, config.max_len // 2)
        return prompts(length, vocab_size=config.vocab_size, seed=self.seed)

    def _rounds(self, scenario: Scenario) -> list[list[Request]]:
        """First the prompts one after another, then all again, in company.

        Without a cache one round is enough; where the pool is tight, each stands alone in it.
        """
        drawn = SamplingParams(
            temperature=0.8, top_p=0.95, seed=self.seed, max_tokens=NEW_TOKENS, n=scenario.branches
        )
        greedy = SamplingParams(max_tokens=NEW_TOKENS)
        made = self._prompts(scenario)
        sizes = {"vocab_size": self.model.config.vocab_size, "seed": self.seed}
        beside = companions(scenario.companions, **sizes)
        first = [_request(f"prompt {i}", ids, drawn) for i, ids in enumerate(made, 1)]
        again = [_request(f"prompt {i} again", ids, drawn) for i, ids in enumerate(made, 1)]
        extra = [_request(f"companion {i}", ids, greedy) for i, ids in enumerate(beside, 1)]
        if scenario.tight:  # a stranger between the rounds needs the room
            ids = prompts(len(made[0]), vocab_size=sizes["vocab_size"], seed=self.seed + 1)[0]
            return [[request] for request in (*first, _request("stranger", ids, greedy), *again)]
        if not scenario.cached:
            return [[*first, *extra]]
        return [*([request] for request in first), [*again, *extra]]

    def _engine(self, scenario: Scenario, requests: list[Request]) -> tuple[Engine, NotingExecutor]:
        """An engine over a pool of its own, full of NaN: what is read unwritten shows."""
        model, size = self.model, scenario.block_size
        lengths = [len(request.prompt) // TOKEN_BYTES + NEW_TOKENS for request in requests]
        blocks = [-(-length // size) + 2 for length in lengths]
        num_blocks = max(blocks) if scenario.tight else sum(blocks) * scenario.branches
        sizes = {"num_blocks": num_blocks, "block_size": size}
        store = KVStore(model.config, **sizes, dtype=model.dtype, device=model.head_weight.device)
        store.pool.fill_(torch.nan)
        executor = NotingExecutor(model, store)
        config = EngineConfig(
            max_len=min(model.config.max_len, num_blocks * size),
            max_step_tokens=MAX_STEP_TOKENS,
            max_chunk_tokens=scenario.chunk,
            max_running=len(requests) * BRANCHES,
            watermark=0.0,
        )
        engine = Engine(
            RadixCache(CacheConfig(**sizes, enable_prefix_cache=scenario.cached)),
            config,
            executor,
            tokenizer=None,
            eos_ids=frozenset(),
            vocab_size=model.config.vocab_size,
            draw_seed=lambda: self.seed,
        )
        return engine, executor

    def _first_wrong(self, notes: Mapping[Branch, Notes]) -> tuple[str, Difference] | None:
        """Return the first sequence that is not what it is alone, and where."""
        for (name, index), note in notes.items():
            found = _compare(note, self._alone_of(note.tokens))
            if found:
                return f"{name}, branch {index}" if index else name, found
        return None

    def _alone_of(self, tokens: bytes) -> Alone:
        if tokens not in self._alone:
            kv, hidden = recompute(self.model, tokens)
            with torch.inference_mode():
                self._alone[tokens] = Alone(kv, self.model.logits(hidden[-NEW_TOKENS:]))
        return self._alone[tokens]


def _request(name: str, ids: list[int], sampling: SamplingParams) -> Request:
    return Request(request_id=name, prompt=pack_tokens(ids), sampling=sampling)


def _drain(engine: Engine, *, preempting: bool) -> int:
    """Run to the end; return how many prompt tokens came from the cache."""
    cached: dict[Branch, int] = {}
    seen: dict[Sequence, int] = {}
    while engine.has_work:
        for news in engine.step():
            if news.error is not None:
                raise EngineFailure(f"a step of the verification failed: {news.error}")
            cached[news.request_id, 0] = news.usage.cached_tokens
        if preempting:
            for sequence in list(engine.scheduler.running):
                if len(sequence.output) > seen.get(sequence, 0):
                    seen[sequence] = len(sequence.output)
                    engine.scheduler.preempt(sequence)
    return sum(cached.values())


def _compare(notes: Notes, alone: Alone) -> Difference | None:
    """Hold one sequence to what it is alone; its draws, too, one by one."""
    assert notes.kv is not None
    found = first_difference(notes.kv, alone.kv)
    if found:
        return found
    count = len(notes.output)
    first = notes.kv.shape[2] - count  # the position that the first token was drawn behind
    right = alone.logits[-count:]
    same = same_bits(torch.stack(notes.logits), right).all(-1)
    if not bool(same.all()):
        row = int(same.logical_not().nonzero()[0])
        return Difference(part="logits", layer=None, position=first + row)
    for row, (token, draw) in enumerate(zip(notes.output, notes.draws, strict=True)):
        if choose_tokens(right[row : row + 1], [draw]) != [token]:
            return Difference(part="token", layer=None, position=first + row + 1)
    return None
