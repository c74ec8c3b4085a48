"""A verification passes where the cache is invisible, and finds where it is not."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import copy_blocks, linear
from radixcache import CacheConfig
from radixcache.tokens import pack_tokens
from runtime.cli.main import main
from runtime.decoding import sampler
from runtime.errors import EngineFailure
from runtime.exactness.certificate import Certificate
from runtime.exactness.promise import Exactness
from runtime.exactness.recompute import first_difference, kept, recompute
from runtime.exactness.scenarios import Scenario, quick, thorough
from runtime.exactness.trial import Laboratory
from runtime.exactness.verify import verify
from runtime.kv.store import KVStore
from runtime.models import llama
from runtime.models.llama import LlamaModel
from tests.support.planted_arithmetic import one_by_one, plant_attention
from tests.support.tiny_checkpoints import write_tiny_gguf
from tests.support.tiny_models import random_weights, tiny_config

CPU = torch.device("cpu")
CHECKED = Exactness(holds=True)
# One that hits, copies inside blocks, has company and forks; what it finds, the quick list finds.
BUSY = Scenario(chunk=64, companions=3, branches=2)


def tiny_model(dtype: torch.dtype = torch.float32) -> LlamaModel:
    config = tiny_config(num_layers=3)
    return LlamaModel(config, random_weights(config).items(), dtype=dtype, device=CPU)


def verified(model: LlamaModel, *scenarios: Scenario, check: Exactness = CHECKED) -> Certificate:
    return verify(model, name="tiny", check=check, scenarios=scenarios or (BUSY,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_quick_scenarios_find_no_difference_and_prove_it_by_counts(dtype: torch.dtype) -> None:
    certificate = verified(tiny_model(dtype), *quick())
    assert (certificate.exact, certificate.found) == (True, "")
    assert len(certificate.outcomes) == len(quick())
    for count in ("cached_tokens", "preemptions", "forks", "evicted_blocks", "logit_rows"):
        assert certificate.total(count) > 0
    text = certificate.text()
    assert text.startswith("result        EXACT\n")
    for word in (f"torch {torch.__version__}", "1 threads", certificate.weights_sha256):
        assert word in text


def test_the_thorough_scenarios_hold_every_block_size_chunk_and_company_and_those_of_quick() -> (
    None
):
    scenarios = thorough()
    assert scenarios[: len(quick())] == quick()
    seen = {(s.block_size, s.chunk, s.companions) for s in scenarios if s.cached}
    assert len(seen) >= 3 * 5 * 4
    assert {s.chunk for s in scenarios if not s.cached} == {0, 1, 7, 64, 512}


def test_the_digests_tell_models_apart_and_are_the_same_again() -> None:
    first, again = (verified(tiny_model()) for _ in range(2))
    assert first.weights_sha256 == again.weights_sha256
    assert first.bits_sha256 == again.bits_sha256
    other = verified(tiny_model(torch.bfloat16))
    assert other.weights_sha256 != first.weights_sha256
    assert other.bits_sha256 != first.bits_sha256


# Faults, planted.


def relative_tiles(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    table: Any,
    lens: Any,
    starts: Any,
    *,
    out: Any,
    **options: Any,
) -> Any:
    """Attend in tiles of 32 keys that begin at each chunk's first query, not at position 0."""
    group = q.shape[1] // k_pool.shape[2]
    for sequence, length in enumerate(lens.tolist()):
        rows = slice(int(starts[sequence]), int(starts[sequence + 1]))
        count = rows.stop - rows.start
        blocks = table[sequence, : -(-length // k_pool.shape[1])].long()
        k, v = (
            pool[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1).float()
            for pool in (k_pool, v_pool)
        )
        scores = torch.einsum("thd,shd->hts", q[rows].float(), k) * options["scale"]
        hidden = torch.arange(length) > torch.arange(length - count, length)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        total = torch.zeros(count, *q.shape[1:])
        edges = sorted({0, *range((length - count) % 32, length, 32), length})
        for begin, end in pairwise(edges):
            total += torch.einsum("hts,shd->thd", weights[:, :, begin:end], v[begin:end])
        out[rows] = total.to(q.dtype)
    return out


def test_attention_in_tiles_relative_to_the_chunk_is_found_behind_layer_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant_attention(monkeypatch, relative_tiles)
    certificate = verified(tiny_model())
    assert not certificate.exact
    found = certificate.outcomes[-1].difference
    assert found is not None
    assert (found.part, found.layer) == ("K", 1)
    assert "K of layer 1 at position" in certificate.text()


@pytest.mark.parametrize("layer", [0, 2])
def test_a_product_that_depends_on_the_batch_is_found_in_its_own_layer(
    monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    model = tiny_model()
    broken = model.layer_weights[4 * layer][0]

    def product(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **layout: Any) -> torch.Tensor:
        result = linear(x, weight, *rest, **layout)
        return result * (1 + 1e-6 * len(x)) if weight is broken else result

    one_by_one(monkeypatch)
    monkeypatch.setattr(llama, "linear", product)
    certificate = verified(model)
    found = certificate.outcomes[-1].difference
    assert found is not None
    assert found.layer == layer


def test_a_head_that_depends_on_the_batch_is_found_in_the_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()

    def product(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **layout: Any) -> torch.Tensor:
        result = linear(x, weight, *rest, **layout)
        return result * (1 + 1e-6 * len(x)) if weight is model.head_weight else result

    one_by_one(monkeypatch)
    monkeypatch.setattr(llama, "linear", product)
    found = verified(model).outcomes[-1].difference
    assert found is not None
    assert (found.part, found.layer) == ("logits", None)


def test_a_copy_that_misses_a_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def short_copy(k: Any, v: Any, src: Any, dst: Any, num_slots: Any) -> None:
        copy_blocks(k, v, src, dst, num_slots - 1)

    monkeypatch.setattr("runtime.kv.store.copy_blocks", short_copy)
    certificate = verified(tiny_model())
    assert not certificate.exact
    assert "layer 0" in certificate.found


def test_noise_that_depends_on_the_row_of_the_batch_is_found_in_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, rows = sampler._noise, iter(range(10**6))
    monkeypatch.setattr(sampler, "_noise", lambda draw, size: real(draw, size).roll(next(rows)))
    found = verified(tiny_model()).outcomes[-1].difference
    assert found is not None
    assert found.part == "token"


def test_a_model_whose_operations_failed_at_the_start_is_not_certified() -> None:
    certificate = verified(tiny_model(), check=Exactness(holds=False, faults=("norm",)))
    assert not certificate.exact
    assert "depend on their batch" in certificate.found


def test_a_run_without_a_hit_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "runtime.exactness.trial.CacheConfig",
        lambda enable_prefix_cache, **sizes: CacheConfig(enable_prefix_cache=False, **sizes),
    )
    certificate = verified(tiny_model())
    assert certificate.found == "nothing is proven: no hit of the cache occurred"


# The parts.


def test_recomputed_blocks_are_those_of_the_pool_until_one_bit_changes() -> None:
    model = tiny_model()
    tokens = pack_tokens([3 * i % 61 for i in range(40)])
    right, hidden = recompute(model, tokens)
    assert hidden.shape == (40, model.config.hidden_size)
    store = KVStore(model.config, num_blocks=12, block_size=4, dtype=torch.float32, device=CPU)
    table = [11, 3, 5, 0, 1, 2, 4, 6, 7, 8]
    store.pool[:, :, torch.tensor(table)] = right.unflatten(2, (10, 4))
    assert first_difference(kept(store, table, 40), right) is None
    store.pool[2, 1, 5, 1, 0, 3] += 1e-6
    found = first_difference(kept(store, table, 40), right)
    assert str(found) == "V of layer 2 at position 9"
    assert first_difference(kept(store, table, 9), right[:, :, :9]) is None


def test_a_step_that_fails_ends_the_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no such instruction")

    plant_attention(monkeypatch, fail)
    with pytest.raises(EngineFailure, match="no such instruction"):
        Laboratory(tiny_model()).run(BUSY)


# The command.


def test_the_command_prints_a_certificate_and_ends_with_1_where_a_bit_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("runtime.cli.verify.quick", lambda: [BUSY])
    flags = ["verify", "--model", str(path), "--num-threads", "1", "--dtype", "float32"]
    assert main(flags) == 0
    captured = capsys.readouterr()
    assert "result        EXACT" in captured.out
    assert f"same bits  {BUSY}" in captured.err
    plant_attention(monkeypatch, relative_tiles)
    assert main([*flags, "--json"]) == 1
    certificate = json.loads(capsys.readouterr().out)
    assert certificate["exact"] is False
    assert certificate["machine"]["num_threads"] == 1
    assert certificate["outcomes"][-1]["difference"]["layer"] == 1
