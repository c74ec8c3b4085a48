"""Repairs Triton's interpreter so that kernels can be tested on a CPU.

Owns: the arithmetic of bfloat16 and of `tl.dot`, casts to float8, indices and two shortcuts.  Does
not know: any kernel.
Idea: the interpreter keeps a bfloat16 as the 16 bits it is stored in and then computes on them as
if they were an integer, without a word.  Here every operation sees such operands widened to
float32, which is exact, and its result rounded back to nearest even, as the hardware does.  Its
casts to float8 lose carries; here they round to nearest even and saturate, as the hardware's do.

Import after TRITON_INTERPRET=1 is set; importing is the repair.  Works on Triton 3.6 to 3.9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_Handle = interpreter.TensorHandle
_Builder = interpreter.InterpreterBuilder
_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def widen(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of stored bfloat16 bits.

    >>> widen(np.array([0x3FC0], dtype=np.uint16))
    array([1.5], dtype=float32)
    """
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Return the bfloat16 bits nearest to float32 values, ties to even; a NaN stays one.

    >>> narrow(np.array([1.5], dtype=np.float32)) == 0x3FC0
    array([ True])
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    lowest_kept = (bits >> 16) & 1
    rounded = ((bits + 0x7FFF + lowest_kept) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def widen_float8(bits: np.ndarray, kind: torch.dtype) -> np.ndarray:
    """Return the float32 values of stored float8 bits.

    >>> widen_float8(np.array([0x3C], dtype=np.uint8), torch.float8_e4m3fn)
    array([1.5], dtype=float32)
    """
    stored = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8))
    return stored.view(kind).float().numpy()


def narrow_float8(values: np.ndarray, kind: torch.dtype) -> np.ndarray:
    """Return the float8 bits nearest to float32 values, ties to even, saturating; a NaN stays one.

    >>> narrow_float8(np.array([1.5], dtype=np.float32), torch.float8_e4m3fn) == 0x3C
    array([ True])
    """
    wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    most = torch.finfo(kind).max
    return wide.clamp(-most, most).to(kind).view(torch.uint8).numpy()


def _is_bfloat16(value: object) -> bool:
    return isinstance(value, _Handle) and value.dtype.scalar == tl.bfloat16


def _widened(handle: Any) -> Any:
    return _Handle(widen(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _repair_arithmetic(name: str) -> None:
    """Let an operation on handles of one type see float32 instead of bfloat16."""
    original: Callable[..., Any] = getattr(_Builder, name)

    def repaired(self: Any, *operands: Any) -> Any:
        if not any(_is_bfloat16(operand) for operand in operands):
            return original(self, *operands)
        result = original(self, *(_widened(operand) for operand in operands))
        if result.data.dtype == np.bool_:  # a comparison
            return _Handle(result.data, tl.int1)
        return _Handle(narrow(result.data), tl.bfloat16)

    setattr(_Builder, name, repaired)


def _repair_cast(name: str) -> None:
    original: Callable[..., Any] = getattr(_Builder, name)

    def repaired(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if before == after:
            return source
        if not {before, after} & {tl.bfloat16, *_FLOAT8}:
            return original(self, source, target, *rest)
        if before in _FLOAT8:
            values = widen_float8(source.data, _FLOAT8[before])
        else:
            values = _widened(source).data
        if after == tl.bfloat16:
            return _Handle(narrow(values.astype(np.float32)), tl.bfloat16)
        if after in _FLOAT8:
            return _Handle(narrow_float8(values.astype(np.float32), _FLOAT8[after]), after)
        return _Handle(values.astype(interpreter._get_np_dtype(after)), after)

    setattr(_Builder, name, repaired)


def product_of_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a · b in float64, [..., M, K] by [..., K, N], each sum one chain in ascending k.

    A BLAS chooses its loops by shape, and by where a row stands: the last bits of a row then depend
    on its neighbours.  Products of float32 are exact here, so a fused multiply-add changes nothing.
    """
    left, right = a.astype(np.float64), b.astype(np.float64)
    total = left[..., :, 0, None] * right[..., None, 0, :]
    term = np.empty_like(total)
    for k in range(1, left.shape[-1]):
        np.multiply(left[..., :, k, None], right[..., None, k, :], out=term)
        total += term
    return total


def _repair_dot() -> None:
    """Sum products in one order and round once, so that a row's place in a tile cannot matter."""
    original = _Builder.create_dot

    def repaired(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        if a.dtype.scalar.is_int():
            return original(self, a, b, acc, *rest)
        product = product_of_rows(_widened(a).data, _widened(b).data)
        return _Handle(product.astype(acc.data.dtype) + acc.data, acc.dtype.scalar)

    _Builder.create_dot = repaired


def _repair_reductions(kind: Any) -> None:
    """Let sums, maxima and scans along an axis see float32 instead of bfloat16."""
    original = kind.apply

    def repaired(self: Any, tensors: Any) -> Any:
        if isinstance(tensors, tuple) or tensors.dtype.scalar != tl.bfloat16:
            return original(self, tensors)
        shape = list(tensors.handle.data.shape)
        wide = tl.core.tensor(_widened(tensors.handle), tl.block_type(tl.float32, shape))
        result = original(self, wide)
        bits = _Handle(narrow(result.handle.data), tl.bfloat16)
        if not result.type.is_block():
            return tl.core.tensor(bits, tl.bfloat16)
        return tl.core.tensor(bits, tl.block_type(tl.bfloat16, list(result.shape)))

    kind.apply = repaired


def _repair_index() -> None:
    """Let an array of one element be an index; Triton 3.6 asks NumPy for what it deprecates."""
    original = interpreter._patch_lang_tensor

    def repaired(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = repaired


def _remember_number_types() -> None:
    """Skip work: the interpreter builds a table of all types anew whenever it asks for one."""
    original = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def remembered(kind: Any) -> np.dtype[Any]:
        scalar = kind.scalar
        if scalar.name not in known:
            known[scalar.name] = original(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = remembered


def _patch_language_once() -> None:
    """Skip work: the interpreter patches the language anew, 1 ms, for each `tl.sum` it meets."""
    original = interpreter._patch_lang
    patched_now: list[bool] = []

    class Scope:
        def __init__(self, *inner: Any) -> None:
            self._inner = inner

        def restore(self) -> None:
            patched_now.clear()
            for scope in reversed(self._inner):
                scope.restore()

    def patch(function: Any) -> Any:
        if patched_now:
            return None  # a function called by the kernel: nobody restores this
        patched_now.append(True)
        # the kernel's own view of the language, and that of the language's own functions
        return Scope(original(function), original(tl.standard.zeros.fn))

    interpreter._patch_lang = patch


for _name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_erf"):
    _repair_arithmetic(_name)
for _name in ("cast_impl", "create_fp_to_fp"):
    _repair_cast(_name)
_repair_dot()
_repair_reductions(interpreter.ReduceOps)
_repair_reductions(interpreter.ScanOps)
_repair_index()
_remember_number_types()
_patch_language_once()
