"""The scheduler's half of the runtime works where torch can't be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from importlib.abc import MetaPathFinder


class Refuser(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ImportError(f"{name} was imported")
        return None


sys.meta_path.insert(0, Refuser())
from runtime import RuntimeConfig, SamplingParams
import runtime.config, runtime.errors, runtime.plan, runtime.request, runtime.sequence
import runtime.engine, runtime.scheduler.scheduler
from tests.support.engine_bench import EngineBench

bench = EngineBench(num_blocks=14, block_size=2)
for first in range(6):
    bench.submit(f"r{first}", range(first, first + 9), max_tokens=9)
bench.run()
for name in bench.news:
    assert bench.output(name) == bench.expected(name).tokens
assert bench.engine.stats().preemptions
assert not {"torch", "triton", "kernels"} & sys.modules.keys()
print("ran without torch")
"""


def test_the_engine_runs_where_importing_torch_raises():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "ran without torch\n", done.stderr
