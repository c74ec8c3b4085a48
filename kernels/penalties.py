"""Changing logits before a draw: penalties for tokens that came before, and a grammar's mask.

Owns: the arithmetic on logits.  Does not know: requests, grammars, histories.
Idea: a penalty touches the few tokens that a sequence holds, so it comes as a list of ids and
counts; a mask touches all, so it comes as bits.
"""

from __future__ import annotations

import torch

from kernels.backend import (
    check_dense,
    check_dtype,
    check_ids,
    check_shape,
    check_unit_stride,
    choose_backend,
)


def penalise(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    start: torch.Tensor,
    *,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    backend: str | None = None,
) -> None:
    """Make tokens that a sequence already holds less likely, in place.

    logits      [R, V] float32
    token_ids   [n] int32       ids of all rows, end to end; distinct within a row
    counts      [n] int32       how often each came before, at least 1
    start       [R + 1] int32   row r owns start[r] to start[r + 1] of the two
    repetition  [R] float32     above 0, positive logits are divided by it, others multiplied;
                                1: none
    frequency   [R] float32     taken off once for each time;  0: none
    presence    [R] float32     taken off once;  0: none

    Cost: one pass over the lists; the torch backend waits for the device.
    Source: Keskar et al. 2019 for repetition; the OpenAI API for the others.
    """
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    device = logits.device
    check_dense("token_ids", token_ids, ("n",), torch.int32, device)
    check_dense("counts", counts, token_ids.shape, torch.int32, device)
    check_dense("start", start, (num_rows + 1,), torch.int32, device)
    for name, penalty in (
        ("repetition", repetition),
        ("frequency", frequency),
        ("presence", presence),
    ):
        check_dense(name, penalty, (num_rows,), torch.float32, device)
    check_ids("token_ids", token_ids, 0, vocab_size)
    if choose_backend(device, backend) == "triton":
        if token_ids.shape[0]:
            from kernels._penalty_triton import penalise_triton  # optional, as Triton is

            penalise_triton(logits, token_ids, counts, start, repetition, frequency, presence)
        return
    sizes = (start[1:] - start[:-1]).long()
    row = torch.arange(num_rows, device=device).repeat_interleave(sizes)
    ids = token_ids.long()
    found = logits[row, ids]
    by = repetition[row]
    found = torch.where(found > 0, found / by, found * by)
    logits[row, ids] = found - counts.float() * frequency[row] - presence[row]


def mask_logits(logits: torch.Tensor, allowed: torch.Tensor, *, backend: str | None = None) -> None:
    """Set the logits of tokens that are not allowed to minus infinity, in place.

    logits   [R, V] float32
    allowed  [R, ceil(V / 32)] int32   token t is allowed where bit t % 32 of word t // 32 is set

    Cost: one pass; logits of allowed tokens are not read.
    """
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    check_dense("allowed", allowed, (num_rows, -(-vocab_size // 32)), torch.int32, logits.device)
    if choose_backend(logits.device, backend) == "triton":
        if logits.numel():
            from kernels._penalty_triton import mask_triton  # optional: not on every platform

            mask_triton(logits, allowed)
        return
    bit = torch.arange(32, device=logits.device, dtype=torch.int32)
    bits = (allowed[:, :, None] >> bit & 1).flatten(1)[:, :vocab_size]
    logits.masked_fill_(bits == 0, float("-inf"))


def check_logits(logits: torch.Tensor) -> None:
    """Raise unless logits are [R, V] float32 with unit stride in V."""
    check_shape("logits", logits, ("R", "V"))
    check_dtype("logits", logits, (torch.float32,))
    check_unit_stride("logits", logits)
