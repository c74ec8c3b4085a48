"""The benchmark beside other servers, as far as it goes without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.limits import Limits, decode_floor_s, kv_copy_floor_s, linear_weights
from benchmarks.peers.client import Answer, Refused, ask
from benchmarks.peers.driver import Played, TooLate, agreement, play, see
from benchmarks.peers.meter import Meter, process_tree
from benchmarks.peers.report import BEGIN, END, replace_section, report
from benchmarks.peers.servers import PEERS
from benchmarks.peers.workloads import QUICK, Ideal, Node, Sizes, ideal, make_workloads
from benchmarks.serve_peers import in_turns
from tests.support.smollm2 import open_smollm2
from tests.support.tiny_checkpoints import write_tiny_gguf

ROOT = Path(__file__).parents[2]


def chain() -> list[Node]:
    """A root, two children of it, and a child of the first."""
    return [
        Node(id="r", tokens=[1, 2], max_tokens=2),
        Node(id="a", parent="r", tokens=[3], max_tokens=2),
        Node(id="b", parent="r", tokens=[4], max_tokens=2),
        Node(id="aa", parent="a", tokens=[5, 6], max_tokens=2),
    ]


def echo(prompt: list[int], max_tokens: int) -> Answer:
    """Answer with the prompt's length, again and again."""
    return Answer(tokens=[len(prompt)] * max_tokens, ttft_s=0.001 * len(prompt), cached=1)


def test_the_workloads_have_the_tokens_that_they_are_known_by() -> None:
    tokenizer = open_smollm2().tokenizer()
    workloads = make_workloads(tokenizer, Sizes())
    assert {name: ideal(nodes) for name, nodes in workloads.items()} == {
        "chat": Ideal(prompt_tokens=44_712, computed_tokens=4_016),
        "tree": Ideal(prompt_tokens=69_792, computed_tokens=4_633),
        "few-shot": Ideal(prompt_tokens=130_560, computed_tokens=4_560),
        "control": Ideal(prompt_tokens=16_384, computed_tokens=16_384),
    }
    assert workloads == make_workloads(tokenizer, Sizes())
    assert workloads != make_workloads(tokenizer, Sizes(), seed=8)
    assert [len(nodes) for nodes in workloads.values()] == [48, 40, 64, 32]


def test_the_least_to_compute_counts_shared_beginnings_and_answers_once() -> None:
    nodes = chain()
    # r computes 2.  Of a's 1 2 x x 3 the last x is not cached yet: 2.  For b it is: 1.
    # aa is a, its answer, of which the last is not cached, and two more: 3.
    assert ideal(nodes) == Ideal(prompt_tokens=2 + 5 + 5 + 9, computed_tokens=2 + 2 + 1 + 3)
    twice = [Node(id=name, tokens=[1, 2, 3], max_tokens=1) for name in "xy"]
    assert ideal(twice) == Ideal(prompt_tokens=6, computed_tokens=3 + 1)


def test_a_node_is_sent_behind_its_parents_prompt_and_answer() -> None:
    played = play(chain(), echo, clients=3, limit_s=30)
    assert played.prompts == {
        "r": [1, 2],
        "a": [1, 2, 2, 2, 3],
        "b": [1, 2, 2, 2, 4],
        "aa": [1, 2, 2, 2, 3, 5, 5, 5, 6],
    }
    seen = see(played, of=9)
    assert (seen.requests, seen.of, seen.prompt_tokens) == (4, 9, 21)
    assert (seen.computed, seen.cached, seen.output_tokens) == (17, 4, 8)
    assert (seen.ttft_median_ms, seen.ttft_p95_ms) == (5.0, 9.0)


def test_no_more_requests_are_on_their_way_than_there_are_clients() -> None:
    together, barrier = [0, 0], threading.Barrier(2, timeout=30)

    def counted(prompt: list[int], max_tokens: int) -> Answer:
        together[0] += 1
        barrier.wait()  # both clients are here, or the test fails
        together[1] = max(together[1], together[0])
        barrier.wait()
        together[0] -= 1
        return echo(prompt, max_tokens)

    nodes = [Node(id=str(i), tokens=[i], max_tokens=1) for i in range(6)]
    assert len(play(nodes, counted, clients=2, limit_s=60).answers) == 6
    assert together[1] == 2


def test_a_refusal_ends_the_workload() -> None:
    def refuse(prompt: list[int], max_tokens: int) -> Answer:
        raise Refused("500")

    with pytest.raises(Refused, match="500"):
        play(chain(), refuse, clients=2, limit_s=30)


def test_a_workload_that_takes_too_long_is_given_up() -> None:
    never = threading.Event()

    def hang(prompt: list[int], max_tokens: int) -> Answer:
        never.wait()
        return echo(prompt, max_tokens)

    with pytest.raises(TooLate, match="4 requests"):
        play(chain(), hang, clients=2, limit_s=0.05)
    never.set()


def test_answers_are_compared_where_the_prompts_are_equal() -> None:
    def other(prompt: list[int], max_tokens: int) -> Answer:
        return echo(prompt, max_tokens) if len(prompt) < 5 or 4 in prompt else Answer(tokens=[0, 0])

    ours, theirs = (play(chain(), way, clients=1, limit_s=30) for way in (echo, other))
    assert agreement(ours, ours) == {"same_prompts": 4, "same_answers": 4}
    assert agreement(ours, theirs) == {"same_prompts": 3, "same_answers": 2}


EVENTS: dict[str, list[dict[str, Any]]] = {
    "openai": [
        {"choices": [{"token_ids": [5]}]},
        {"choices": [{"token_ids": [6, 7], "text": "x"}]},
        {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}},
    ],
    "llama": [
        {"tokens": [5, 6], "stop": False},
        {"tokens": [7], "stop": False},
        {"tokens": [], "stop": True, "timings": {"cache_n": 2, "prompt_n": 1}},
    ],
    "sglang": [
        {"output_ids": [5], "meta_info": {"completion_tokens": 1, "cached_tokens": 2}},
        {"output_ids": [5, 6, 7], "meta_info": {"completion_tokens": 3, "cached_tokens": 2}},
    ],
}


@contextmanager
def answering(events: list[dict[str, Any]], bodies: list[dict[str, Any]]) -> Iterator[int]:
    """A server that streams these events; yields its port."""

    class Stream(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            for event in events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of each request."""

    with HTTPServer(("127.0.0.1", 0), Stream) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("api", EVENTS)
def test_each_api_tells_its_tokens_and_what_was_cached(api: str) -> None:
    bodies: list[dict[str, Any]] = []
    with answering(EVENTS[api], bodies) as port:
        answer = ask(port, api, [1, 2, 3], 3, timeout_s=30)
        with pytest.raises(Refused, match="3 tokens came, 4 were"):
            ask(port, api, [1, 2, 3], 4, timeout_s=30)
    assert (answer.tokens, answer.cached) == ([5, 6, 7], 2)
    assert 0 < answer.ttft_s <= answer.total_s
    assert [1, 2, 3] in bodies[0].values()


BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ninput()"


def test_cpu_time_of_a_childs_child_is_counted() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        meter = Meter(child.pid, period_s=0.01).start()
        assert child.stdout.readline() == b"burnt\n"
        assert len(process_tree(child.pid)) == 2
        usage = meter.stop()
        child.stdin.write(b"\n")
    child.wait()
    assert usage.cpu_s >= 0.15  # what burnt before the first look is not in it
    assert usage.peak_rss_mb > 5
    assert process_tree(child.pid) == {}


def test_ours_alternates_with_the_peers_of_its_precision() -> None:
    names = ("ours-bfloat16", "ours-float32", "vllm-bfloat16", "vllm-float32", "llama-bfloat16")
    order = [peer.name for peer in in_turns([PEERS[name] for name in names], ours_runs=2)]
    assert order == [
        *("ours-bfloat16", "vllm-bfloat16", "ours-float32", "vllm-float32"),
        *("ours-bfloat16", "llama-bfloat16", "ours-float32"),
    ]


def row(wall_s: float, *, requests: int = 4, cached: int | None = 10) -> dict[str, Any]:
    played = Played(
        wall_s=wall_s,
        prompts={str(i): [1] * 10 for i in range(requests)},
        answers={str(i): Answer(tokens=[1], ttft_s=0.1, cached=cached) for i in range(requests)},
    )
    seen = see(played, of=4)
    counted = {name: getattr(seen, name) for name in seen.__struct_fields__}
    used = {"cpu_s": wall_s, "foreign_s": wall_s / 2, "peak_rss_mb": 100.0}
    return counted | used | {"same_prompts": 4, "same_answers": 3}


def run_of(server: str, dtype: str, **workloads: dict[str, Any]) -> dict[str, Any]:
    return {"server": server, "dtype": dtype, "versions": {}, "start_s": 1, "workloads": workloads}


def test_losses_failures_and_shorter_runs_stay_in_the_tables(tmp_path: Path) -> None:
    runs = [
        run_of("ours-float32", "float32", chat=row(2.0)),
        run_of("vllm-float32", "float32", chat=row(1.0, cached=None)),
        run_of("ours-float32", "float32", chat=row(4.0)),
        run_of("transformers-float32", "float32", chat=row(9.0, requests=2)),
        run_of("sglang-float32", "float32") | {"error": "it ended\nwith 1"},
    ]
    least = {"chat": {"prompt_tokens": 40, "computed_tokens": 12}}
    text = report(
        {"date": "a day", "machine": "a machine", "quick": False, "ideal": least, "runs": runs}
    )
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    cells = {cell[0].strip(): [c.strip() for c in cell[1:]] for cell in lines[:5]}
    assert cells["ours-float32"][:2] == ["4", "3.0 (2.0 to 4.0)"]
    assert cells["vllm-float32"][5:] == ["–", "–", "4.0", "3.00", "3.00"]
    assert cells["transformers-float32"][0] == "2 of 4"
    assert cells["transformers-float32"][-1] == "–"
    assert set(cells["sglang-float32"]) == {"–"}
    assert "| vllm-float32 | – | 1.0 | 100 | 3 of 4 | 0.50 |" in text
    assert "**sglang-float32 failed**: `it ended with 1`" in text
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\n\nold\n{END}\n\nafter\n")
    replace_section(page, text)
    replace_section(page, text)
    assert page.read_text() == f"before\n\n{BEGIN}\n\n{text}\n{END}\n\nafter\n"


def test_a_dry_run_plays_a_tiny_model_and_goes_on_where_a_peer_is_missing(tmp_path: Path) -> None:
    model, out = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "seen.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.serve_peers", "--quick", "--ours-runs=2"),
            *("--home", str(tmp_path / "home"), "--model", str(model), "--out", str(out)),
            "--only=ours-float32,llama-q4_1",
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peer, first, second = json.loads(out.read_text())["runs"]
    assert "no environment" in peer["error"]
    assert not {"error"} & (first.keys() | second.keys())
    assert first["start_s"] > 0
    seen = second["workloads"]
    sizes = {name: (row["requests"], row["output_tokens"]) for name, row in seen.items()}
    assert sizes == {"chat": (4, 16), "tree": (7, 28), "few-shot": (6, 24), "control": (3, 12)}
    assert all(row["cached"] > 0 for name, row in seen.items() if name != "control")
    assert seen["control"]["computed"] == QUICK.controls * QUICK.control
    assert all(row["same_answers"] == row["requests"] for row in seen.values())
    assert "| ours-float32 | 4 | " in done.stdout


def test_floors_are_those_of_bytes_or_of_operations_whichever_take_longer() -> None:
    config, width = open_smollm2().config, 2
    token = config.kv_bytes_per_token(width)
    assert token == 23_040
    slow_reads = Limits(num_threads=1, matmul_flop_s=1e18, read_bytes_s=1e9, copy_bytes_s=2e9)
    slow_sums = Limits(num_threads=1, matmul_flop_s=1e9, read_bytes_s=1e18, copy_bytes_s=2e9)
    weights = linear_weights(config) + 49_152 * 576
    contexts = [1500] * 8

    def floor(limits: Limits, shared: int = 0) -> float:
        return decode_floor_s(config, limits, contexts=contexts, dtype_bytes=width, shared=shared)

    assert floor(slow_reads) == pytest.approx((width * weights + 8 * 1500 * token) / 1e9)
    assert floor(slow_reads, 1500) == pytest.approx((width * weights + 1500 * token) / 1e9)
    pairs = 4 * 30 * 9 * 64 * 1501
    assert floor(slow_sums) == pytest.approx(8 * (2 * weights + pairs) / 1e9)
    copied = kv_copy_floor_s(config, slow_reads, num_tokens=1500, dtype_bytes=width)
    assert copied == pytest.approx(1500 * token / 2e9)
