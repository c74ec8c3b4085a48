"""Attention on a GPU: our calls, and the cases that they make.

Owns: which lengths are measured, and their goals.  Does not know: peers' code, free sizes, clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch

import kernels
from benchmarks.gpu import freedom, public_peers, torch_peers
from benchmarks.gpu.case import EXACTNESS, OURS, Case, Goal, Kind
from benchmarks.gpu.steps import HALF, Call, Shapes, Step, new_step
from kernels.roofline import Work, attention_work

DECODES: Final = (
    (1, 1024),
    (1, 8192),
    (1, 32768),
    (1, 131072),
    (8, 8192),
    (32, 4096),
    (64, 2048),
    (256, 1024),
)
EXTENDS: Final = (
    ((2048,), 0),
    ((8192,), 0),
    ((32768,), 0),
    ((64,), 32704),
    ((512,), 16384),
    ((1024,) * 8, 0),
    ((16, 700, 1, 300, 2048, 31, 1, 1), 2048),
)
CASCADES: Final = ((64, 8192), (64, 2048), (64, 1024), (64, 512), (64, 128), (8, 8192), (256, 1024))
OWN: Final = 128  # keys of each sequence behind the common ones

Build = Callable[[torch.device], list[Call]]


def quantised(step: Step, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Turn a step's pools into eight bits, and return their scales."""
    reach = 4.0
    most = 127.0 if dtype == torch.int8 else 448.0
    for name in ("k_pool", "v_pool"):
        scaled = (getattr(step, name).float() * (most / reach)).clamp(-most, most)
        setattr(step, name, (scaled.round() if dtype == torch.int8 else scaled).to(dtype))
    num_kv_heads = step.k_pool.shape[2]
    scale = torch.full((num_kv_heads,), reach / most, device=step.q.device)
    return {"k_scale": scale, "v_scale": scale}


def decode_calls(
    device: torch.device,
    shapes: Shapes,
    batch: int,
    seq_len: int,
    *,
    kv_dtype: torch.dtype = HALF,
    copies: int = 1,
    planned: bool = True,
    shared: int = 0,
) -> list[Call]:
    """Decode steps on `copies` pools; `planned` as in every layer of a step but the first."""
    calls: list[Call] = []
    scratch = kernels.Scratch(device)
    for _ in range(copies):
        step = new_step(device, [1] * batch, [seq_len] * batch, heads=shapes.heads, shared=shared)
        scales = {} if kv_dtype == HALF else quantised(step, kv_dtype)
        plan = kernels.plan_decode(
            *step.paged[:1],
            *step.paged[2:],
            num_heads=shapes.heads.num_heads,
            num_tokens=batch,
            max_seq_len=seq_len,
            dtype=HALF,
            scratch=scratch,
        )
        call = partial(
            kernels.decode_attention,
            step.q,
            *step.paged,
            scale=step.scale,
            max_seq_len=seq_len,
            plan=plan if planned else None,
            scratch=scratch,
            out=torch.empty_like(step.q),
            **scales,
        )
        calls.append(call)
    return calls


def extend_calls(
    device: torch.device, shapes: Shapes, new: list[int], prefix: int, *, planned: bool = True
) -> list[Call]:
    step = new_step(device, new, [prefix + n for n in new], heads=shapes.heads)
    plan = kernels.plan_extend(
        step.k_pool, *step.paged[2:], num_heads=shapes.heads.num_heads, num_tokens=sum(new)
    )
    return [
        partial(
            kernels.extend_attention,
            step.q,
            *step.paged,
            scale=step.scale,
            plan=plan if planned else None,
            out=torch.empty_like(step.q),
        )
    ]


def cascade_calls(
    device: torch.device, shapes: Shapes, batch: int, prefix: int, own: int
) -> list[Call]:
    step = new_step(device, [1] * batch, [prefix + own] * batch, heads=shapes.heads, shared=prefix)
    prefixes = kernels.SharedPrefixes.of([(list(range(batch)), prefix)], device)
    scratch = kernels.Scratch(device)
    plan = kernels.plan_shared_prefix(
        step.k_pool,
        *step.paged[2:],
        prefixes,
        num_heads=shapes.heads.num_heads,
        num_tokens=batch,
        max_seq_len=prefix + own,
        scratch=scratch,
    )
    return [
        partial(
            kernels.shared_prefix_attention,
            step.q,
            *step.paged,
            prefixes,
            scale=step.scale,
            max_seq_len=prefix + own,
            plan=plan,
            scratch=scratch,
            out=torch.empty_like(step.q),
        )
    ]


def thousands(num: int) -> str:
    """Write a length as the tables do.

    >>> thousands(8192), thousands(640)
    ('8k', '640')
    """
    return f"{num // 1024}k" if num % 1024 == 0 else str(num)


def decode_cases(shapes: Shapes) -> Iterator[Case]:
    """Iterate over the cases of decode, bfloat16 and eight bits."""
    for batch, seq_len in DECODES:
        sizes = (shapes.batch(batch), shapes.keys(seq_len))
        subject = f"decode {batch} x {thousands(seq_len)}"
        case = partial(Case, subject, work=_decode_work(shapes, *sizes))
        ours = partial(decode_calls, shapes=shapes, batch=sizes[0], seq_len=sizes[1])
        measured = (batch, seq_len) in ((32, 4096), (1, 131072))
        goals = (Goal("share of bandwidth", 0.85),) if measured else ()
        choices = freedom.DECODE if measured or batch == 256 else ()
        goals += (EXACTNESS,) if choices else ()
        yield case(OURS, "ours", build=partial(ours, copies=2), goals=goals, eager=True)
        if measured:
            yield case("planning in the call", "ours", build=partial(ours, planned=False))
        for name, peer in torch_peers.DECODE.items():
            yield case(name, "torch", build=partial(peer, shapes=shapes, sizes=sizes))
        if measured:
            for name, peer in public_peers.DECODE.items():
                yield case(name, "public", build=partial(peer, shapes=shapes, sizes=sizes))
        for choice in choices:
            free = partial(freedom.decode_calls, shapes=shapes, sizes=sizes, choice=choice)
            yield case(str(choice), "free", build=free)
    for dtype, name in ((torch.float8_e4m3fn, "fp8"), (torch.int8, "int8")):
        for batch, seq_len in ((32, 4096), (1, 131072)):
            sizes = (shapes.batch(batch), shapes.keys(seq_len))
            plain = f"decode {batch} x {thousands(seq_len)}"
            faster = Goal("times faster than", 1.6, f"{plain} | {OURS}")
            yield Case(
                f"{plain} {name}",
                OURS,
                "ours",
                _decode_work(shapes, *sizes, kv_bytes=1),
                partial(
                    decode_calls, shapes=shapes, batch=sizes[0], seq_len=sizes[1], kv_dtype=dtype
                ),
                (faster,) if (name, batch) == ("fp8", 32) else (),
                eager=True,
            )


def _decode_work(shapes: Shapes, batch: int, seq_len: int, **options: int) -> Work:
    return attention_work([1] * batch, [seq_len] * batch, shapes.heads, **options)


def extend_cases(shapes: Shapes) -> Iterator[Case]:
    """Iterate over the cases of prefill, whole and behind a prefix."""
    for lens, behind in EXTENDS:
        new = [shapes.rows(n) for n in lens[: shapes.batch(len(lens))]]
        prefix = shapes.keys(behind)
        work = attention_work(new, [prefix + n for n in new], shapes.heads)
        uniform = len(set(lens)) == 1
        size = f"{len(lens)} x {thousands(lens[0])}" if len(lens) > 1 else thousands(lens[0])
        subject = f"extend {size if uniform else 'ragged'}"
        subject += f" on {thousands(behind)}" if behind else ""
        case = partial(Case, subject, work=work)
        goals: tuple[Goal, ...] = ()
        choices = freedom.EXTEND if (lens, behind) in (((8192,), 0), ((512,), 16384)) else ()
        if (lens, behind) == ((8192,), 0):
            goals = (
                Goal("TFLOP/s", 480.0),
                Goal("times faster than", 0.9, f"{subject} | {torch_peers.FLASH}"),
                Goal("times faster than", 0.9, f"{subject} | {torch_peers.CUDNN}"),
            )
        goals += (EXACTNESS,) if choices else ()
        ours = partial(extend_calls, shapes=shapes, new=new, prefix=prefix)
        yield case(OURS, "ours", build=ours, goals=goals, eager=True)
        if uniform:
            peers: list[tuple[str, Kind, Callable[..., list[Call]]]] = [
                (name, "torch", peer) for name, peer in torch_peers.EXTEND.items()
            ]
            peers += [(name, "public", peer) for name, peer in public_peers.EXTEND.items()]
            for name, kind, peer in peers:
                build = partial(peer, shapes=shapes, new=new, prefix=prefix)
                yield case(name, kind, build=build)
        for choice in choices:
            free = partial(
                freedom.extend_calls, shapes=shapes, new=new, prefix=prefix, choice=choice
            )
            yield case(str(choice), "free", build=free)


def cascade_cases(shapes: Shapes) -> Iterator[Case]:
    """Iterate over the cases of sequences that share a prefix, beside plain decode of the same."""
    for many, common in CASCADES:
        batch, prefix, own = shapes.batch(many), shapes.prefix(common), shapes.rows(OWN)
        subject = f"cascade {many} behind {thousands(common)}"
        work = _decode_work(shapes, batch, prefix + own, shared=prefix)
        first = (many, common) == CASCADES[0]
        choices = freedom.CASCADE if first else ()
        goals = (Goal("times faster than", 8.0 if first else 0.95, f"{subject} | plain decode"),)
        case = partial(Case, subject, work=work)
        ours = partial(cascade_calls, shapes=shapes, batch=batch, prefix=prefix, own=own)
        plain = partial(
            decode_calls, shapes=shapes, batch=batch, seq_len=prefix + own, shared=prefix
        )
        goals += (EXACTNESS,) if choices else ()
        yield case(OURS, "ours", build=ours, goals=goals, eager=True)
        yield case("plain decode", "ours", build=plain)
        for choice in choices:
            free = partial(
                freedom.cascade_calls,
                shapes=shapes,
                batch=batch,
                prefix=prefix,
                own=own,
                choice=choice,
            )
            yield case(str(choice), "free", build=free)
