"""A public system prompt: cached for every tenant's first request, and nothing else is."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import openai
import pytest

from runtime.cli.server_options import public_prefix_of, shared_tokens
from runtime.errors import InvalidSetting
from runtime.server.tenants import Tenant, Tenants
from tests.support.served import NAME, quick_runtime, serving

SYSTEM = "You answer every question about our products kindly, briefly and in whole sentences. " * 4
KEYS = ("sk-acme-1234", "sk-globex-12")


def tenants() -> Tenants:
    names = zip(("acme", "globex"), KEYS, strict=True)
    return Tenants({name: Tenant(keys=(key,)) for name, key in names}, secret=b"0123456789abcdef")


def ask(url: str, key: str, *, system: str, question: str = "What is it?") -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        return client.chat.completions.create(
            model=NAME,
            messages=[
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ],
            max_tokens=3,
        )


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def test_every_tenants_first_request_finds_the_public_prefix_and_nothing_more() -> None:
    runtime = quick_runtime()
    tokens = runtime.system_tokens(SYSTEM)
    whole = len(tokens) // 16 * 16
    assert whole > 48
    with serving(runtime, tenants=tenants(), public_prefix=tokens) as url:
        for key in KEYS:  # the second one must not find what the first one asked
            assert cached(ask(url, key, system=SYSTEM)) == whole
        assert cached(ask(url, KEYS[0], system=SYSTEM)) > whole
        assert cached(ask(url, KEYS[1], system="Another prompt altogether. " * 12)) <= 16


def test_the_public_prefix_survives_a_pool_full_of_other_prompts() -> None:
    runtime = quick_runtime(num_blocks=24)
    tokens = runtime.system_tokens(SYSTEM)
    with serving(runtime, tenants=tenants(), public_prefix=tokens) as url:
        for count in range(8):
            ask(url, KEYS[0], system=f"{count} " * 60)
        assert runtime.engine.cache.stats().evicted_blocks
        assert cached(ask(url, KEYS[1], system=SYSTEM)) == len(tokens) // 16 * 16


@pytest.mark.parametrize(
    ("content", "word"),
    [(None, "No such file"), (b"\xff\xfe", "utf-8"), (b"long " * 900, "tokens")],
    ids=["missing", "not text", "too long"],
)
def test_a_prefix_that_can_not_be_served_is_refused_at_the_start(
    tmp_path: Path, content: bytes | None, word: str
) -> None:
    file = tmp_path / "system.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidSetting, match=word):
        shared_tokens(public_prefix_of(argparse.Namespace(public_prefix=file)), quick_runtime())


def test_a_byte_order_mark_is_no_part_of_the_public_prefix(tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_bytes(b"\xef\xbb\xbf" + SYSTEM.encode())
    assert public_prefix_of(argparse.Namespace(public_prefix=file)) == SYSTEM
