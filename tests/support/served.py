"""A real server in this process, over HTTP, with the real model or a stand-in that is quick.

Owns: starting and stopping it, and checking at the end that nothing leaked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import uvicorn

from radixcache import CacheConfig, RadixCache
from radixcache.tokens import TOKEN_BYTES
from runtime.config import EngineConfig, RuntimeConfig
from runtime.engine import Engine
from runtime.loading import Memory, Runtime
from runtime.plan import Slice, StepPlan, StepResult
from runtime.server.app import create_app
from runtime.server.config import ServerConfig
from runtime.tokenizer.replies import ReplyMemory
from tests.support.smollm2 import open_smollm2

NAME = RuntimeConfig().model


class HashExecutor:
    """Chooses tokens by a hash; may be told to be slow, or to fail.

    step_s     seconds that a step takes
    fail_next  the next step raises this
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.step_s = 0.0
        self.fail_next: Exception | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Return a printable token for each draw."""
        if self.step_s:
            time.sleep(self.step_s)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        drawn = [piece for piece in plan.slices if piece.draws]
        ids = (_next_token(piece, self.vocab_size) for piece in drawn)
        return StepResult(step=plan.step, token_ids=tuple(ids))


def _next_token(piece: Slice, vocab_size: int) -> int:
    """Depends on the last token and its position, so not on how the prompt was cut."""
    end = piece.start + len(piece.tokens) // TOKEN_BYTES
    return 1000 + crc32(piece.tokens[-TOKEN_BYTES:], end) % (vocab_size - 1000)


def quick_runtime(*, num_blocks: int = 64, max_waiting: int = 64, max_running: int = 8) -> Runtime:
    """The real tokenizer and template over an engine without a model; 16 tokens a block."""
    checkpoint = open_smollm2()
    tokenizer = checkpoint.tokenizer()
    executor = HashExecutor(tokenizer.vocab_size)
    engine = Engine(
        RadixCache(CacheConfig(num_blocks=num_blocks)),
        EngineConfig(max_len=num_blocks * 16, max_waiting=max_waiting, max_running=max_running),
        executor,
        tokenizer=tokenizer,
        eos_ids=tokenizer.eos_ids,
        vocab_size=tokenizer.vocab_size,
        draw_seed=lambda: 0,
    )
    return Runtime(
        name=NAME,
        model_config=checkpoint.config,
        memory=Memory(
            dtype="none",
            bytes_per_token=0,
            bytes_per_block=0,
            num_blocks=num_blocks,
            block_size=16,
            num_tokens=num_blocks * 16,
        ),
        executor=executor,
        engine=engine,
        tokenizer=tokenizer,
        chat_template=checkpoint.chat_template(),
        replies=ReplyMemory(),
    )


@contextmanager
def serving(runtime: Runtime, *, drain_s: float = 5.0) -> Iterator[str]:
    """Serve on a free port of this machine; yields the base URL; checks for leaks at the end."""
    config = uvicorn.Config(
        create_app(runtime, ServerConfig(drain_s=drain_s)), port=0, log_level="error", lifespan="on"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="http")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
    assert_nothing_held(runtime)


def assert_nothing_held(runtime: Runtime) -> None:
    """Every block is free or evictable, and every invariant holds."""
    runtime.engine.check()
    stats = runtime.engine.stats()
    assert (stats.running, stats.waiting, stats.cache.num_leases) == (0, 0, 0)
    assert stats.cache.num_private == stats.cache.num_pinned == 0


def wait_until_idle(runtime: Runtime, *, limit_s: float = 30.0) -> None:
    """Wait until the engine has nothing to do, then check that nothing is held."""
    for _ in range(int(limit_s / 0.02)):
        if not runtime.engine.has_work:
            break
        time.sleep(0.02)
    time.sleep(0.05)  # the engine's thread may still be counting
    assert_nothing_held(runtime)
