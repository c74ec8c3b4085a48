"""With `debug_seals`, no step reads a block under another's seal."""

from __future__ import annotations

import pytest

from radixcache import Namespace, PrefixKey, Seal, Seals
from runtime.config import RuntimeConfig
from runtime.errors import InvalidSetting
from runtime.executor.executor import ModelExecutor
from runtime.loading import load_runtime
from runtime.sealed import SealedExecutor
from tests.support.engine_bench import EngineBench
from tests.support.tiny_checkpoints import write_tiny_folder

PROMPT = list(range(1, 12))


def test_a_request_that_would_read_a_block_under_anothers_seal_ends_and_others_go_on():
    bench = EngineBench(num_blocks=32, block_size=2)
    bench.submit("a", PROMPT, max_tokens=2)
    bench.run()
    block = bench.cache.match(PrefixKey.of(PROMPT)).block_ids[2]
    bench.seals._by_block[block] = Seal(Namespace(salt="s"), 4, b"")
    bench.submit("reader", PROMPT, max_tokens=2)
    bench.submit("other", [50, *PROMPT], max_tokens=2)
    bench.run()
    error = bench.news["reader"][-1].error
    assert error is not None
    assert error.startswith("BrokenSeal: ")
    assert f"block {block} " in error
    assert bench.output("other") == bench.expected("other").tokens


def test_a_step_that_owes_copies_ends_whole_as_none_was_made():
    bench = EngineBench(num_blocks=32, block_size=4)
    other = [50, *PROMPT]
    for name, prompt in (("a", PROMPT), ("b", other)):
        bench.submit(name, prompt, max_tokens=2)
    bench.run()
    block = bench.cache.match(PrefixKey.of(PROMPT)).block_ids[0]
    bench.seals._by_block[block] = Seal(Namespace(salt="s"), 0, b"")
    bench.submit("reader", PROMPT, max_tokens=2)
    bench.submit("copier", [*other[:6], 51, 52], max_tokens=2)  # half of a block of b's
    bench.run()
    for name in ("reader", "copier"):
        assert "BrokenSeal: Lease" in str(bench.news[name][-1].error)
    bench.submit("again", [*other[:6], 51, 52], max_tokens=2)
    bench.run()
    assert bench.output("again") == bench.expected("again").tokens


@pytest.mark.parametrize("seal", [Seal(Namespace(salt="s"), 4, b""), Seal(Namespace(), 0, b"")])
def test_a_copy_from_another_position_or_namespace_is_refused(seal):
    bench = EngineBench(num_blocks=32, block_size=4)
    bench.submit("a", PROMPT, max_tokens=2)
    bench.run()
    block = bench.cache.match(PrefixKey.of(PROMPT)).block_ids[1]
    bench.seals._by_block[block] = seal
    bench.submit("b", [*PROMPT[:6], 50, 51], max_tokens=2)
    bench.run()
    assert f"copies from block {block} to position 4" in str(bench.news["b"][-1].error)


def test_the_setting_puts_seals_before_the_model(tmp_path):
    model = str(write_tiny_folder(tmp_path / "tiny"))
    runtime = load_runtime(RuntimeConfig(model=model, num_blocks=8, max_len=16, debug_seals=True))
    assert isinstance(runtime.engine._executor, SealedExecutor)
    assert any(isinstance(one, Seals) for one in runtime.engine.cache.room.observers)
    assert isinstance(runtime.executor, ModelExecutor)
    with pytest.raises(InvalidSetting, match="debug_seals must be True or False"):
        RuntimeConfig(debug_seals="yes")
