"""Stands in for two packages that SGLang's server imports on a CPU and never calls.

Owns: their names.  Python imports this file by itself in every process that has this folder in
PYTHONPATH, so in those that SGLang starts, too.

    sgl_kernel   fast kernels; SGLang asks for them, and computes by PyTorch where there is no AMX
    torchvision  its build for CPUs is in no package index that pip asks by default
"""

from __future__ import annotations

import sys
from pathlib import Path

_BENCHMARKS = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, _BENCHMARKS)
from peers_import import StandIns

sys.path.remove(_BENCHMARKS)
sys.meta_path.append(StandIns(frozenset({"sgl_kernel", "torchvision"})))
