"""Are the kernels right on this GPU, and are a row's bits its own?  Asked before anything is timed.

Owns: the questions.  Does not know: clocks.
Idea: small shapes with a float64 reference and NaN in every slot that must not be read; then the
same rows in other company, compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import kernels
from benchmarks.gpu_cases import BLOCK_SIZE, HALF, Step, new_step
from kernels.roofline import Heads

SMALL = Heads(num_heads=8, num_kv_heads=2, head_dim=64)
TOLERANCE = 2e-2
SEQ_LENS, Q_LENS = [70, 1, 600, 33], [5, 1, 64, 33]


def poisoned(device: torch.device) -> Step:
    """A ragged step whose unused slots hold NaN."""
    step = new_step(device, Q_LENS, SEQ_LENS, heads=SMALL)
    for row, length in enumerate(SEQ_LENS):
        last = int(step.block_table[row, (length - 1) // BLOCK_SIZE])
        for pool in (step.k_pool, step.v_pool):
            pool[last, (length - 1) % BLOCK_SIZE + 1 :] = float("nan")
    return step


def attended(step: Step, row: int) -> torch.Tensor:
    """Attention of one sequence in float64."""
    length, queries = SEQ_LENS[row], Q_LENS[row]
    blocks = step.block_table[row, : -(-length // BLOCK_SIZE)].long()
    group = SMALL.num_heads // SMALL.num_kv_heads
    k, v = (
        pool[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
        for pool in (step.k_pool, step.v_pool)
    )
    start = sum(Q_LENS[:row])
    q = step.q[start : start + queries].double()
    scores = torch.einsum("qhd,khd->hqk", q, k) * SMALL.head_dim**-0.5
    place = torch.arange(length, device=q.device)
    hidden = place[None, :] > place[length - queries :, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def attend_right(device: torch.device) -> bool:
    """Extend agrees with float64 on poisoned pools."""
    step = poisoned(device)
    got = kernels.extend_attention(step.q, *step.paged, scale=SMALL.head_dim**-0.5).double()
    want = torch.cat([attended(step, row) for row in range(len(Q_LENS))])
    return bool(((got - want).abs() <= TOLERANCE * (1 + want.abs())).all())


def extend_is_decode(device: torch.device) -> bool:
    """The two layouts of work give the same bits."""
    step = poisoned(device)
    scale = SMALL.head_dim**-0.5
    one = kernels.extend_attention(step.q, *step.paged, scale=scale)
    longest = max(SEQ_LENS)
    two = kernels.decode_attention(step.q, *step.paged, scale=scale, max_seq_len=longest)
    return torch.equal(one, two)


def attention_alone(device: torch.device) -> bool:
    """The last query of each sequence has the same bits as a decode step of its own."""
    step = poisoned(device)
    scale = SMALL.head_dim**-0.5
    whole = kernels.extend_attention(step.q, *step.paged, scale=scale)
    ends = step.q_start[1:].long() - 1
    for row, end in enumerate(ends.tolist()):
        alone = kernels.decode_attention(
            step.q[end : end + 1],
            step.k_pool,
            step.v_pool,
            step.block_table[row : row + 1],
            step.seq_lens[row : row + 1],
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            scale=scale,
            max_seq_len=SEQ_LENS[row],
        )
        if not torch.equal(alone[0], whole[end]):
            return False
    return True


def linear_right(device: torch.device) -> bool:
    """The product agrees with float64."""
    x, weight = (torch.randn(n, 576, device=device, dtype=HALF) for n in (100, 960))
    want = x.double() @ weight.double().T
    return bool(((kernels.linear(x, weight) - want).abs() <= TOLERANCE * (576**0.5)).all())


def linear_alone(device: torch.device) -> bool:
    """A row of a product has the same bits in any batch."""
    x, weight = (torch.randn(n, 4096, device=device, dtype=HALF) for n in (300, 1024))
    whole = kernels.linear(x, weight)
    cuts = ((0, 1), (299, 300), (17, 49), (100, 228))
    return all(torch.equal(kernels.linear(x[a:b], weight), whole[a:b]) for a, b in cuts)


def noise_is_the_same(device: torch.device) -> bool:
    """Noise has the bits that the CPU computes."""
    seeds, positions = torch.arange(5) * 10**12, torch.arange(5)
    here = kernels.uniform_noise(seeds.to(device), positions.to(device), 5000)
    return torch.equal(here.cpu(), kernels.uniform_noise(seeds, positions, 5000, backend="torch"))


def rows_right(device: torch.device) -> bool:
    """Norm and gated SiLU agree with float64."""
    x, weight = torch.randn(33, 4096, device=device, dtype=HALF), torch.randn(4096, device=device)
    wide, weight = x.double(), weight.to(HALF)
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed = kernels.rms_norm(x, weight, eps=1e-5).double()
    gate, up = wide.chunk(2, -1)
    gated = kernels.silu_and_mul(x).double()
    pairs = ((normed, want), (gated, gate * gate.sigmoid() * up))
    return all(bool(((a - b).abs() <= TOLERANCE * (1 + b.abs())).all()) for a, b in pairs)


CHECKS: tuple[Callable[[torch.device], bool], ...] = (
    attend_right,
    extend_is_decode,
    attention_alone,
    linear_right,
    linear_alone,
    noise_is_the_same,
    rows_right,
)


def answers(device: torch.device) -> Iterator[tuple[str, bool]]:
    """Iterate over each check's question and its answer."""
    for check in CHECKS:
        yield (check.__doc__ or check.__name__).splitlines()[0], check(device)
