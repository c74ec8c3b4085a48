"""What exactness costs: each operation and whole steps, beside the fastest ways without it.

    .venv/bin/python benchmarks/bench_exactness.py [--threads 1] [--runs 7] [--json FILE]
        [--dtypes float32,bfloat16] [--only step]

At the shapes of the default model, with its weights.  Each case is computed exactly, as the runtime
does, and in every plain way of exactness_plain.py; the ways alternate within a run, so that a busy
moment hits all of them, and what counts is CPU time, which a process does not lose to others that
want the same core.  Shown are the medians, and the median over runs of exact ÷ the plain way that
is fastest in the median.

    linear     all products of a layer, and the vocabulary's; "packed" is oneDNN's product of the
               same packed weights, a lone row without its companion
    extend     attention of new tokens behind a prefix, in one layer, planned once
    decode     attention of one token each behind 1,024
    norm, rope, silu, sampling     512 rows, or 8 of the vocabulary
    step       the whole model, logits included
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exactness_plain import (
    by_products,
    by_sdpa,
    by_wide_products,
    plain_attention,
    plain_model,
    plain_norm,
    plain_rotary,
    plain_sample,
    plain_silu,
    plan_plain,
    unpadded,
)

from kernels import (
    PackedWeight,
    Scratch,
    extend_attention,
    linear,
    plan_extend,
    rms_norm,
    rotary,
    silu_and_mul,
)
from runtime.decoding.sampler import choose_tokens
from runtime.exactness.start import check_model
from runtime.executor.batch import build_batch
from runtime.kv.store import KVStore
from runtime.llm import LLM
from runtime.models.llama import LlamaModel
from runtime.plan import Draw, Slice

Ways = dict[str, Callable[[], Any]]
Case = tuple[str, str, Ways]
"""Kind, what it is of, and the ways by name; the first is the exact one."""

CONTEXT = 1024
WIDE = "float32 products"
"""A plain way that is no rival but an explanation: what 16-bit attention costs in float32."""
LEAST_S = 0.05
"""Seconds that one sample takes at least: short calls are repeated."""


def products(what: str, weights: list[torch.Tensor | PackedWeight], rows: int) -> Case:
    """Products of new rows with weights, packed as the model has them and plain."""
    pairs = [(w, torch.randn(rows, w.shape[1]).to(w.dtype)) for w in weights]
    plain = [(w.plain() if isinstance(w, PackedWeight) else w, x) for w, x in pairs]
    ways: Ways = {
        "exact": lambda: [linear(x, weight) for weight, x in pairs],
        "packed": lambda: [unpadded(x, weight) for weight, x in pairs],
        "F.linear": lambda: [unpadded(x, weight) for weight, x in plain],
    }
    return "linear", f"{what}, {rows} {'row' if rows == 1 else 'rows'}", ways


def layer_products(model: LlamaModel, rows: int) -> Case:
    """The four products of a layer."""
    return products("a layer", [weight for weight, _ in model.layer_weights[:4]], rows)


def head_product(model: LlamaModel, rows: int) -> Case:
    """The vocabulary's product."""
    return products("vocabulary", [model.head_weight], rows)


def attention(model: LlamaModel, *, batch: int, new: int, prefix: int) -> Case:
    """Attention of one layer over paged keys, the plans made before the clock runs."""
    config, length = model.config, prefix + new
    blocks = -(-length // 16)
    shape = (batch * blocks, 16, config.num_kv_heads, config.head_dim)
    k, v = (torch.randn(shape).to(model.dtype) for _ in "kv")
    table = torch.randperm(batch * blocks).view(batch, blocks).int()
    lens = torch.full((batch,), length, dtype=torch.int32)
    starts = (torch.arange(batch + 1) * new).int()
    q = torch.randn(batch * new, config.num_heads, config.head_dim).to(model.dtype)
    paged = (k, v, table, lens, starts)
    scale = config.head_dim**-0.5
    plan = plan_extend(
        k, table, lens, starts, num_heads=config.num_heads, scratch=Scratch(q.device)
    )
    plain = plan_plain(k, table, lens, starts)
    ways: Ways = {"exact": lambda: extend_attention(q, *paged, scale=scale, plan=plan)}
    attends = {"SDPA": by_sdpa, "products": by_products}
    if model.dtype != torch.float32:
        attends[WIDE] = by_wide_products
    for name, attend in attends.items():
        attended = plain_attention(attend)
        ways[f"gather + {name}"] = lambda f=attended: f(q, *paged, scale=scale, plan=plain)
    what = f"{batch} × 1" if new == 1 else str(new)
    return "decode" if new == 1 else "extend", f"{what} behind {prefix:,}", ways


def row_operations(model: LlamaModel) -> Iterator[Case]:
    """What works on a row alone, and drawing tokens."""
    config, dtype = model.config, model.dtype
    x = torch.randn(512, config.hidden_size).to(dtype)
    weight = torch.randn(config.hidden_size).to(dtype)
    norms: Ways = {
        "exact": lambda: rms_norm(x, weight, eps=1e-5),
        "F.rms_norm": lambda: plain_norm(x, weight, eps=1e-5),
    }
    yield "norm", "512 rows", norms
    heads = torch.randn(512, config.num_heads + config.num_kv_heads, config.head_dim).to(dtype)
    angles = torch.randn(512, config.head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    turns: Ways = {
        "exact": lambda: rotary(heads, cos, sin),
        "in the dtype": lambda: plain_rotary(heads, cos, sin),
    }
    yield "rope", "512 rows", turns
    gate_up = torch.randn(512, 2 * config.intermediate_size).to(dtype)
    gates: Ways = {"exact": lambda: silu_and_mul(gate_up), "F.silu": lambda: plain_silu(gate_up)}
    yield "silu", "512 rows", gates
    logits = torch.randn(8, config.vocab_size) * 3
    draws = [
        Draw(temperature=0.8, top_k=0, top_p=0.95, min_p=0.0, seed=i, position=9) for i in range(8)
    ]
    samples: Ways = {
        "exact": lambda: choose_tokens(logits, draws),
        "multinomial": lambda: plain_sample(logits, 0.8, 0.95),
    }
    yield "sampling", "8 rows, top-p 0.95", samples


def whole_step(model: LlamaModel, *, batch: int, new: int, prefix: int) -> Case:
    """The whole model on a batch whose prefixes are stored; logits of each last row."""
    length = prefix + new
    blocks = -(-length // 16)
    store = KVStore(
        model.config,
        num_blocks=batch * blocks,
        block_size=16,
        dtype=model.dtype,
        device=torch.device("cpu"),
    )
    store.pool.normal_()
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, new), np.int32)
    tables = np.random.default_rng(1).permutation(batch * blocks).astype(np.int32)
    slices = [
        Slice(request_id=str(i), start=prefix, tokens=row.tobytes(), block_table=table.tobytes())
        for i, (row, table) in enumerate(zip(ids, tables.reshape(batch, blocks), strict=True))
    ]
    ends = torch.arange(1, batch + 1) * new - 1

    def step() -> torch.Tensor:
        built = build_batch(slices, block_size=16, device=store.pool.device)
        return model.logits(model.forward(built, store)[ends])

    def plain(attend: Any) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with plain_model(attend):
                return step()

        return run

    ways: Ways = {"exact": step, "SDPA": plain(by_sdpa), "products": plain(by_products)}
    name = f"decode, batch {batch}, behind {prefix:,}"
    return "step", name if new == 1 else f"prefill {new} behind {prefix:,}", ways


def cases(model: LlamaModel, only: set[str]) -> Iterator[Case]:
    """Every case, built when it is asked for."""
    builders: list[tuple[str, Callable[[], Case]]] = [
        *(("linear", lambda n=n: layer_products(model, n)) for n in (1, 8, 32, 60, 512)),
        *(("linear", lambda n=n: head_product(model, n)) for n in (1, 8, 32)),
        *(
            ("extend", lambda n=new, p=prefix: attention(model, batch=1, new=n, prefix=p))
            for new, prefix in ((60, 1500), (512, 0), (512, 1500))
        ),
        *(
            ("decode", lambda b=batch: attention(model, batch=b, new=1, prefix=CONTEXT))
            for batch in (1, 8, 32)
        ),
        *(
            ("step", lambda b=b, n=n, p=p: whole_step(model, batch=b, new=n, prefix=p))
            for b, n, p in ((1, 60, 1500), (1, 512, 0), *((b, 1, CONTEXT) for b in (1, 8, 32)))
        ),
    ]
    yield from (build() for kind, build in builders if not only or kind in only)
    if not only or "rows" in only:
        yield from row_operations(model)


def measure(ways: Ways, runs: int) -> dict[str, list[float]]:
    """Return CPU seconds of a call of each way, run by run; the ways alternate."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    repeats = {}
    for name, call in ways.items():
        call()
        begun = time.process_time()
        call()
        repeats[name] = max(1, int(LEAST_S / max(time.process_time() - begun, 1e-6)))
    for _ in range(runs):
        for name, call in ways.items():
            begun = time.process_time()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.process_time() - begun) / repeats[name])
    return times


def row_of(kind: str, what: str, dtype: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """One case as a record; seconds."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    rivals = [name for name in medians if name != "exact" and WIDE not in name]
    best = min(rivals, key=medians.__getitem__)
    ratios = sorted(a / b for a, b in zip(times["exact"], times[best], strict=True))
    return {
        "kind": kind,
        "what": what,
        "dtype": dtype,
        "seconds": medians,
        "best_plain": best,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
    }


def line_of(row: dict[str, Any]) -> str:
    """One row of the table in docs/exactness.md."""
    ms = {name: f"{seconds * 1e3:.3g}" for name, seconds in row["seconds"].items()}
    return (
        f"| {row['kind']} | {row['what']} | {row['dtype']} | {ms['exact']} | "
        f"{ms[row['best_plain']]} ({row['best_plain']}) | {100 * (row['ratio'] - 1):+.0f} % |"
    )


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--only", default="", help="linear, extend, decode, step, rows")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows, checks = [], {}
    print("| | | dtype | exact, ms | fastest plain, ms | cost |")
    print("|---|---|---|---|---|---|")
    for dtype in args.dtypes.split(","):
        llm = LLM(num_blocks=16, dtype=dtype, num_threads=args.threads, exact="off")
        model: Any = llm.runtime.executor
        with torch.inference_mode():
            begun = time.process_time()
            assert check_model(model.model)[0].holds
            checks[dtype] = time.process_time() - begun
            for kind, what, ways in cases(model.model, set(filter(None, args.only.split(",")))):
                rows.append(row_of(kind, what, dtype, measure(ways, args.runs)))
                print(line_of(rows[-1]), flush=True)
    for dtype, seconds in checks.items():
        print(f"check at the start, {dtype}: {seconds * 1e3:.0f} ms")
    if args.json:
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
            "torch": torch.__version__,
            "threads": args.threads,
            "runs": args.runs,
            "check_seconds": checks,
            "rows": rows,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
