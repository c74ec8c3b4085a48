"""Hit rates of two public traces, as an independent simulator has them.

The traces are Mooncake's of FAST'25 (github.com/kvcache-ai/Mooncake), as `mooncake_conversation`
and `mooncake_synthetic`, `.jsonl.gz`; RADIXCACHE_TRACES names the folder that they lie in.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from radixcache.sim import Trace, lru_curve, read_trace, simulate

FOLDER = os.environ.get("RADIXCACHE_TRACES")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="RADIXCACHE_TRACES names no folder")

# hit rates in per cent, by blocks of 512 tokens
CONVERSATION = {
    "lru": {1000: 4.45, 3000: 6.53, 10_000: 21.16, 30_000: 32.57, 50_000: 35.46, 100_000: 36.37},
    "fifo": {1000: 4.45, 3000: 6.53, 10_000: 21.09, 30_000: 32.58, 50_000: 35.44, 100_000: 36.37},
    "lfu": {1000: 4.81, 3000: 7.50, 10_000: 13.17, 30_000: 27.60, 50_000: 34.39, 100_000: 36.31},
    "slru": {1000: 4.81, 3000: 7.50, 10_000: 13.28, 30_000: 29.02, 50_000: 34.39, 100_000: 36.31},
    "told-dead": {1000: 6.67, 3000: 20.97, 10_000: 36.64},
    "opt": {1000: 17.92, 3000: 29.16, 10_000: 36.64},
}
SYNTHETIC = {
    "lru": {1000: 8.41, 3000: 19.06, 10_000: 42.39, 30_000: 62.42},
    "fifo": {1000: 8.45, 3000: 18.98, 10_000: 42.24, 30_000: 62.39},
    "lfu": {1000: 5.01, 3000: 14.06, 10_000: 36.22, 30_000: 62.60},
    "slru": {1000: 7.72, 3000: 17.96, 10_000: 42.54, 30_000: 62.60},
    "told-dead": {1000: 12.29, 3000: 28.38, 10_000: 59.04, 30_000: 63.96},
    "opt": {1000: 26.91, 3000: 44.38, 10_000: 61.74, 30_000: 63.96},
}


def traced(name: str) -> Trace:
    return read_trace(Path(FOLDER or "") / f"mooncake_{name}.jsonl.gz")


@pytest.mark.parametrize(
    ("name", "expected"), [("conversation", CONVERSATION), ("synthetic", SYNTHETIC)]
)
def test_the_reference_table_is_reproduced(
    name: str, expected: dict[str, dict[int, float]]
) -> None:
    trace = traced(name)
    curve = lru_curve(trace)
    for policy, rates in expected.items():
        for num_blocks, rate in rates.items():
            found = 100 * simulate(trace, policy, num_blocks).outcome.hit_rate
            assert abs(found - rate) <= 0.01, (policy, num_blocks)
            if policy == "lru":
                assert found == pytest.approx(100 * curve.hit_rate(num_blocks))


def test_the_first_900_conversations_are_hit_as_often() -> None:
    trace = traced("conversation").head(900)
    hits = {name: simulate(trace, name, 1000).outcome.hits for name in ("lru", "lfu", "opt")}
    assert hits == {"lru": 938, "lfu": 977, "opt": 3602}
