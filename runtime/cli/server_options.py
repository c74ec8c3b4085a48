"""Flags of `radixcache serve` that are about HTTP, and what they become.

Owns: names and help of the flags, the settings they make.  Does not know: the model's flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from radixcache.events import EventRecorder
from runtime.cli.options import parse_bytes, settings_of
from runtime.errors import InvalidSetting, RequestError
from runtime.loading import Runtime
from runtime.server.config import ServerConfig
from runtime.server.middleware import Tracer
from runtime.server.tenants import Tenants, load_tenants

if TYPE_CHECKING:
    from runtime.kv_events import KVEventPublisher

_SIZES = (
    ("max-body-bytes", "largest body of a request (default 8MiB)"),
    ("max-header-bytes", "largest request line with headers (default 64KiB)"),
)
_COUNTS = (
    ("max-connections", "connections open at once"),
    ("max-messages", "messages of a conversation"),
    ("max-tools", "tools that a request may offer"),
    ("max-json-depth", "arrays and objects that may lie in each other"),
    ("max-backlog", "pieces of a stream that may wait for a slow client"),
    ("max-tenant-labels", "tenants that metrics name, all others are one"),
    ("curve-samples", "blocks watched to tell what a larger cache would hit, 0: none"),
    ("max-sessions", "sessions open at once"),
    ("max-tenant-sessions", "sessions of one tenant open at once"),
)
_SECONDS = (
    ("header-timeout-s", "seconds until a request's headers must be whole"),
    ("body-timeout-s", "seconds until a body must be whole"),
    ("idle-timeout-s", "seconds that a connection may stay open between two requests"),
    ("write-timeout-s", "seconds that a client may leave its answer unread"),
    ("drain-s", "seconds that requests in flight may go on after a signal to stop"),
    (
        "slow-miss-s",
        "seconds to the first token from which on a miss is logged with its cause, 0: never",
    ),
    ("session-idle-s", "seconds after its last use at which a session ends"),
)
_Kind = tuple[tuple[tuple[str, str], ...], str, Callable[[str], float], str]
_NUMBERS: tuple[_Kind, ...] = (
    (_SIZES, "-bytes", parse_bytes, "SIZE"),
    (_COUNTS, "", int, "N"),
    (_SECONDS, "-s", float, "S"),
)
"""Settings by kind, the unit that their flags leave out, and how a value is read and shown."""

_KV_EVENTS_BUFFER = 10_000


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of keys, limits, logs and traces."""
    default = ServerConfig()
    flag = parser.add_argument
    flag("--api-keys", type=Path, metavar="FILE", help="tenants and their keys, as TOML")
    flag(
        "--public-prefix",
        type=Path,
        metavar="FILE",
        help="a system prompt whose K/V all tenants may share, computed at the start",
    )
    flag("--open-metrics", action="store_true", help="show /metrics to whoever asks")
    for names, unit, kind, metavar in _NUMBERS:
        for name, text in names:
            dest = name.replace("-", "_")
            value = getattr(default, dest)
            flag(
                f"--{name.removesuffix(unit)}",
                dest=dest,
                type=kind,
                default=value,
                metavar=metavar,
                help=text if kind is parse_bytes else f"{text} (default {value:g})",
            )
    flag(
        "--held-share",
        type=float,
        default=default.held_share,
        metavar="SHARE",
        help=f"of the pool that sessions may hold, from 0 to 1 (default {default.held_share:g})",
    )
    flag(
        "--show-text",
        action="store_true",
        help="let administrators read the text of all tenants on the tree's page",
    )
    flag(
        "--recheck-every",
        type=int,
        default=default.recheck_every,
        metavar="N",
        help="compute one in N finished requests again in idle time, and compare (0: none)",
    )
    _add_kv_events_flags(flag)
    _add_log_flags(flag)


def _add_log_flags(flag: Callable[..., object]) -> None:
    flag(
        "--trace-log",
        type=Path,
        metavar="FILE",
        help="append a line of block hashes for each request, to replay with radixcache simulate",
    )
    flag(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="of the least that is logged (default info)",
    )
    flag("--log-format", default="text", choices=("text", "json"), help="default text")
    flag(
        "--otel-endpoint",
        metavar="URL",
        help="send traces there, over OTLP/HTTP, such as http://localhost:4318/v1/traces",
    )


def _add_kv_events_flags(flag: Callable[..., object]) -> None:
    flag(
        "--kv-events-endpoint",
        metavar="URL",
        help="publish KV events there, over ZeroMQ as vLLM does, such as tcp://127.0.0.1:5557",
    )
    flag(
        "--kv-events-replay-endpoint",
        metavar="URL",
        help="where readers of KV events ask for what they missed",
    )
    flag("--kv-events-topic", default="", metavar="TEXT", help="of each message (none)")
    flag(
        "--kv-events-buffer",
        type=int,
        default=_KV_EVENTS_BUFFER,
        metavar="N",
        help="messages kept for replay, and for a reader that falls behind "
        f"(default {_KV_EVENTS_BUFFER})",
    )
    flag(
        "--kv-events-arrays",
        action="store_true",
        help="write events as arrays, for readers older than vLLM's map form",
    )


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Turn the flags into settings.  Raises InvalidSetting."""
    return settings_of(ServerConfig, args)


def tenants_of(args: argparse.Namespace, *, random_secret: bytes) -> Tenants | None:
    """Read the file of keys, if there is one; `load_tenants` says what for the secret is.

    Raises InvalidSetting.
    """
    if args.api_keys is None:
        return None
    return load_tenants(args.api_keys, random_secret=random_secret)


def tracer_of(args: argparse.Namespace, *, model: str) -> Tracer | None:
    """Return what traces go to, if anything.  Raises InvalidSetting without the extra `otel`."""
    if args.otel_endpoint is None:
        return None
    if not args.otel_endpoint.startswith(("http://", "https://")):
        raise InvalidSetting(
            "--otel-endpoint must be a URL such as http://localhost:4318/v1/traces"
        )
    try:
        from runtime.server.tracing import otlp_tracer
    except ImportError:
        raise InvalidSetting(
            "--otel-endpoint needs OpenTelemetry: pip install 'radixcache[otel]'"
        ) from None
    return otlp_tracer(args.otel_endpoint, model=model)


def trace_stream_of(args: argparse.Namespace) -> IO[bytes] | None:
    """Open the file that lines of hashes are appended to, if any.  Raises InvalidSetting."""
    if args.trace_log is None:
        return None
    try:
        stream: IO[bytes] = args.trace_log.open("ab")
    except OSError as error:
        raise InvalidSetting(f"--trace-log {args.trace_log}: {error.strerror}") from None
    return stream


def kv_events_of(args: argparse.Namespace) -> KVEventPublisher | None:
    """Return what publishes KV events, if anything; its recorder must listen to the cache.

    Raises InvalidSetting without the extra `events`, or for endpoints that are none; PortTaken.
    """
    if args.kv_events_endpoint is None:
        if args.kv_events_replay_endpoint is not None:
            raise InvalidSetting("--kv-events-replay-endpoint needs --kv-events-endpoint")
        return None
    try:
        from runtime.kv_events import KVEventPublisher
    except ImportError:
        raise InvalidSetting(
            "--kv-events-endpoint needs ZeroMQ: pip install 'radixcache[events]'"
        ) from None
    return KVEventPublisher(
        EventRecorder(as_arrays=args.kv_events_arrays),
        endpoint=args.kv_events_endpoint,
        replay_endpoint=args.kv_events_replay_endpoint,
        topic=args.kv_events_topic,
        buffer=args.kv_events_buffer,
    )


def public_prefix_of(args: argparse.Namespace) -> str | None:
    """Read the system prompt that all tenants may share, if there is one.

    Raises InvalidSetting for a file that can't be read.
    """
    if args.public_prefix is None:
        return None
    try:
        text: str = args.public_prefix.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidSetting(f"--public-prefix {args.public_prefix}: {why}") from None
    return text


def shared_tokens(public_prefix: str | None, runtime: Runtime) -> list[int]:
    """Return the token ids that all tenants may share; none without a public prefix.

    Raises InvalidSetting where the model takes no system prompt, or there is no room for this one.
    """
    if public_prefix is None:
        return []
    try:
        tokens = runtime.system_tokens(public_prefix)
    except RequestError as error:
        raise InvalidSetting(f"--public-prefix: {error}") from None
    most = runtime.engine.config.max_len // 2
    if len(tokens) > most:
        raise InvalidSetting(
            f"--public-prefix has {len(tokens)} tokens: at most half of max_len, {most}, so that "
            "requests fit beside it"
        )
    return tokens
