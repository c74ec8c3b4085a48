"""`--trace-log`: what a server writes the simulator replays, and finds the hits that were there."""

from __future__ import annotations

import json
import logging
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from radixcache.sim import lru_curve, read_trace
from runtime.server.app import create_app
from runtime.trace_log import TraceLog
from tests.support.engine_bench import EngineBench
from tests.support.served import quick_runtime

BLOCK = 2


def bench_with(stream: Any) -> EngineBench:
    bench = EngineBench(num_blocks=64, block_size=BLOCK)
    bench.engine.scheduler.admission.trace_log = TraceLog(
        stream, block_size=BLOCK, clock=iter(range(1000)).__next__, key=b"k" * 16
    )
    return bench


def test_what_is_written_is_replayed_with_the_same_hits(tmp_path: Path) -> None:
    stream = BytesIO()
    bench = bench_with(stream)
    bench.submit("a", range(9), max_tokens=3)
    bench.run()
    history = [*range(9), *bench.output("a")]
    bench.submit("b", [*history, 7, 8], max_tokens=2)
    bench.run()
    path = tmp_path / "log.jsonl"
    path.write_bytes(stream.getvalue())
    trace = read_trace(path, block_size=BLOCK)
    first, second = trace.requests
    assert (first.prompt_tokens, first.output_tokens, len(first.prompt)) == (9, 3, 4)
    shared = [*first.prompt, *first.answer]
    assert list(second.prompt[: len(shared)]) == shared
    found = round(lru_curve(trace).best * trace.num_references)
    cached = bench.engine.stats().cached_tokens
    assert found == len(shared) == cached // BLOCK


def test_a_request_that_never_ran_leaves_no_line_and_nothing_behind() -> None:
    stream = BytesIO()
    bench = bench_with(stream)
    bench.submit("a", range(4), max_tokens=1)
    bench.engine.abort("a")
    assert stream.getvalue() == b""
    log = bench.engine.scheduler.admission.trace_log
    assert log is not None
    assert not log._arrived


def test_hashes_are_of_one_process_and_tell_no_tokens() -> None:
    lines = []
    for key in (b"k" * 16, b"k" * 16, b"q" * 16):
        stream = BytesIO()
        bench = bench_with(stream)
        assert bench.engine.scheduler.admission.trace_log is not None
        bench.engine.scheduler.admission.trace_log._key = key
        bench.submit("a", range(8), max_tokens=1)
        bench.run()
        lines.append(json.loads(stream.getvalue())["hash_ids"])
    assert lines[0] == lines[1]
    assert not set(lines[0]) & set(lines[2])


class Full(BytesIO):
    """A disk without room."""

    def write(self, line: Any) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_log_and_not_the_server(caplog: pytest.LogCaptureFixture) -> None:
    bench = bench_with(Full())
    with caplog.at_level(logging.ERROR, logger="radixcache.trace"):
        for name in ("a", "b"):
            bench.submit(name, range(4), max_tokens=1)
            bench.run()
    assert [record.message for record in caplog.records] == [
        "the trace log ends here: [Errno 28] No space left on device"
    ]


def test_an_application_writes_to_its_stream_and_closes_it(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    app = create_app(quick_runtime(), trace_stream=file.open("ab"))
    with TestClient(app) as http:
        body = {"prompt": list(range(100, 140)), "max_tokens": 2, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
    line = json.loads(file.read_text())
    assert (line["input_length"], line["output_length"], len(line["hash_ids"])) == (40, 2, 2)
