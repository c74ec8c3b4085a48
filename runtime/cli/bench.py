"""`radixcache bench`: how fast this machine computes, and where each microsecond of a step goes."""

from __future__ import annotations

import argparse
import cProfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import msgspec

from kernels import RowLayout, choose_backend
from kernels.calibration import Calibration, lines, with_limits_now
from runtime.cli.options import add_model_flags, runtime_config, shown_progress
from runtime.errors import InvalidSetting
from runtime.executor.executor import ModelExecutor
from runtime.loading import Runtime, choose_device, load_runtime, measured
from runtime.models.llama import LlamaModel
from runtime.step_profile import Part, step_parts
from runtime.timing import NEW_TOKENS, Decode, FirstToken, Player
from runtime.weights.checkpoint import open_checkpoint


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time goes of one thing that was played.

    played    "cold" or "warm", a prompt; or "decode" and its batch, a step
    plain_us  microseconds of each without the profiler, its layers in one call where they can be
    whole_us  under the profiler, with each operation called apart
    """

    played: str
    plain_us: float
    whole_us: float
    parts: list[Part]


class Floors(msgspec.Struct, frozen=True, kw_only=True):
    """What nothing could beat here, in milliseconds; empty where the machine was not measured.

    cold, warm  operations of the layers' products at the peak
    decode      bytes of weights, and of the KV cache that a step reads, at the memory's rate; or
                operations at the peak, if they take longer; by batch
    """

    cold: float | None = None
    warm: float | None = None
    decode: list[float] = []


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `radixcache bench --json` prints; `profiles` is empty without `--profile`.

    products  which backend multiplies, and how the weights are stored
    machine   what computes, and the limits of this machine, in words
    """

    model: str
    dtype: str
    products: str
    machine: list[str]
    floors: Floors
    cold: FirstToken
    warm: FirstToken
    decode: list[Decode]
    profiles: list[Profile] = []


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench", help="time first tokens and decode here, and show where a step's time goes"
    )
    flag = parser.add_argument
    flag("--calibrate", action="store_true", help="measure again which product is fastest here")
    flag("--profile", action="store_true", help="show where each microsecond of a step goes")
    flag("--context", type=int, default=500, metavar="N", help="tokens of context (default 500)")
    flag("--batches", type=_batches, default=(1, 8, 32), metavar="N,…", help="default 1,8,32")
    flag("--runs", type=int, default=5, metavar="N", help="of each first token (default 5)")
    flag("--steps", type=int, default=16, metavar="N", help="of each decode (default 16)")
    add_model_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model, play, print what was timed."""
    if min(args.context, args.runs, args.steps) < 1:
        raise InvalidSetting("context, runs and steps are at least 1 each")
    config = runtime_config(args)
    largest = max(args.batches)
    if largest > config.max_running:
        raise InvalidSetting(
            f"max_running is {config.max_running}: use batches of at most so many, or raise it"
        )
    with shown_progress(quiet=args.json) as progress:
        if args.calibrate:
            device = choose_device(config, progress)
            measured(open_checkpoint(config.model, progress=progress).config, device, again=True)
        runtime = load_runtime(config, progress=progress)
        _check_room(runtime, largest, args.context + args.steps + 64)
        report = _report(runtime, args, lambda what: progress(f"playing: {what}", 0, None))
    print(msgspec.json.encode(report).decode() if args.json else _text(report))
    return 0


def _batches(text: str) -> tuple[int, ...]:
    try:
        batches = tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: write 1,8,32") from None
    if min(batches) < 1:
        raise argparse.ArgumentTypeError("a batch has at least one sequence")
    return batches


def _check_room(runtime: Runtime, batch: int, num_tokens: int) -> None:
    """Refuse what would preempt, or not fit at all: it would time something else."""
    if num_tokens > runtime.engine.config.max_len:
        raise InvalidSetting(
            f"a sequence has at most {runtime.engine.config.max_len} tokens here: use a smaller "
            "--context"
        )
    needed = batch * (-(-num_tokens // runtime.memory.block_size) + 1)
    if needed > runtime.memory.num_blocks:
        gib = needed * runtime.memory.bytes_per_block / (1 << 30)
        raise InvalidSetting(
            f"{batch} sequences of {num_tokens} tokens need {gib:.1f} GiB of K/V memory: give "
            "--kv-memory, a smaller --context, or smaller --batches"
        )


def _report(runtime: Runtime, args: argparse.Namespace, told: Callable[[str], None]) -> Report:
    """Play everything without a profiler, and then again with one where that is asked for."""
    plain = Player(runtime.engine, runs=args.runs, steps=args.steps)
    played: dict[str, Callable[[Player], FirstToken | Decode]] = {
        "cold": lambda player: player.first_token(0, args.context),
        "warm": lambda player: player.first_token(args.context, args.context),
    }
    for batch in args.batches:
        played[f"decode {batch}"] = lambda player, batch=batch: player.decode(  # type: ignore[misc]
            batch, args.context
        )
    timed = {}
    for name, play in played.items():
        told(name)
        timed[name] = play(plain)
    profiles = []
    with _operations_apart(runtime):
        for name, play in played.items() if args.profile else ():
            told(f"{name}, under the profiler")
            profiles.append(_profile(runtime, args, name, play, timed[name]))
    limits = runtime.calibration and with_limits_now(runtime.calibration)
    cold, warm, *decode = timed.values()
    assert isinstance(cold, FirstToken)
    assert isinstance(warm, FirstToken)
    return Report(
        model=runtime.name,
        dtype=runtime.memory.dtype,
        products=_model(runtime).products,
        machine=lines(limits, runtime.memory.dtype) if limits else [],
        floors=_floors(runtime, args, limits),
        cold=cold,
        warm=warm,
        decode=[row for row in decode if isinstance(row, Decode)],
        profiles=profiles,
    )


def _model(runtime: Runtime) -> LlamaModel:
    assert isinstance(runtime.executor, ModelExecutor)
    return runtime.executor.model


def _floors(runtime: Runtime, args: argparse.Namespace, calibration: Calibration | None) -> Floors:
    """Work out what nothing could beat, of what is played."""
    dtype = runtime.memory.dtype
    if calibration is None or dtype not in calibration.products:
        return Floors()
    model = _model(runtime)
    layers, head = [weight for weight, _ in model.layer_weights], model.head_weight
    operations = 2 * sum(weight.shape[0] * weight.shape[1] for weight in layers)
    all_operations = operations + 2 * head.shape[0] * head.shape[1]
    weight_bytes = sum(weight.nbytes for weight in (*layers, head))
    kv_bytes = args.context * runtime.memory.bytes_per_token
    peak, read = calibration.peak(dtype), calibration.read_bytes_s
    return Floors(
        cold=1e3 * operations * (args.context + NEW_TOKENS) / peak,
        warm=1e3 * operations * NEW_TOKENS / peak,
        decode=[
            1e3 * max((weight_bytes + n * kv_bytes) / read, n * all_operations / peak)
            for n in args.batches
        ],
    )


@contextmanager
def _operations_apart(runtime: Runtime) -> Iterator[None]:
    """Let a model that computes its layers in one call do it operation by operation."""
    model = _model(runtime)
    if model.row_layout is not None or choose_backend(model.head_weight.device) != "native":
        yield
        return
    model.row_layout = RowLayout()  # the same rows, but one call does not take it
    try:
        yield
    finally:
        model.row_layout = None


def _profile(
    runtime: Runtime,
    args: argparse.Namespace,
    name: str,
    play: Callable[[Player], FirstToken | Decode],
    plain: FirstToken | Decode,
) -> Profile:
    profile = cProfile.Profile()
    player = Player(runtime.engine, runs=args.runs, steps=args.steps, profile=profile, seed=2)
    play(player)
    is_prompt = isinstance(plain, FirstToken)
    parts = step_parts(profile, count=args.runs if is_prompt else args.steps)
    plain_ms = plain.median_ms if isinstance(plain, FirstToken) else plain.step_ms
    return Profile(
        played=name,
        plain_us=plain_ms * 1e3,
        whole_us=sum(part.us for part in parts),
        parts=parts,
    )


def _text(report: Report) -> str:
    floors = report.floors
    rows = [f"{report.model}, {report.dtype}", f"products: {report.products}", *report.machine, ""]
    for name, first, floor in (
        ("cold", report.cold, floors.cold),
        ("warm", report.warm, floors.warm),
    ):
        rows.append(
            f"first token, {name}: {first.median_ms:,.1f} ms ({first.min_ms:,.1f} to "
            f"{first.max_ms:,.1f}), {first.computed_tokens} tokens computed behind "
            f"{first.cached_tokens}{_beside(first.median_ms, floor)}"
        )
    rows += [
        f"decode, batch {row.batch}: {row.step_ms:,.1f} ms a step ({row.min_ms:,.1f} to "
        f"{row.max_ms:,.1f}), {row.tokens_per_s:,.1f} tokens/s, {row.context} tokens of context"
        f"{_beside(row.step_ms, floor)}"
        for row, floor in zip_longest(report.decode, floors.decode)
    ]
    return "\n".join([*rows, "", *PEERS, *_table(report.profiles)])


def _beside(ms: float, floor: float | None) -> str:
    return "" if floor is None else f"; {ms / floor:.2f} times the floor of {floor:,.1f} ms"


PEERS = (
    "the same of others: llama-bench -m FILE.gguf -t THREADS -p 560 -n 64 (llama.cpp)",
    "                    vllm bench latency --model FOLDER --input-len 560 --output-len 64",
    "whole workloads:    benchmarks/serve_peers.py, in the repository",
)
"""What a report of slowness should carry, too."""


def _table(profiles: Sequence[Profile]) -> list[str]:
    """Microseconds of a prompt or a step: a row for each part, a column for what was played."""
    if not profiles:
        return []
    names = list(dict.fromkeys(part.name for profile in profiles for part in profile.parts))
    us = [{part.name: part.us for part in profile.parts} for profile in profiles]
    width = max(map(len, names))
    head = f"{'microseconds':{width}}" + "".join(f"{p.played:>12}" for p in profiles)
    rows = [
        f"{name:{width}}" + "".join(f"{column.get(name, 0.0):>12,.0f}" for column in us)
        for name in names
    ]
    whole = f"{'whole':{width}}" + "".join(f"{p.whole_us:>12,.0f}" for p in profiles)
    plain = f"{'as served':{width}}" + "".join(f"{p.plain_us:>12,.0f}" for p in profiles)
    return ["", head, *rows, whole, plain]
