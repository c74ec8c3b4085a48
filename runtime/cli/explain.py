"""`radixcache explain`: why a prompt misses, asked of a server or worked out from files."""

from __future__ import annotations

import argparse
import json

import msgspec

from radixcache.lease import PrefixKey
from runtime.cli.asking import KEY_VARIABLE, Server
from runtime.cli.options import check_counts
from runtime.cli.replaying import add_replay_flags, read_requests, read_text, renderer_of
from runtime.doctor.log import LoggedRequest, Said, request_of
from runtime.doctor.replay import Encoder, cache_of, serve
from runtime.errors import InvalidLog, InvalidRequest, NoAnswer
from runtime.misses.finding import find_miss, tell_miss
from runtime.misses.records import MissReport


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("explain", help="say why a prompt misses the cache")
    flag = parser.add_argument
    flag("body", nargs="?", default="-", help="file with a request's JSON body (standard input)")
    flag("--text", action="store_true", help="the file is the prompt itself, as text")
    flag("--url", help="ask this server, such as http://127.0.0.1:8000; it computes nothing")
    flag("--api-key", metavar="KEY", help=f"of that server (default: ${KEY_VARIABLE})")
    flag("--anthropic", action="store_true", help="the body is in Anthropic's words")
    flag(
        "--after",
        action="append",
        default=[],
        metavar="FILE",
        help="without a server: a body or a log of bodies that was sent before; repeatable",
    )
    add_replay_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain one prompt, and print it in words or as JSON."""
    if bool(args.url) == bool(args.after):
        raise InvalidRequest("say where to look: --url for a server, or --after for files")
    check_counts("--block-size", args.block_size)
    text = read_text(args.body)
    report = _asked(args, text) if args.url else _worked_out(args, text)
    print(msgspec.json.encode(report).decode() if args.json else shown(report))
    return 0


def shown(report: MissReport) -> str:
    """Return a report for a terminal: in words, then both texts below each other."""
    lines = [report.summary]
    if report.prompt is not None:
        there = "the cache ends" if report.cached is None else repr(report.cached.text)
        lines += [
            "",
            f"  shared  …{report.shared!r}",
            f"  prompt  {report.prompt.text!r}",
            f"  cached  {there}",
        ]
    return "\n".join(lines)


def _asked(args: argparse.Namespace, text: str) -> MissReport:
    """Ask a running server.  Raises InvalidRequest for what it refuses, NoAnswer."""
    body = msgspec.json.encode({"prompt": text}) if args.text else text.encode()
    path = "/cache/explain/messages" if args.anthropic else "/cache/explain"
    answer = Server(args.url, args.api_key).read(path, body)
    try:
        return msgspec.json.decode(answer, type=MissReport)
    except msgspec.DecodeError as error:
        raise NoAnswer(f"no explanation from {args.url}: {error}; what runs there?") from None


def _worked_out(args: argparse.Namespace, text: str) -> MissReport:
    """Replay what was sent before through a cache that evicts nothing, and ask that."""
    earlier = [request for name in args.after for request in read_requests(name)]
    renderer = renderer_of(args)
    encoder = Encoder(renderer)
    encoded = [encoder.encode(request) for request in earlier]
    asked = _request(args, text)
    prompt = encoder.encode(asked)
    num_tokens = sum(e.num_tokens + len(e.reply) for e in [*encoded, prompt])
    cache = cache_of(2 + len(encoded) + num_tokens // args.block_size, args.block_size)
    for request in encoded:
        serve(cache, request)
    found = find_miss(
        cache, PrefixKey(prompt.namespace, prompt.prompt), now=0.0, may_see=lambda namespace: True
    )
    return tell_miss(found, renderer, renderer.spoken(asked))


def _request(args: argparse.Namespace, text: str) -> LoggedRequest:
    if args.text:
        return LoggedRequest(line=1, said=(Said("", text),))
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidLog(f"{args.body} is not JSON: {error}; --text takes it as it is") from None
    if not isinstance(body, dict):
        raise InvalidLog(f"{args.body} holds no body: a JSON object is expected")
    return request_of(body)
