"""`radixcache serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import uvicorn
from starlette.applications import Starlette

from runtime.async_engine import AsyncEngine
from runtime.cli.options import add_model_flags, runtime_config, shown_progress
from runtime.cli.server_options import (
    add_server_flags,
    kv_events_of,
    public_prefix_of,
    server_config,
    shared_tokens,
    tenants_of,
    trace_stream_of,
    tracer_of,
)
from runtime.errors import InvalidSetting, PortTaken, RuntimeFault
from runtime.loading import Runtime, load_runtime
from runtime.server.app import create_app
from runtime.server.connection import uvicorn_settings
from runtime.server.logs import set_up_logs
from runtime.server.tenants import Tenants

_log = logging.getLogger("radixcache")
_QUEUE_LEN = 2048  # connections that the system keeps until they are taken in

if TYPE_CHECKING:
    from runtime.kv_events import KVEventPublisher


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("serve", help="serve the model over HTTP, as OpenAI does")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to serve on (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port (default 8000)")
    add_server_flags(parser)
    add_model_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Take the port, load the model, and serve until interrupted."""
    config, settings = runtime_config(args), server_config(args)
    hang_ups: list[int] = []  # while the model loads; heeded once the server serves
    if args.api_keys is not None:
        signal.signal(signal.SIGHUP, lambda number, frame: hang_ups.append(number))
    read_keys = partial(tenants_of, args, random_secret=secrets.token_bytes(32))
    tenants, public_prefix = read_keys(), public_prefix_of(args)
    with ExitStack() as cleanup:
        # First: loading takes longer than failing here.
        trace_stream = trace_stream_of(args)
        if trace_stream is not None:
            cleanup.enter_context(trace_stream)
        listener = cleanup.enter_context(_bind(args.host, args.port))
        tracer = tracer_of(args, model=config.model)
        if tracer is not None:
            cleanup.callback(tracer.close)
        events = kv_events_of(args)
        if events is not None:
            cleanup.callback(events.close)
        set_up_logs(args.log_format, args.log_level)  # loading may have something to say
        with shown_progress(quiet=args.json or args.log_format == "json") as progress:
            observers = () if events is None else (events.recorder,)
            runtime = load_runtime(config, progress=progress, observers=observers)
        app = create_app(
            runtime,
            settings,
            tenants=tenants,
            tracer=tracer,
            public_prefix=shared_tokens(public_prefix, runtime),
            trace_stream=trace_stream,
            outlets=() if events is None else (events,),
        )
        listener.listen()  # or who connects at once when it is announced would be refused
        _announce(args, runtime, listener, events)
        # What is alive now stays: the collector need not look at it again, 0.1 s each time.
        gc.collect()
        gc.freeze()
        http = uvicorn_settings(app, settings, log_level=args.log_level, log_config=None)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like an interrupt
        with suppress(KeyboardInterrupt):  # raised again once everything has stopped in order
            server = Server(http, app, read_keys=read_keys, drain_s=settings.drain_s)
            server.hang_ups = hang_ups
            server.run([listener])
    return 0


class Server(uvicorn.Server):
    """Ends what is in flight within the drain time; reads the keys anew when it is hung up.

    hang_ups  those that came before it listens to them itself
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: Starlette,
        *,
        read_keys: Callable[[], Tenants | None],
        drain_s: float,
    ) -> None:
        super().__init__(config)
        self._engine: AsyncEngine = app.state.engine
        self._follow_keys: Callable[[Tenants], Awaitable[None]] | None
        self._follow_keys = app.state.follow_keys
        self.hang_ups: list[int] = []
        self._read_keys = read_keys
        self._reading: set[asyncio.Task[None]] = set()
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and listen to SIGHUP where there are keys."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_QUEUE_LEN)  # uvicorn's is as long as what it takes in at once
        if self._follow_keys is not None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self._hung_up)
            if self.hang_ups:
                self._hung_up()

    def _hung_up(self) -> None:
        task = asyncio.ensure_future(self.read_keys_anew())
        self._reading.add(task)  # or nobody would keep it alive
        task.add_done_callback(self._reading.discard)

    async def read_keys_anew(self) -> None:
        """Read the keys and let them count; where that fails, log it and keep the old ones."""
        try:
            newer = self._read_keys()
            assert newer is not None
            assert self._follow_keys is not None
            await self._follow_keys(newer)
        except RuntimeFault as error:
            _log.error("the API keys stay as they were: %s", error)
        else:
            _log.info("the API keys were read again, of %d tenants", len(newer.names))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; told so again, end what is in flight now."""
        if self.should_exit:
            self._engine.hurry()
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the engine while connections close."""
        draining = asyncio.ensure_future(
            asyncio.to_thread(self._engine.stop, drain_s=self._drain_s)
        )
        await super().shutdown(sockets)
        await draining


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise InvalidSetting(f"port is {port}: choose one from 1 to 65535, or 0 for any free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PortTaken(f"can't serve on host {host!r}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"can't be had ({error.strerror})"
        raise PortTaken(f"port {port} on {host} {why}: choose another with --port") from None
    return listener


def _announce(
    args: argparse.Namespace,
    runtime: Runtime,
    listener: socket.socket,
    events: KVEventPublisher | None,
) -> None:
    """Say where the server is: on standard output for programs, else where its log goes."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    memory = runtime.memory
    if args.json:
        ready = {
            "url": url,
            "model": runtime.name,
            "memory": memory,
            "exact": runtime.exactness.holds,
            "kv_events": None if events is None else events.endpoint,
            "kv_events_replay": None if events is None else events.replay_endpoint,
        }
        print(msgspec.json.encode(ready).decode(), flush=True)
        return
    published = "" if events is None else f" · KV events on {events.endpoint}"
    text = (
        f"{runtime.name} on {url}/v1 · K/V for {memory.num_tokens:,} tokens in "
        f"{memory.num_blocks:,} blocks of {memory.block_size} ({memory.dtype}) · exactness "
        f"{runtime.exactness}{published}"
    )
    if args.log_format == "json":
        _log.info(text)
    else:
        print(text, file=sys.stderr, flush=True)
