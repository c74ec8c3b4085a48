"""Choosing the next token of each row.

Owns: the filters and the draw.  Does not know: where noise or parameters come from.
Idea: the largest of (log-probability + Gumbel noise) is a draw from the distribution.  With the
noise given by the caller, a row's token depends on that row alone.
"""

from __future__ import annotations

import torch


def sample(
    logits: torch.Tensor,
    noise: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Draw one token a row.

    logits       [R, V] float32
    noise        [R, V] float32, uniform in [0, 1)
    temperature  [R] float32, above 0
    top_k        [R] int64, 0 keeps all
    top_p        [R] float32 in (0, 1]
    min_p        [R] float32 in [0, 1]
    returns      [R] int64

    The likeliest token always stays.  Ties go to the lower id.  Cost: one sort of each row, none
    where no row filters.
    Source: Gumbel-max draw (Maddison et al. 2014); top-p as in Holtzman et al. 2020, applied
    after top-k, on the probabilities that top-k left.
    """
    scaled = logits / temperature[:, None]
    gumbel = -torch.log(-torch.log(noise.clamp_min(1e-20)))
    if not (top_k.any() or min_p.any() or (top_p < 1).any()):  # nothing to filter, nothing to sort
        return (scaled + gumbel).argmax(-1)
    ordered, ids = scaled.sort(stable=True, dim=-1, descending=True)
    place = torch.arange(ordered.shape[-1], device=logits.device)
    cut_k = torch.where(top_k > 0, top_k, ordered.shape[-1])[:, None]
    ordered = ordered.masked_fill(place >= cut_k, float("-inf"))
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    # A sum of many probabilities may reach 1 early: at top_p 1 nothing is dropped for it.
    beyond = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    drop = beyond | (probs < min_p[:, None] * probs[:, :1])
    drop[:, 0] = False
    kept = ordered.masked_fill(drop, float("-inf"))
    choice = (kept + gumbel.gather(-1, ids)).argmax(-1, keepdim=True)
    return ids.gather(-1, choice)[:, 0]
