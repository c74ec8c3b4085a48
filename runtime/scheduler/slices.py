"""From a sequence to the slice of a step.

Owns: what a slice says.  Does not know: who is chosen, or how many tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from radixcache.tokens import TOKEN_BYTES
from runtime.plan import Draw, Slice
from runtime.sequence import Sequence


def next_slice(sequence: Sequence, count: int, *, block_size: int, draws: bool) -> Slice:
    """Return the next `count` tokens of a sequence as a slice; at least one.

    draws  whether a token is to be chosen where the slice ends the sequence
    """
    lease = sequence.lease
    assert lease is not None
    start = sequence.num_computed
    end = start + count
    draws = draws and end == lease.num_tokens and sequence.request.sampling.max_tokens != 0
    first_target, last_target = _targets(sequence, start, end)
    return Slice(
        request_id=sequence.request.request_id,
        index=sequence.index,
        start=start,
        tokens=bytes(lease.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]),
        block_table=lease.block_table[: -(-end // block_size)].tobytes(),
        draws=draws_of(sequence, end) if draws else (),
        num_kept=max(0, min(end, sequence.num_in_place) - start),
        targets=sequence.request.prompt[first_target * TOKEN_BYTES : last_target * TOKEN_BYTES],
        first_target=max(0, first_target - 1 - start),
        num_logprobs=sequence.request.sampling.prompt_logprobs or 0,
    )


def _targets(sequence: Sequence, start: int, end: int) -> tuple[int, int]:
    """Which tokens of the prompt the slice reports: each follows a row of `start … end`."""
    if sequence.num_scored >= sequence.num_prompt_tokens:
        return 0, 0
    last = min(end + 1, sequence.num_prompt_tokens)
    return min(sequence.num_scored, last), last


def draws_of(sequence: Sequence, position: int) -> tuple[Draw, ...]:
    """Return how the token at a position is to be chosen, once for each branch that begins."""
    sampling = sequence.request.sampling
    bias_ids, bias = _bias(sequence)
    return tuple(
        Draw(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=seed,
            position=position,
            bias_ids=bias_ids,
            bias=bias,
            allowed=sequence.allowed,
            num_logprobs=sampling.logprobs,
        )
        for seed in sequence.seeds
    )


def _bias(sequence: Sequence) -> tuple[bytes, bytes]:
    """What is added to logits: the request's own biases, less what repetition costs."""
    sampling = sequence.request.sampling
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if not sampling.logit_bias and not presence and not frequency:
        return b"", b""
    bias = dict(sampling.logit_bias)
    if presence or frequency:
        for token, count in sequence.counts.items():
            bias[token] = bias.get(token, 0.0) - presence - frequency * count
    return _packed_ids(bias), np.fromiter(bias.values(), np.float32, len(bias)).tobytes()


def _packed_ids(ids: Iterable[int]) -> bytes:
    return array("i", ids).tobytes()
