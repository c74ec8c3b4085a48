"""How likely tokens were, from logits.

Owns: log-probabilities of given tokens and of the likeliest.  Does not know: why they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import torch

from runtime.plan import Draw, TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, tops: Sequence[int]
) -> list[TokenLogprobs]:
    """Return each row's log-probability of one token, and of its likeliest ones.

    logits     [R, V] float32, as the model gave them
    token_ids  [R] int64
    tops       R numbers of likeliest tokens to report

    Of tokens that are equally likely the lower id comes first.  A row's result depends on that row
    alone.  Cost: one pass over each row, and a partial sort where likeliest ones are wanted.
    """
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(-1, token_ids[:, None])[:, 0].tolist()
    most = min(max(tops, default=0), logits.shape[-1])
    if not most:
        return [TokenLogprobs(value) for value in own]
    # Which of equally likely ones a search for the k likeliest returns depends on k, here the most
    # that any row asks for; so all that are as likely as a row's last are looked at.
    counts = torch.tensor(tops, device=logits.device)
    least = logprobs.topk(most, dim=-1).values.gather(1, counts.clamp(1, most)[:, None] - 1)
    likely = logprobs >= least.masked_fill_(counts[:, None] == 0, math.inf)
    rows, ids = likely.nonzero(as_tuple=True)
    pairs = zip(logprobs[rows, ids].tolist(), ids.tolist(), strict=True)
    found = []
    for value, count, top in zip(own, likely.sum(-1).tolist(), tops, strict=True):
        ranked = sorted(islice(pairs, count), key=lambda pair: (-pair[0], pair[1]))[:top]
        found.append(
            TokenLogprobs(value, tuple(i for _, i in ranked), tuple(lp for lp, _ in ranked))
        )
    return found


def drawn_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], draws: Sequence[Draw | None]
) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of drawn tokens where their draws ask; empty where none does.

    logits  [R, V] float32, one row for each draw
    """
    asking = {
        row: draw.num_logprobs
        for row, draw in enumerate(draws)
        if draw is not None and draw.num_logprobs is not None
    }
    if not asking:
        return []
    rows, tops = list(asking), list(asking.values())
    chosen = torch.tensor([token_ids[row] for row in rows], device=logits.device)
    asked = token_logprobs(logits[torch.tensor(rows, device=logits.device)], chosen, tops)
    found: list[TokenLogprobs | None] = [None] * len(draws)
    for row, logprobs in zip(rows, asked, strict=True):
        found[row] = logprobs
    return found
