"""What bench_core.py measures of traces and of memory: each run in a forked process of its own.

Owns: how memory is read, and what is timed of a request.  Does not know: which cache it is.
Idea: a process that has imported all and built nothing forks for every run, so that what a run
grows by is the run's; what is shared with the parent counts for nobody.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core_traces import read_trace
from core_workloads import Leaves

now = time.perf_counter


def memory_bytes(field: str) -> int:
    """Return a size that the kernel keeps of this process, such as VmRSS."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def forked(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function returns in a forked process.  Raises RuntimeError for its errors."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    end, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        try:
            answer = function()
        except BaseException as error:  # the parent must hear of it, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(begin, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(begin)
    with os.fdopen(end) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    answer = json.loads(said) if said else {"error": "the process ended"}
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


class Memory:
    """Bytes a cached node costs, everything counted that building and filling a cache takes.

    bytes          growth of resident memory
    beside_tokens  the same without the token ids, as wide as each cache keeps them
    traced         growth of what Python's allocators gave; neither Rust's nor torch's is in
    """

    def __init__(self, cache: Any, *, block_size: int, leaves: int) -> None:
        cache.build(block_size, 16)  # imports
        self.cache, self.block_size, self.leaves = cache, block_size, leaves
        self.result = forked(self.resident) | forked(self.traced)

    def fill(self) -> Any:
        kept = Leaves(self.cache, block_size=self.block_size, leaves=self.leaves)
        gc.collect()
        return kept

    def resident(self) -> dict[str, float]:
        before = memory_bytes("RssAnon")
        kept = self.fill()
        grown = (memory_bytes("RssAnon") - before) / self.leaves
        assert len(kept.tail) == self.block_size
        ids = self.block_size * self.cache.token_bytes
        return {"bytes": grown, "beside_tokens_bytes": grown - ids}

    def traced(self) -> dict[str, float]:
        tracemalloc.start()
        kept = self.fill()
        traced = tracemalloc.get_traced_memory()[0] / self.leaves
        assert len(kept.tail) == self.block_size
        return {"traced_bytes": traced}

    def sample(self) -> dict[str, float]:
        return self.result


class Pauses:
    """Seconds that Python's garbage collector took."""

    def __init__(self) -> None:
        self.seconds = self.began = 0.0
        gc.callbacks.append(self.note)

    def note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.began = now()
        else:
            self.seconds += now() - self.began


class Replay:
    """The requests of a trace, one after another, in a pool of a share of its distinct tokens.

    A request is looked up and pinned, published `chunk` tokens at a time, extended by its answer
    and let go.  The collector is on, as in a server: some caches leave cycles.
    """

    def __init__(
        self,
        cache: Any,
        *,
        trace: str,
        folder: str,
        block_size: int,
        share: float,
        chunk: int,
        tokens_per_hash: int,
        most: int,
    ) -> None:
        self.cache, self.block_size, self.chunk = cache, block_size, chunk
        self.stream = read_trace(trace, folder, tokens_per_hash=tokens_per_hash, most=most)
        distinct = self.stream.distinct_tokens()
        needed = self.stream.longest() // block_size + 2  # one request must fit
        self.num_blocks = max(needed, int(share * distinct) // block_size)
        cache.build(block_size, 16)  # imports
        self.facts = {"num_blocks": self.num_blocks, "distinct_tokens": distinct}
        self.facts |= forked(self.traced)

    def sample(self) -> dict[str, float]:
        return forked(self.replay) | self.facts

    def traced(self) -> dict[str, float]:
        tracemalloc.start()
        self.replay()
        return {"traced_peak_bytes": tracemalloc.get_traced_memory()[1]}

    def replay(self) -> dict[str, float]:
        cache, took, collecting, operations = self.cache, 0.0, 0.0, 0
        asked = found = whole = 0
        gc.freeze()  # the imports, as servers do
        gc.enable()
        before = peak = memory_bytes("RssAnon")
        cache.build(self.block_size, self.num_blocks)
        pauses = Pauses()
        for place, (prompt, answer) in enumerate(self.stream):
            run, more = cache.run_of(prompt), cache.run_of(answer)
            collected = pauses.seconds
            began = now()
            sequence = cache.begin(run)
            cached, in_blocks = cache.found(sequence)
            ends = range(cached + self.chunk, len(prompt), self.chunk)
            for end in ends:
                cache.publish(sequence, end)
            cache.publish(sequence)
            if len(answer):
                cache.extend(sequence, more)
            cache.end(sequence)
            took += now() - began
            operations += 3 + len(ends) + bool(len(answer))
            asked, found, whole = asked + len(prompt), found + cached, whole + in_blocks
            collecting += pauses.seconds - collected
            if place % 16 == 0:
                peak = max(peak, memory_bytes("RssAnon"))
        peak = max(peak, memory_bytes("RssAnon"))
        return {
            "us": took / len(self.stream) * 1e6,
            "collector_us": collecting / len(self.stream) * 1e6,
            "requests_per_s": len(self.stream) / took,
            "operations_per_s": operations / took,
            "prompt_tokens": asked,
            "hit_percent": 100 * found / asked,
            "whole_block_hit_percent": 100 * whole / asked,
            "peak_bytes": peak - before,
        }
