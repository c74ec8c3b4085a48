"""Compile the kernels for GPUs that are not here, and print what came out.

A child process of test_triton_interpreter.py: with TRITON_INTERPRET set nothing compiles.  Covers
bfloat16 at head sizes 64 and 128 on sm_80 and sm_90, with the sizes that a launch would choose.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels._copy_triton import copy_kernel
from kernels._extend_triton import choose_sizes, extend_kernel
from kernels._store_triton import store_kernel

POINTERS = {
    **dict.fromkeys(("q", "out", "k", "v", "k_pool", "v_pool", "k_pools", "v_pools"), "*bf16"),
    **dict.fromkeys(("block_table", "seq_lens", "q_start"), "*i32"),
    **dict.fromkeys(("slot_mapping", "src", "dst", "num_slots"), "*i64"),
}


def build(kernel: Any, arch: int, constants: dict[str, int], **options: int) -> None:
    signature = {
        name: "constexpr"
        if name in constants
        else POINTERS.get(name, "fp32" if name == "score_scale" else "i32")
        for name in kernel.arg_names
    }
    # as a launch finds it for the usual shapes: pointers and strides are multiples of 16
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in POINTERS or ("_by_" in name and not name.endswith("dim"))
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=divisible)
    options["enable_fp_fusion"] = True
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    print(
        json.dumps(
            {
                "kernel": kernel.__name__,
                "arch": arch,
                "shared_bytes": built.metadata.shared,
                "tensor_cores": "mma" in built.asm["ptx"],
            }
        )
    )


def main() -> None:
    for arch in (80, 90):
        for head_dim in (64, 128):
            sizes = choose_sizes(torch.bfloat16, head_dim, group=3)
            constants = {
                "GROUP": 3,
                "HEAD_DIM": head_dim,
                "DIM": head_dim,
                "BLOCK_SIZE": 16,
                "TOKENS": sizes.rows // 3,
                "ROWS": sizes.rows,
                "KEYS": sizes.keys,
            }
            build(
                extend_kernel,
                arch,
                constants,
                num_warps=sizes.num_warps,
                num_stages=sizes.num_stages,
            )
        store = {"NUMEL": 192, "HEAD_DIM": 64, "BLOCK_SIZE": 16, "WIDTH": 256}
        build(store_kernel, arch, store)
        build(copy_kernel, arch, {"SLOT_NUMEL": 192, "HEAD_DIM": 64, "WIDTH": 1024})


if __name__ == "__main__":
    main()
