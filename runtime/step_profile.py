"""Where the time of a step goes, from Python's own profiler.

Owns: which functions stand for which part of a step.  Does not know: what is played, or how a table
looks.
Idea: nothing is wrapped.  The profiler knows who called whom, so an operation of the model is
whatever a function of runtime/models calls in kernels, whatever its name will be.
"""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from collections.abc import Callable
from types import CodeType
from typing import Any, Final, TypeAlias

import msgspec

import kernels
from runtime.decoding.logprobs import drawn_logprobs
from runtime.decoding.sampler import choose_tokens
from runtime.engine import Engine
from runtime.executor.batch import build_batch
from runtime.executor.executor import ModelExecutor
from runtime.models import llama
from runtime.models.attention import StepAttention
from runtime.models.llama import LlamaModel
from runtime.scheduler.scheduler import Scheduler
from runtime.tokenizer.detokenizer import Detokenizer

_Place: TypeAlias = tuple[str, int, str]
_Edge: TypeAlias = tuple[_Place, _Place]

_MODELS: Final = llama.__file__.rpartition("/")[0]
_KERNELS: Final = (kernels.__file__ or "").rpartition("/")[0]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a step, or of a prompt's steps.

    us     microseconds, what it calls included
    calls  how often it was called
    """

    name: str
    us: float
    calls: float


def step_parts(profile: cProfile.Profile, *, count: int) -> list[Part]:
    """Return what each part of the steps took that ran under a profiler.

    count  of what was played, to divide by: steps, or prompts of several steps each

    The parts add up to the steps; a Python call costs about a tenth of a microsecond more than
    without the profiler.
    """
    stats = _Stats(profile)
    parts: dict[str, tuple[float, float]] = {}
    step, execute = stats.of(Engine.step), stats.of(ModelExecutor.execute)
    parts["scheduling"] = stats.of(Scheduler.schedule)
    parts["batch building"] = stats.of(build_batch)
    model = (stats.of(LlamaModel.forward), stats.of(LlamaModel.logits))
    parts["attention plan"] = stats.of(StepAttention.__init__)
    operations = stats.operations()
    if "rows" in operations:  # of a packed embedding
        operations["embedding"] = operations.pop("rows")
    head = _minus(stats.of(LlamaModel.logits), stats.called_by(LlamaModel.logits, _KERNELS))
    if "linear" in operations:
        operations["linear, layers"] = _minus(operations.pop("linear"), head)
        operations["linear, vocabulary"] = head
    parts |= dict(sorted(operations.items(), key=lambda item: -item[1][0]))
    named = [parts["attention plan"], *operations.values()]
    parts["model, other"] = _minus(_sum(model), _sum(named))
    parts["sampling"] = _sum([stats.of(choose_tokens), stats.of(drawn_logprobs)])
    inside = [parts["batch building"], *model, parts["sampling"]]
    parts["executor, other"] = _minus(execute, _sum(inside))
    parts["counts and publishing"] = stats.of(Scheduler.apply)
    parts["detokenising"] = stats.of(Detokenizer.push)
    outer = [parts[name] for name in ("scheduling", "counts and publishing", "detokenising")]
    parts["engine, other"] = _minus(step, _sum([*outer, execute]))
    return [
        Part(name=name, us=seconds * 1e6 / count, calls=calls / count)
        for name, (seconds, calls) in parts.items()
    ]


class _Stats:
    """A profile's table, asked by function; times are (seconds, calls)."""

    def __init__(self, profile: cProfile.Profile) -> None:
        table: dict[_Place, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        self._table = table

    def of(self, function: Callable[..., Any]) -> tuple[float, float]:
        """What a function took in all, with what it calls."""
        row = self._table.get(_place(function))
        return (row[3], row[1]) if row else (0.0, 0)

    def operations(self) -> dict[str, tuple[float, float]]:
        """What each function of kernels took that one of runtime/models called, by name.

        What the attention plan calls is a part of that.
        """
        found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0))
        attending = _place(StepAttention.__call__)
        for caller, called, row in self._edges():
            if caller[0] == attending[0] and caller != attending:
                continue
            if caller[0].startswith(_MODELS) and called[0].startswith(_KERNELS):
                found[called[2]] = _sum([found[called[2]], (row[3], row[1])])
        return dict(found)

    def called_by(self, function: Callable[..., Any], folder: str) -> tuple[float, float]:
        """What a function spent in calls of its own to functions of a folder."""
        place = _place(function)
        return _sum(
            (row[3], row[1])
            for caller, called, row in self._edges()
            if caller == place and called[0].startswith(folder)
        )

    def _edges(self) -> Any:
        for called, row in self._table.items():
            for caller, edge in row[4].items():
                yield caller, called, edge


def _place(function: Callable[..., Any]) -> _Place:
    code: CodeType = function.__code__
    return code.co_filename, code.co_firstlineno, code.co_name


def _sum(parts: Any) -> tuple[float, float]:
    seconds, calls = 0.0, 0.0
    for more, count in parts:
        seconds, calls = seconds + more, calls + count
    return seconds, calls


def _minus(whole: tuple[float, float], part: tuple[float, float]) -> tuple[float, float]:
    return max(0.0, whole[0] - part[0]), whole[1]
