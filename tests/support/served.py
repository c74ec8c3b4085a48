"""A real server in this process, over HTTP, with the real model or a stand-in that is quick.

Owns: starting and stopping it, and checking at the end that nothing leaked.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import uvicorn

from radixcache import CacheConfig, RadixCache
from radixcache.observer import TreeObserver
from radixcache.policy import POLICIES
from radixcache.tokens import TOKEN_BYTES, pack_tokens, unpack_tokens
from runtime.async_engine import Outlet
from runtime.config import EngineConfig, RuntimeConfig
from runtime.engine import Engine
from runtime.grammar import Constrainer
from runtime.loading import Memory, Runtime
from runtime.plan import Difference, Slice, StepPlan, StepResult, TokenLogprobs
from runtime.server.app import create_app
from runtime.server.config import ServerConfig
from runtime.server.connection import uvicorn_settings
from runtime.server.middleware import Tracer
from runtime.server.tenants import Tenants
from runtime.tokenizer.replies import ReplyMemory
from tests.support.smollm2 import open_smollm2

NAME = RuntimeConfig().model
JSON = {"Content-Type": "application/json"}
"""Headers of a body that the client does not write as JSON by itself."""


class HashExecutor:
    """Chooses tokens by a hash; may be told to be slow, or to fail.

    step_s     seconds that a step takes
    fail_next  the next step raises this
    fail_on    a step with a slice for which this says so raises, whoever else is in it
    difference what blocks that are compared differ in
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.step_s = 0.0
        self.fail_next: BaseException | None = None
        self.fail_on: Callable[[Slice], bool] = lambda piece: False
        self.difference: Difference | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Return a printable token for each draw, and log-probabilities where they are wanted."""
        if self.step_s:
            time.sleep(self.step_s)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        if any(map(self.fail_on, plan.slices)):
            raise RuntimeError("the kernel was told to fail")
        drawn = [
            (_next_token(piece, self.vocab_size, draw.allowed), draw)
            for piece in plan.slices
            for draw in piece.draws
        ]
        return StepResult(
            step=plan.step,
            token_ids=tuple(token for token, _ in drawn),
            logprobs=tuple(
                None if draw.num_logprobs is None else _logprobs(token, draw.num_logprobs)
                for token, draw in drawn
            ),
            target_logprobs=tuple(
                _logprobs(token, piece.num_logprobs)
                for piece in plan.slices
                for token in unpack_tokens(piece.targets)
            ),
        )

    def first_difference(
        self, ours: Sequence[int], theirs: Sequence[int], num_tokens: int
    ) -> Difference | None:
        """Return what it was told."""
        return self.difference


def _next_token(piece: Slice, vocab_size: int, allowed: bytes) -> int:
    """Depends on the last token and its position, so not on how the prompt was cut."""
    end = piece.start + len(piece.tokens) // TOKEN_BYTES
    number = crc32(piece.tokens[-TOKEN_BYTES:], end)
    if allowed:
        bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")
        ids = np.flatnonzero(bits[:vocab_size])
        return int(ids[number % len(ids)])
    return 1000 + number % (vocab_size - 1000)


def _logprobs(token: int, num_top: int) -> TokenLogprobs:
    """Depends on the token alone; the likeliest are always the same."""
    top = tuple(range(1000, 1000 + num_top))
    return TokenLogprobs(-1.0 - crc32(pack_tokens([token])) % 1000 / 100, top, (-0.5,) * num_top)


def quick_runtime(
    *,
    num_blocks: int = 64,
    max_waiting: int = 64,
    max_running: int = 8,
    eviction_policy: str = "lru",
    max_ghosts: int = 0,
    enable_prefix_cache: bool = True,
    observers: Sequence[TreeObserver] = (),
) -> Runtime:
    """The real tokenizer and template over an engine without a model; 16 tokens a block."""
    checkpoint = open_smollm2()
    tokenizer = checkpoint.tokenizer()
    executor = HashExecutor(tokenizer.vocab_size)
    engine = Engine(
        RadixCache(
            CacheConfig(
                num_blocks=num_blocks,
                max_ghosts=max_ghosts,
                enable_prefix_cache=enable_prefix_cache,
            ),
            policy=POLICIES[eviction_policy](),
            clock=time.monotonic,
            observers=observers,
        ),
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
        constrainer=Constrainer(tokenizer),
    )


@contextmanager
def serving(
    runtime: Runtime,
    *,
    drain_s: float = 5.0,
    settings: ServerConfig | None = None,
    tenants: Tenants | None = None,
    tracer: Tracer | None = None,
    send_buffer: int | None = None,
    public_prefix: Sequence[int] = (),
    outlets: Sequence[Outlet] = (),
) -> Iterator[str]:
    """Serve on a free port of this machine; yields the base URL; checks for leaks at the end.

    send_buffer  bytes that the system holds for a client that doesn't read; None: its own choice
    """
    settings = settings or ServerConfig(drain_s=drain_s)
    app = create_app(
        runtime,
        settings,
        tenants=tenants,
        tracer=tracer,
        public_prefix=public_prefix,
        outlets=outlets,
    )
    config = uvicorn_settings(app, settings, log_level="error", lifespan="on")
    # Named, or asyncio would not know that it is TCP, and not turn off Nagle.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if send_buffer is not None:  # what is accepted inherits it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), name="http")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
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
