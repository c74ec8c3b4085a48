"""An engine without a model: slots hold prefixes, and the next token is a hash of what is read.

Owns: the slots, and what may be read from them.  Does not know: how scheduler and cache decide.
Idea: K/V of a token depends on exactly the tokens up to it, in its namespace.  So a slot "holds"
the prefix under which it was written, a slice may read no slot but those of its own prefix, and its
next token is a hash of what it reads: sharing that is wrong is seen, and changes the output too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from zlib import crc32

import numpy as np

from radixcache import Namespace
from radixcache.tokens import pack_tokens, unpack_tokens
from runtime.errors import CopiesFailed
from runtime.plan import Difference, Slice, StepPlan, StepResult, TokenLogprobs
from runtime.recheck import RECHECK
from runtime.request import Request
from runtime.scheduler.public import PUBLIC
from tests.support.content_oracle import WrongContent

Content = tuple[Namespace, tuple[int, ...]]
GARBAGE: Content = (Namespace(model="garbage"), (-1,))


def _same(one: Content | None, other: Content | None) -> bool:
    """Whether slots hold the same bits: a copy from the public namespace is like one's own."""
    if one is None or other is None or one == other:
        return one == other
    return one[1] == other[1] and PUBLIC in (one[0], other[0])


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

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}

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

    def first_difference(
        self, ours: Sequence[int], theirs: Sequence[int], num_tokens: int
    ) -> Difference | None:
        """Compare what slots hold; the one layer of a fake is layer 0."""
        slots = (divmod(at, self.block_size) for at in range(num_tokens))
        for place, slot in slots:
            if not _same(self._blocks[ours[place]][slot], self._blocks[theirs[place]][slot]):
                return Difference(block=place, layer=0)
        return None

    def spoil(self, block: int, slot: int = 0) -> None:
        """Let a slot hold what nobody computed."""
        self._blocks[block][slot] = GARBAGE

    def _sequence(self, piece: Slice) -> tuple[Namespace, list[int]]:
        """Whose slice it is: the newest of that name, unless the one before is still closing."""
        tokens = unpack_tokens(piece.tokens)
        name = piece.request_id.removeprefix(RECHECK)
        for namespace, own in self._sequences[name, piece.index]:
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
        if piece.request_id.startswith(RECHECK):  # what follows has been drawn before
            own = own[:end]
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
        if all(piece.request_id.startswith(RECHECK) for piece in plan.slices):
            return  # one sequence in several slices
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
