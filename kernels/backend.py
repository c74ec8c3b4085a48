"""Which implementation of an operation runs, and the argument checks they share.

Owns: the backend choice and the wording of argument errors.  Does not know: any operation.
Idea: the choice depends on the device and on an explicit wish, never on shapes or the batch, so one
deployment computes the same bits for the same row all day.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, Protocol, TypeAlias

import torch

from kernels import native

Backend: TypeAlias = Literal["torch", "native", "triton"]

BACKENDS: Final[tuple[Backend, ...]] = ("torch", "native", "triton")
BACKEND_VARIABLE: Final = "RADIXCACHE_KERNELS"
DEBUG_VARIABLE: Final = "RADIXCACHE_KERNELS_DEBUG"
FLOAT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
QUANTISED_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)

FLOAT8_TARGETS: Final = frozenset({"sm_90", "sm_100"})
"""Where float8 as torch stores it exists in hardware: sm_80 has none, gfx942 other encodings."""


class Placed(Protocol):
    """What has a shape, a dtype and a device, as tensors do."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of its dimensions."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""

    @property
    def device(self) -> torch.device:
        """Where it lies."""


def choose_backend(
    tensor_device: torch.device,
    requested: str | None = None,
    *,
    progress: native.Progress | None = None,
) -> Backend:
    """Return the backend that serves tensors on `tensor_device`.

    progress  shows the compiling of the native kernels, if there is any

    `requested` wins over the environment variable RADIXCACHE_KERNELS, which wins over the default:
    "triton" on CUDA, "native" on a CPU where a C compiler is, "torch" elsewhere.  Native kernels
    leave what they have no loop for, a dtype or an option, to torch.  ValueError for a name that is
    not a backend, or an instruction set in RADIXCACHE_CPU that is not there; RuntimeError where one
    is asked for that cannot run.  Costs under a microsecond, but for the first call on a machine,
    which compiles for seconds.

    >>> choose_backend(torch.device("cpu"), "torch")
    'torch'
    """
    wish = requested if requested is not None else os.environ.get(BACKEND_VARIABLE) or None
    kind = tensor_device.type
    if progress and kind == "cpu" and wish in (None, "native"):
        native.build(progress)
    if wish is None:
        if kind == "cuda":
            return "triton"
        return "native" if kind == "cpu" and native.available() else "torch"
    if wish not in BACKENDS:
        origin = "backend" if requested is not None else BACKEND_VARIABLE
        raise ValueError(f"{origin} is {wish!r}; choose one of {', '.join(BACKENDS)}")
    if wish == "triton" and kind != "cuda" and not _is_interpreted():
        raise RuntimeError(
            f"the triton backend cannot run on {tensor_device}: use the torch backend, or set "
            "TRITON_INTERPRET=1 before the first import of triton to run it in the interpreter"
        )
    if wish == "native":
        if kind != "cpu":
            raise RuntimeError(f"the native backend runs on a CPU, not on {tensor_device}")
        native.library()
    return wish


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def target_of(device: torch.device) -> str:
    """Return which column of the table a device reads."""
    if device.type != "cuda":
        return "sm_90"  # the interpreter plays the GPU that matters most
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return "sm_80" if major < 9 else "sm_90" if major == 9 else "sm_100"


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current for a launch: Triton launches on the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_shape(name: str, tensor: Placed, expected: Sequence[int | str]) -> None:
    """Raise ValueError unless `tensor` has the `expected` shape; a string stands for any size."""
    shape = tensor.shape
    fits = len(shape) == len(expected)
    for have, want in zip(shape, expected, strict=False):
        if have != want and not isinstance(want, str):
            fits = False
    if not fits:
        sizes = ", ".join(str(size) for size in expected)
        raise ValueError(f"{name} has shape {list(shape)}, expected [{sizes}]")


def check_dtype(name: str, tensor: Placed, allowed: Sequence[torch.dtype]) -> None:
    """Raise TypeError unless the dtype of `tensor` is one of `allowed`."""
    if tensor.dtype not in allowed:
        want = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected {want}")


def check_device(name: str, tensor: Placed, device: torch.device) -> None:
    """Raise ValueError unless `tensor` lives on `device`."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}")


def check_tensor(
    name: str,
    tensor: Placed,
    shape: Sequence[int | str],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise unless `tensor` has this shape (a string is any size), dtype and device."""
    check_shape(name, tensor, shape)
    check_dtype(name, tensor, (dtype,))
    check_device(name, tensor, device)


def check_dense(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | str],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise unless `tensor` fits as `check_tensor` says, and its last dimension is contiguous."""
    check_tensor(name, tensor, shape, dtype, device)
    check_unit_stride(name, tensor)


def check_out(out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return where a result of this shape goes, which has the dtype and device of `like`.

    out  the caller's, checked as `check_dense` does; allocated when None
    """
    if out is None:
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    check_dense("out", out, shape, like.dtype, like.device)
    return out


def check_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the last dimension of `tensor` is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, expected 1")


def check_pools(k_name: str, k_pool: torch.Tensor, v_name: str, v_pool: torch.Tensor) -> None:
    """Raise unless a K pool and a V pool agree and have unit stride in D."""
    check_dtype(k_name, k_pool, (*FLOAT_DTYPES, *QUANTISED_DTYPES))
    check_tensor(v_name, v_pool, k_pool.shape, k_pool.dtype, k_pool.device)
    check_unit_stride(k_name, k_pool)
    check_unit_stride(v_name, v_pool)


def check_for_pool(name: str, tensor: torch.Tensor, pool: torch.Tensor) -> None:
    """Raise unless `tensor` is on the device of `pool` and of a dtype that is stored there."""
    quantised = pool.dtype in QUANTISED_DTYPES
    check_dtype(name, tensor, FLOAT_DTYPES if quantised else (pool.dtype,))
    check_device(name, tensor, pool.device)


def check_slots(slot_mapping: torch.Tensor, num_tokens: int, pool: torch.Tensor) -> None:
    """Raise unless `slot_mapping` has a slot for each token; look at the slots where debugging."""
    check_dense("slot_mapping", slot_mapping, (num_tokens,), torch.int64, pool.device)
    check_ids("slot_mapping", slot_mapping, -(2**62), pool.shape[0] * pool.shape[1])


def check_scales(
    k_pool: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> None:
    """Raise unless the scales are what pools of this dtype need: value = stored * scale.

    k_scale, v_scale  [Hkv] float32, a scale a head; or [N, B, Hkv] float32, one a slot and head;
                      None for pools that are not quantised
    """
    quantised = k_pool.dtype in QUANTISED_DTYPES
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not quantised and scale is not None:
            raise ValueError(f"{name} is given, but pools of {k_pool.dtype} are not quantised")
        if quantised and scale is None:
            raise ValueError(f"{name} is None, but pools of {k_pool.dtype} need scales")
        if scale is None:
            continue
        by_slot = scale.dim() != 1
        shape = k_pool.shape[:3] if by_slot else k_pool.shape[2:3]
        check_dense(name, scale, shape, torch.float32, k_pool.device)
    if k_scale is not None and v_scale is not None and k_scale.shape != v_scale.shape:
        raise ValueError(
            f"k_scale has shape {list(k_scale.shape)} and v_scale {list(v_scale.shape)}: "
            "scale both by head, or both by slot and head"
        )


def check_ids(name: str, ids: torch.Tensor, low: int, high: int) -> None:
    """Raise IndexError for the first id outside [low, high), where RADIXCACHE_KERNELS_DEBUG is set.

    Looking waits for the device, so it is not done otherwise.
    """
    if not os.environ.get(DEBUG_VARIABLE):
        return
    wrong = ((ids < low) | (ids >= high)).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        place = ", ".join(str(i) for i in at)
        raise IndexError(f"{name}[{place}] is {int(ids[tuple(at)])}, expected {low} to {high - 1}")


def check_float8(name: str, pool: Placed) -> None:
    """Raise ValueError for a float8 pool on a GPU that has no such numbers."""
    if not pool.dtype.is_floating_point or pool.dtype.itemsize > 1:
        return
    if pool.device.type != "cuda":
        return
    if torch.version.hip or torch.cuda.get_device_capability(pool.device) < (8, 9):
        raise ValueError(
            f"{name} is {pool.dtype}, but {torch.cuda.get_device_name(pool.device)} has no such "
            "numbers: use int8, or the torch backend"
        )


def check_power_of_two_blocks(name: str, block_size: int) -> None:
    """Raise ValueError unless the Triton kernels can address blocks of `block_size` slots."""
    if block_size not in (1 << n for n in range(9)):
        raise ValueError(
            f"{name} has blocks of {block_size} slots; the triton backend takes a power of two up "
            "to 256"
        )
