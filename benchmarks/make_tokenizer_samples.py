"""Make tests/runtime/samples/tokenizer.json: texts, and the ids that llama.cpp gives them.

Owns: asking llama.cpp.  Does not know: our tokenizer, the texts.
Idea: the reference runs once, here; the tests compare with its answers and need nothing installed.

Needs llama.cpp as the PyPI package `xllamacpp` (made with 2026.10.11549) and `gguf`, in an
environment of its own:

    pip install xllamacpp gguf
    python benchmarks/make_tokenizer_samples.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import unicodedata
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from tokenizer_texts import texts

OUTPUT = Path(__file__).parents[1] / "tests" / "runtime" / "samples" / "tokenizer.json"
# Other ways to split, tried on the same vocabulary.
OTHER_PRES = ("gpt-2", "default", "llama-bpe", "qwen2")


class LlamaCpp:
    """One model in a llama.cpp server of this process."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 64
        params.n_parallel = 1
        params.warmup = False
        params.cpuparams.n_threads = 1
        params.hostnames = ["127.0.0.1"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            params.port = probe.getsockname()[1]
        self._server = xllamacpp.Server(params)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the ids of a text, without a bos."""
        asked = {"content": text, "add_special": False, "parse_special": parse_special}
        return self._post("/tokenize", asked)["tokens"]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; control tokens show as their text."""
        return self._post("/detokenize", {"tokens": ids})["content"]

    def _post(self, path: str, asked: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._server.listening_address + path,
            data=json.dumps(asked).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())


def with_other_pre(source: Path, target: Path, pre: str) -> Path:
    """Write a tiny model with the vocabulary of `source` that says it is split by `pre`."""
    fields = gguf.GGUFReader(source).fields
    writer = gguf.GGUFWriter(target, "llama")
    for key, number in (
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
        ("attention.head_count", 1),
        ("attention.head_count_kv", 1),
        ("rope.dimension_count", 32),
    ):
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    for name in ("tokens", "token_type", "merges"):
        key = f"tokenizer.ggml.{name}"
        writer.add_array(key, fields[key].contents())
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    vocab_size = len(fields["tokenizer.ggml.tokens"].data)
    shapes = {"token_embd": (vocab_size, 32), "output_norm": (32,)}
    for name in ("attn_norm", "ffn_norm"):
        shapes[f"blk.0.{name}"] = (32,)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (32, 32)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def cuts(ids: list[int]) -> Iterator[list[int]]:
    """Yield pieces of ids, as a stream that is cut anywhere would hold them."""
    for size in (1, 2, 3):
        for start in range(0, min(len(ids), 12), size):
            yield ids[start : start + size]


def main() -> None:
    """Ask llama.cpp about every text, every way, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="the GGUF file of SmolLM2-135M-Instruct")
    model: Path = parser.parse_args().model
    server = LlamaCpp(model)
    samples: list[dict[str, Any]] = []
    for text in dict.fromkeys(texts()):
        sample: dict[str, Any] = {"text": text, "ids": server.encode(text, parse_special=False)}
        decoded = server.decode(sample["ids"])
        if decoded != text:  # the vocabulary lacks some bytes
            sample["decoded"] = decoded
        special = server.encode(text, parse_special=True)
        if special != sample["ids"]:
            sample["special_ids"] = special
        samples.append(sample)
    pieces = {tuple(cut) for sample in samples for cut in cuts(sample["ids"])}
    cut = [{"ids": list(ids), "text": server.decode(list(ids))} for ids in sorted(pieces)]
    # A piece that is whole is decoded by every sample; keep those cut within a character.
    cut = [entry for entry in cut if "\ufffd" in entry["text"]]
    with tempfile.TemporaryDirectory() as folder:
        for pre in OTHER_PRES:
            other = LlamaCpp(with_other_pre(model, Path(folder) / f"{pre}.gguf", pre))
            for sample in samples[::2]:
                if pre == "qwen2" and not unicodedata.is_normalized("NFC", sample["text"]):
                    continue  # the model's own tokenizer composes characters; llama.cpp does not
                sample[pre] = other.encode(sample["text"], parse_special=False)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(_one_a_line({"samples": samples, "cut": cut}), "utf-8")


def _one_a_line(found: dict[str, list[dict[str, Any]]]) -> str:
    """Write JSON with one entry a line, in ASCII, so that a change shows as a line."""
    parts = []
    for key, entries in found.items():
        lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        parts.append(f"{json.dumps(key)}:[\n{lines}\n]")
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    main()
