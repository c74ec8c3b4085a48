"""Choosing the next token of each row.

Owns: the filters and the draw.  Does not know: where parameters come from.
Idea: the largest of (log-probability + Gumbel noise) is a draw from the distribution.  With noise
that is given, or a function of a row's seed and position, a row's token depends on that row alone.
"""

from __future__ import annotations

import torch

from kernels.backend import check_dense, check_tensor, choose_backend
from kernels.noise import check_seeds, uniform_noise
from kernels.penalties import check_logits


def sample(
    logits: torch.Tensor,
    noise: torch.Tensor | None = None,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Draw one token a row.

    logits       [R, V] float32
    noise        [R, V] float32, uniform in [0, 1); None: `uniform_noise` of seeds and positions
    temperature  [R] float32, above 0
    top_k        [R] int64, 0 keeps all
    top_p        [R] float32 in (0, 1]
    min_p        [R] float32 in [0, 1]
    seeds        [R] int64, and positions [R] int64, where noise is None
    returns      [R] int64

    The likeliest token always stays.  Ties go to the lower id.  Cost: one sort of each row, none
    where no row filters, and then a wait for the device to find that out; on Triton no sort and no
    wait: 2 passes over a row that does not filter, and at most 20.
    Source: Gumbel-max draw (Maddison et al. 2014); top-p as in Holtzman et al. 2020, applied
    after top-k, on the probabilities that top-k left.
    """
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    for name, row in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        check_dense(name, row, (num_rows,), torch.float32, logits.device)
    check_dense("top_k", top_k, (num_rows,), torch.int64, logits.device)
    if noise is not None:
        check_tensor("noise", noise, (num_rows, vocab_size), torch.float32, logits.device)
    elif seeds is None or positions is None:
        raise ValueError("noise is None: give seeds and positions, or the noise itself")
    else:
        check_seeds(seeds, positions, num_rows, logits.device)
    if choose_backend(logits.device, backend) == "triton":
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if num_rows:
            from kernels._sample_triton import sample_triton  # optional: not on every platform

            if noise is not None:
                noise = noise.contiguous()
            limits = (temperature, top_k, top_p, min_p)
            sample_triton(logits, noise, seeds, positions, *limits, out)
        return out
    if noise is None and seeds is not None and positions is not None:
        noise = uniform_noise(seeds, positions, vocab_size, backend="torch")
    assert noise is not None
    return _sample_torch(logits, noise, temperature, top_k, top_p, min_p)


def _sample_torch(
    logits: torch.Tensor,
    noise: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
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
    # Back in the order of ids: of equal sums the first id is taken, as where nothing is filtered.
    kept = torch.empty_like(scaled).scatter_(-1, ids, ordered.masked_fill(drop, float("-inf")))
    return (kept + gumbel).argmax(-1)
