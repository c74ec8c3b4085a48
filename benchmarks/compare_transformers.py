"""Our logits against Hugging Face transformers, on the same dequantised weights, in float32.

Three steps, since transformers lives in an environment of its own:

    .venv/bin/python -m benchmarks.compare_transformers export    /tmp/smollm2-f32
    other/bin/python -m benchmarks.compare_transformers reference /tmp/smollm2-f32
    .venv/bin/python -m benchmarks.compare_transformers compare   /tmp/smollm2-f32 [--store FILE]

`export` writes the model as a Hugging Face folder, and the token ids of three real texts;
`reference` adds transformers' logits of every position; `compare` prints the largest difference
and, with --store, keeps a sample of the reference for the tests.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

TEXTS = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. However little known the feelings or views of such a man may be on "
    "his first entering a neighbourhood, this truth is so well fixed in the minds of the "
    "surrounding families, that he is considered as the rightful property of some one or other of "
    "their daughters.",
    "def binary_search(items, wanted):\n    low, high = 0, len(items)\n    while low < high:\n"
    "        middle = (low + high) // 2\n        if items[middle] < wanted:\n"
    "            low = middle + 1\n        else:\n            high = middle\n    return low\n",
    "In 1969, Apollo 11 carried 3 people 384,400 km to the Moon; 2 of them walked on it for "
    "2 hours and 31 minutes. Der Flug dauerte 8 Tage, und über 600 Millionen Menschen sahen zu.",
)


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("export", "reference", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--store", type=Path, help="keep a sample of the reference here")
    args = parser.parse_args()
    if args.step == "export":
        export(args.folder)
    elif args.step == "reference":
        reference(args.folder)
    else:
        compare(args.folder, args.store)


def export(folder: Path) -> None:
    """Write the model as a folder, in float32, and the texts' token ids."""
    from benchmarks.peers.model import write_folder
    from runtime.config import DEFAULT_MODEL
    from runtime.weights.gguf import GgufCheckpoint
    from runtime.weights.pull import pull

    checkpoint = GgufCheckpoint(pull(DEFAULT_MODEL))
    write_folder(folder, checkpoint)
    tokenizer = checkpoint.tokenizer()
    (folder / "ids.json").write_text(json.dumps([tokenizer.encode(text) for text in TEXTS]))


def reference(folder: Path) -> None:
    """Compute transformers' logits; nothing of ours is imported."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = json.loads((folder / "ids.json").read_text())
    with torch.inference_mode():
        logits = [model(torch.tensor([row])).logits[0] for row in ids]
    torch.save(logits, folder / "logits.pt")


def compare(folder: Path, store: Path | None) -> None:
    """Print the largest difference of any logit at any position of each text."""
    from runtime.config import DEFAULT_MODEL
    from runtime.executor.batch import build_batch
    from runtime.llm import LLM
    from runtime.plan import Slice

    executor = LLM(DEFAULT_MODEL, dtype="float32").runtime.executor
    ids = json.loads((folder / "ids.json").read_text())
    expected = torch.load(folder / "logits.pt")
    block_size = executor.store.block_size
    samples = []
    for row, theirs in zip(ids, expected, strict=True):
        num_blocks = -(-len(row) // block_size)
        whole = Slice(
            request_id="text",
            start=0,
            tokens=torch.tensor(row, dtype=torch.int32).numpy().tobytes(),
            block_table=torch.arange(num_blocks, dtype=torch.int32).numpy().tobytes(),
            draws=(),
        )
        with torch.inference_mode():
            batch = build_batch([whole], block_size=block_size, device=torch.device("cpu"))
            ours = executor.model.logits(executor.model.forward(batch, executor.store))
        worst = (ours - theirs).abs().max().item()
        same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
        print(f"{len(row)} tokens: largest difference {worst:.2e}, same likeliest token {same:.1%}")
        samples.append(_sample(row, theirs))
    if store is not None:
        store.write_text(json.dumps(samples) + "\n")


def _sample(ids: list[int], logits: torch.Tensor) -> dict[str, object]:
    """The reference at every eighth position: the likeliest tokens, and some of all the others."""
    positions = list(range(7, len(ids), 8))
    spread = torch.arange(0, logits.shape[-1], 1009)
    rows = []
    for position in positions:
        tokens = torch.cat((logits[position].topk(8).indices, spread)).unique()
        values = [round(value, 5) for value in logits[position, tokens].tolist()]
        rows.append({"position": position, "tokens": tokens.tolist(), "logits": values})
    return {"ids": ids, "rows": rows}


if __name__ == "__main__":
    main()
