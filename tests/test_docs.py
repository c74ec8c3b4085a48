"""The documentation agrees with the code: examples run, and every name is there."""

import argparse
import doctest
import re
from pathlib import Path

import pytest

import radixcache.errors
import runtime.errors
from runtime.cli.main import build_parser
from runtime.config import RuntimeConfig
from runtime.engine_stats import EngineStats
from runtime.metrics import ServerMetrics
from runtime.request import SamplingParams
from runtime.server.anthropic import MessagesRequest
from runtime.server.chat_bodies import ChatRequest
from runtime.server.config import ServerConfig
from runtime.server.openai import CompletionRequest
from runtime.server.session_bodies import (
    CreateRequest,
    GenerateRequest,
    HoldRequest,
    ScoreRequest,
    SessionAnswer,
)

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])


def read(name: str) -> str:
    """The text of a page below docs/."""
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_each_page_run(page: Path) -> None:
    failed, _ = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_holds_a_placeholder(page: Path) -> None:
    assert not re.search(r"\b[A-Z]+_TABLE\b|\bTODO\b|\bTBD\b|to be filled", page.read_text())


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """The commands of the command line, by name."""
    (choices,) = (a.choices for a in build_parser()._actions if isinstance(a.choices, dict))
    return choices


def test_every_command_and_flag_is_documented() -> None:
    text = read("commands.md")
    for name, parser in subcommands().items():
        assert f"`radixcache {name}" in text
        for action in parser._actions:
            for flag in action.option_strings:
                assert flag in ("-h", "--help") or f"`{flag}" in text, f"{name} {flag}"


def test_every_command_takes_json() -> None:
    for parser in subcommands().values():
        assert "--json" in parser._option_string_actions


@pytest.mark.parametrize("record", [RuntimeConfig, SamplingParams, ServerConfig])
def test_every_setting_is_documented(record: type) -> None:
    text = read("commands.md")
    for field in record.__struct_fields__:
        flag = f"--{field.replace('_', '-')}"
        assert f"`{field}`" in text or f"`{flag}`" in text, field


def test_every_field_of_the_api_is_documented() -> None:
    text = read("server.md")
    sessions = (CreateRequest, GenerateRequest, ScoreRequest, HoldRequest)
    for record in (ChatRequest, CompletionRequest, MessagesRequest, *sessions):
        for field in record.__struct_fields__:
            assert f"`{field}`" in text, field
    for field in SessionAnswer.__struct_fields__:
        assert f'"{field}": ' in text, field


def test_every_metric_is_documented(idle_stats: EngineStats) -> None:
    text = read("server.md")
    exposed = ServerMetrics(lambda: idle_stats).render().decode()
    names = set(re.findall(r"^# TYPE ([\w:]+)", exposed, re.MULTILINE))
    names = {name for name in names if not name.endswith("_created")}
    assert len(names) > 12
    for name in names:
        assert f"`{name.removesuffix('_total')}`" in text, name


@pytest.mark.parametrize("module", [radixcache.errors, runtime.errors])
def test_every_error_is_documented(module: object) -> None:
    text = read("commands.md") + read("server.md")
    errors = [v for v in vars(module).values() if isinstance(v, type)]
    assert errors
    for error in errors:
        assert f"`{error.__name__}`" in text, error.__name__


@pytest.fixture
def idle_stats() -> EngineStats:
    """The counters of an engine that did nothing yet."""
    from radixcache import CacheConfig, RadixCache

    return EngineStats(
        running=0,
        waiting=0,
        steps=0,
        failed_steps=0,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        preemptions=0,
        finished={},
        cache=RadixCache(CacheConfig(num_blocks=1)).stats(),
    )
