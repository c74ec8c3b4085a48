"""Print how each list's tiles are laid out on sm_90: rows, warps, and what each product runs on.

    python -m tests.kernels.tile_layouts

A child process of test_decode_attention.py: with TRITON_INTERPRET set nothing compiles.
"""

from __future__ import annotations

import json
import re

import torch
import triton

from kernels._attention_call import Options
from kernels._attention_triton import variants
from tests.kernels.compile_ahead import TARGETS, options_of, source_of


def main() -> None:
    half = torch.bfloat16
    for variant in variants("sm_90", half, half, 128, 4, Options()):
        target = TARGETS["sm_90"].gpu
        built = triton.compile(source_of(variant), target=target, options=options_of(variant))
        layouts = re.findall(
            r"nvidia_mma<\{.*?warpsPerCTA = (\[.*?\]).*?instrShape = (\[.*?\])", built.asm["ttgir"]
        )
        reading = {
            "rows": variant.constants["ROWS"],
            "warps": sorted({tuple(json.loads(warps)) for warps, _ in layouts}),
            "instructions": sorted({tuple(json.loads(shape)) for _, shape in layouts}),
        }
        print(json.dumps(reading))


if __name__ == "__main__":
    main()
