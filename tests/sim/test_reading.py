"""Reading traces: hashes in blocks of any size, logs of text, and what is wrong with a file."""

from __future__ import annotations

import gzip
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from radixcache import InvalidTrace
from radixcache.sim import Trace, read_trace
from radixcache.sim.texts import pieces


def hashes(*ids: int, length: int | None = None, at: float = 0, **more: Any) -> dict[str, Any]:
    """A line of blocks of 512 tokens, whole ones unless a length says otherwise."""
    length = 512 * len(ids) if length is None else length
    return {"timestamp": at, "input_length": length, "output_length": 3, "hash_ids": ids} | more


def written(folder: Path, *lines: Any, zipped: bool = False) -> Path:
    """A file of these lines, as JSON unless they are text."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    content = "\n".join(texts).encode()
    path = folder / ("log.jsonl.gz" if zipped else "log.jsonl")
    path.write_bytes(gzip.compress(content) if zipped else content)
    return path


def shape(trace: Trace) -> list[tuple[list[int], list[int]]]:
    return [(list(request.prompt), list(request.answer)) for request in trace.requests]


@pytest.mark.parametrize("zipped", [False, True])
def test_block_hashes_are_read_plain_or_zipped(tmp_path: Path, zipped: bool) -> None:
    path = written(tmp_path, hashes(7, 8, length=600), "", hashes(7, 9, at=1500), zipped=zipped)
    trace = read_trace(path)
    assert shape(trace) == [([0, 1], []), ([0, 2], [])]
    assert (trace.title, trace.num_references, trace.num_distinct) == ("log", 4, 3)
    assert [request.arrival_s for request in trace.requests] == [0, 1.5]
    assert (trace.requests[0].prompt_tokens, trace.requests[0].output_tokens) == (600, 3)
    assert read_trace(path, most=1).num_references == 2


@pytest.mark.parametrize("zipped", [False, True])
def test_a_byte_order_mark_at_the_head_is_passed_over(tmp_path: Path, zipped: bool) -> None:
    line = "\ufeff" + json.dumps(hashes(7, 8))
    assert read_trace(written(tmp_path, line, zipped=zipped)).num_references == 2
    later = written(tmp_path, hashes(7, 8), line)
    with pytest.raises(InvalidTrace, match="line 2"):
        read_trace(later)


def test_a_pipe_is_read_as_a_file_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = written(tmp_path, hashes(7, 8), hashes(7, 9), zipped=True).read_bytes()
    with ThreadPoolExecutor(1) as writer:
        writer.submit(pipe.write_bytes, content)
        assert read_trace(pipe).num_distinct == 3


def test_hashes_become_larger_and_smaller_blocks(tmp_path: Path) -> None:
    path = written(tmp_path, hashes(1, 2, 3, length=1100), hashes(1, 2, 4, 5))
    assert shape(read_trace(path, block_size=1024)) == [([0, 1], []), ([0, 2], [])]
    small = read_trace(path, block_size=256)
    # 1,100 tokens are five blocks of 256, the last not full; the first four are the other's too.
    assert [len(request.prompt) for request in small.requests] == [5, 8]
    assert list(small.requests[1].prompt[:4]) == [0, 1, 2, 3]
    assert small.num_distinct == 9
    with pytest.raises(InvalidTrace, match="neither a multiple nor a divisor"):
        read_trace(path, block_size=500)


def test_our_own_log_tells_block_size_answers_and_tenants(tmp_path: Path) -> None:
    first = hashes(1, length=20, block_size=16, output_hash_ids=[2], tenant="a")
    again = hashes(1, 2, length=32, block_size=16, tenant="a")
    other = hashes(1, 2, length=32, block_size=16, tenant="b")
    trace = read_trace(written(tmp_path, first, again, other), block_size=16)
    assert shape(trace) == [([0], [1]), ([0, 1], []), ([2, 3], [])]
    assert trace.requests[2].tenant == "b"


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": said} | more


def test_a_log_of_chats_shares_what_texts_share(tmp_path: Path) -> None:
    long = "one two three four five six seven eight nine ten"
    reply = {"choices": [{"message": {"role": "assistant", "content": "eleven twelve"}}]}
    lines = [
        chat(long, timestamp=1_700_000_000, response=reply),
        {"body": chat(long, "eleven twelve", "and on"), "timestamp": "2023-11-14T22:13:30+00:00"},
        {"request": {"prompt": long}, "timestamp": 1_700_000_011_000},
    ]
    trace = read_trace(written(tmp_path, *lines), block_size=4)
    first, second, third = trace.requests
    assert [request.arrival_s for request in trace.requests] == [0, 10, 11]
    path = first.prompt + first.answer
    shared = [a for a, b in zip(path, second.prompt, strict=False) if a == b]
    assert len(shared) >= len(first.prompt)  # the answer of the first is the second's history
    assert third.prompt[0] not in path  # a prompt has no template around it
    assert trace.has_times


def test_the_ids_come_from_whatever_tokenizer_is_given(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "abcdef"}, {"prompt": "abcxyz"})
    trace = read_trace(path, block_size=3, encode=lambda text: list(text.encode()))
    assert shape(trace) == [([0, 1], []), ([0, 2], [])]
    assert not trace.has_times


def test_parts_tools_and_calls_of_a_chat_are_text_too(tmp_path: Path) -> None:
    part = {"type": "text", "text": "look"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    plain = {"messages": [{"role": "user", "content": [part, {"type": "image_url"}]}, call]}
    trace = read_trace(written(tmp_path, plain, plain | {"tools": [{"name": "f"}]}), block_size=4)
    assert trace.requests[0].prompt[0] != trace.requests[1].prompt[0]  # tools stand first


def test_requests_are_put_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, hashes(5, 6, at=2000), hashes(5, at=1000)))
    assert [(r.arrival_s, len(r.prompt)) for r in trace.requests] == [(1, 1), (2, 2)]


def test_pieces_of_a_text_depend_on_what_is_before_them_alone() -> None:
    assert pieces("") == []
    assert pieces("caf\u00e9 \ud800")[:1] == pieces("café")[:1]
    assert len(pieces("internationalisation")) == 5


WRONG: list[tuple[list[Any], str]] = [
    (["{"], "line 1: .*truncated"),
    ([hashes(1), "", "[]"], "line 3: .*object"),
    ([hashes(1), {"timestamp": 0}], "line 2: .*missing required field"),
    ([hashes(1), hashes(1, length=-1)], "line 2: lengths"),
    ([hashes(1, 2, length=2000)], "line 1: 2000 tokens are 4 blocks"),
    ([hashes(1, block_size=0)], "line 1: block_size"),
    ([hashes(1, length=1, block_size=1 << 62)], "line 1: block_size"),
    ([hashes(1, output_length=10**18)], "line 1: lengths must not exceed"),
    ([hashes(1), hashes(1, length=16, block_size=16)], "line 2: block_size 16 after"),
    ([{"model": "m"}], "line 1: .*`messages` or `prompt`"),
    ([chat("a", timestamp="soon")], "line 1: .*soon"),
    ([""], "holds no request"),
]


@pytest.mark.parametrize(("lines", "message"), WRONG, ids=[text for _, text in WRONG])
def test_a_bad_file_is_refused_with_the_number_of_the_line(
    tmp_path: Path, lines: list[Any], message: str
) -> None:
    with pytest.raises(InvalidTrace, match=message):
        read_trace(written(tmp_path, *lines))


def test_a_file_cut_off_inside_its_compression_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, *[hashes(i) for i in range(500)], zipped=True)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidTrace, match="damaged after line"):
        read_trace(path)
