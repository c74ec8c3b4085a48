"""Attention on a CPU: the kernels in C beside the torch backend and the machine's limits.

    .venv/bin/python benchmarks/bench_attention.py [--threads 1] [--runs 7] [--json FILE]

At the shape of the default model (9 heads of 64, 3 of keys), one layer at a time over the pools of
many layers, so that no cache holds what is read.  Plans are made before the clock runs.  Backends
alternate within a run; shown is the least CPU time, which a process does not lose to others on the
same core, and the floor: the products at the rate of a large matrix product, or the bytes of K and
V at the rate of a long sum, whichever takes longer, both in CPU time too.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels import (
    Scratch,
    SharedPrefixes,
    native,
    plan_shared_prefix,
    shared_prefix_attention,
    shared_unit,
)

KV_HEADS, GROUP, DIM, BLOCK = 3, 3, 64, 16
LAYERS = 12


class Rates(NamedTuple):
    """What a second of CPU time does at best."""

    flop: float
    read_bytes: float

    @classmethod
    def measured(cls, dtype: torch.dtype, runs: int) -> Rates:
        """Measure a product of 512 × 2048 × 2048, and a sum over 256 MB."""
        x, w = (torch.randn(n, 2048).to(dtype) for n in (512, 2048))
        long = torch.ones(64 << 20)
        product = least_seconds(lambda: torch.nn.functional.linear(x, w), runs)
        return cls(2 * 512 * 2048 * 2048 / product, long.nbytes / least_seconds(long.sum, runs))


def least_seconds(function: Callable[[], object], runs: int) -> float:
    """Return the least CPU seconds of a call, after one to warm up."""
    function()
    spent = []
    for _ in range(runs):
        began = time.process_time()
        function()
        spent.append(time.process_time() - began)
    return min(spent)


class Case(NamedTuple):
    """A step: `batch` sequences of `new` queries behind what they share, and what is their own."""

    name: str
    batch: int
    new: int
    shared: int
    own: int

    @property
    def length(self) -> int:
        """Keys of a sequence."""
        return self.shared + self.own + self.new

    def floor_s(self, rates: Rates, size: int) -> float:
        """Return the least seconds of a layer."""
        pairs = self.batch * (self.new * (self.length - self.new) + self.new * (self.new + 1) / 2)
        keys = self.shared + self.batch * (self.length - self.shared)
        products = 4 * KV_HEADS * GROUP * DIM * pairs / rates.flop
        return max(products, 2 * keys * KV_HEADS * DIM * size / rates.read_bytes)


CASES = (
    Case("60 new behind 1,500", 1, 60, 0, 1500),
    Case("prompt of 512", 1, 512, 0, 0),
    Case("decode 1 × 1,500", 1, 1, 0, 1499),
    Case("decode 8 × 1,500", 8, 1, 0, 1499),
    Case("decode 8, 1,504 shared and 40 own", 8, 1, 1504, 39),
    Case("decode 64, 1,504 shared and 40 own", 64, 1, 1504, 39),
)


def step_of(case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return queries, pools of all layers, and the tables; sharers have the same first blocks."""
    shared, blocks = case.shared // BLOCK, -(-case.length // BLOCK)
    own = blocks - shared
    table = torch.arange(blocks).repeat(case.batch, 1)
    table[:, shared:] += torch.arange(case.batch)[:, None] * own
    pools = torch.randn(LAYERS, 2, shared + case.batch * own, BLOCK, KV_HEADS, DIM).to(dtype)
    lens = torch.full((case.batch,), case.length, dtype=torch.int32)
    starts = (torch.arange(case.batch + 1) * case.new).int()
    q = torch.randn(case.batch * case.new, KV_HEADS * GROUP, DIM).to(dtype)
    return q, pools, table.int(), lens, starts


def seconds_a_layer(case: Case, dtype: torch.dtype, runs: int) -> Iterator[tuple[str, float]]:
    """Iterate over backends and their least CPU seconds."""
    q, pools, *tables = step_of(case, dtype)
    ways = {}
    for backend in ("native", "torch"):
        unit = shared_unit(q.device, backend)
        groups = [([*range(case.batch)], case.shared // unit * unit)] if case.shared else []
        prefixes = SharedPrefixes.of(groups)
        sizes = {"num_heads": q.shape[1], "num_tokens": q.shape[0], "backend": backend}
        plan = plan_shared_prefix(
            pools[0, 0], *tables, prefixes, **sizes, scratch=Scratch(q.device)
        )
        ways[backend] = (prefixes, plan)
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(runs + 1):
        for backend, (prefixes, plan) in ways.items():
            began = time.process_time()
            for k, v in pools:
                shared_prefix_attention(
                    q, k, v, *tables, prefixes, scale=0.125, backend=backend, plan=plan
                )
            least[backend] = min(least[backend], (time.process_time() - began) / LAYERS)
    yield from least.items()


def main() -> None:
    """Measure every case and print a table; times in milliseconds a layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    native.library()  # compile, or say why not
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    print(f"{'':36} {'dtype':9} {'native':>8} {'torch':>8} {'floor':>8}   ms of CPU a layer")
    for dtype in (torch.float32, torch.bfloat16):
        rates = Rates.measured(dtype, options.runs)
        for case in CASES:
            times = {name: s * 1e3 for name, s in seconds_a_layer(case, dtype, options.runs)}
            times["floor"] = case.floor_s(rates, dtype.itemsize) * 1e3
            name = str(dtype).removeprefix("torch.")
            columns = " ".join(f"{ms:8.3f}" for ms in times.values())
            print(f"{case.name:36} {name:9} {columns}", flush=True)
            rows.append({"case": case.name, "dtype": name, **times})
    if options.json:
        facts = {"date": datetime.now(UTC).isoformat(), "machine": platform.processor()}
        report = facts | {"threads": options.threads, "torch": torch.__version__, "ms": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
