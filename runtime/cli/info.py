"""`radixcache info`: a model's shape, and how many tokens of K/V fit, worked out."""

from __future__ import annotations

import argparse

import msgspec
import torch

from kernels.backend import choose_backend
from kernels.calibration import Calibration, lines
from runtime.cli.options import add_model_flags, runtime_config, shown_progress
from runtime.loading import Memory, choose_device, choose_dtype, measured, plan_memory
from runtime.models.config import ModelConfig
from runtime.weights.checkpoint import open_checkpoint


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `radixcache info --json` prints."""

    name: str
    model: ModelConfig
    memory: Memory
    formula: str
    has_chat_template: bool
    kernels: list[str]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("info", help="show a model and how many tokens of K/V fit")
    add_model_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the model's header, not its weights, and print what it costs."""
    config = runtime_config(args)
    with shown_progress(quiet=args.json) as progress:
        device = choose_device(config, progress)
        checkpoint = open_checkpoint(config.model, progress=progress)
    shape = checkpoint.config
    calibration = measured(shape, device)
    dtype = choose_dtype(config, device, calibration)
    memory = plan_memory(config, shape, dtype)
    formula = (
        f"2 (K and V) × {shape.num_layers} layers × {shape.num_kv_heads} kv heads × "
        f"{shape.head_dim} head dim × {dtype.itemsize} bytes = {memory.bytes_per_token:,} bytes"
    )
    info = ModelInfo(
        name=checkpoint.name,
        model=shape,
        memory=memory,
        formula=formula,
        has_chat_template=checkpoint.chat_template() is not None,
        kernels=_kernels(dtype, device, calibration),
    )
    print(msgspec.json.encode(info).decode() if args.json else _text(info))
    return 0


def _kernels(
    dtype: torch.dtype, device: torch.device, calibration: Calibration | None
) -> list[str]:
    """Say what computes, and how far from this machine's limits."""
    if calibration is None:
        return [f"the {choose_backend(device)} backend"]
    return lines(calibration, str(dtype).removeprefix("torch."))


def _text(info: ModelInfo) -> str:
    model, memory = info.model, info.memory
    total = memory.bytes_per_block * memory.num_blocks
    return "\n".join(
        (
            f"model            {info.name} ({model.architecture}, {model.num_layers} layers, "
            f"{model.num_heads} query heads, {model.num_kv_heads} kv heads)",
            f"vocabulary       {model.vocab_size:,}",
            f"context          {model.max_len:,} tokens",
            f"chat template    {'yes' if info.has_chat_template else 'no'}",
            f"K/V a token      {info.formula} in {memory.dtype}",
            f"K/V a block      {memory.bytes_per_token:,} × {memory.block_size} tokens = "
            f"{memory.bytes_per_block:,} bytes",
            f"K/V that fits    {memory.num_blocks:,} blocks = {memory.num_tokens:,} tokens "
            f"in {total / 2**20:,.0f} MiB",
            *(f"kernels          {line}" for line in info.kernels),
        )
    )
