"""`radixcache bench`: what it plays, and that a profile's parts are the whole."""

from __future__ import annotations

import cProfile
import json
from pathlib import Path

import pytest

from runtime.cli.main import main
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.loading import Runtime, load_runtime
from runtime.step_profile import step_parts
from runtime.timing import Player
from tests.support.tiny_checkpoints import write_tiny_gguf


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The path of a tiny model."""
    return str(write_tiny_gguf(tmp_path / "tiny.gguf"))


def loaded(model: str) -> Runtime:
    return load_runtime(RuntimeConfig(model=model, num_blocks=64, exact="off"))


def test_it_tells_first_tokens_and_decode_of_each_batch(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", model, "--num-blocks", "64", "--context", "20", "--batches", "1,3"]
    assert main(["bench", *flags, "--runs", "2", "--steps", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cold"]["computed_tokens"] == 80
    assert (report["warm"]["cached_tokens"], report["warm"]["computed_tokens"]) == (20, 60)
    assert [row["batch"] for row in report["decode"]] == [1, 3]
    assert report["profiles"] == []


def test_a_profile_names_each_operation_of_the_model(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", model, "--num-blocks", "64", "--context", "20", "--batches", "2"]
    assert main(["bench", *flags, "--runs", "1", "--steps", "2", "--profile"]) == 0
    table = capsys.readouterr().out
    for name in ("scheduling", "batch building", "linear, layers", "rms_norm", "sampling"):
        assert name in table
    assert "decode 2" in table


def test_the_parts_of_a_profile_add_up_to_its_steps(model: str) -> None:
    profile = cProfile.Profile()
    Player(loaded(model).engine, steps=3, profile=profile).decode(2, 20)
    parts = {part.name: part for part in step_parts(profile, count=3)}
    whole = next(
        entry.totaltime
        for entry in profile.getstats()
        if entry.code is Engine.step.__code__  # type: ignore[comparison-overlap]
    )
    assert sum(part.us for part in parts.values()) == pytest.approx(whole * 1e6 / 3)
    assert parts["scheduling"].calls == 1
    assert all(part.us > 0 for part in parts.values())


def test_a_player_leaves_nothing_behind(model: str) -> None:
    engine = loaded(model).engine
    player = Player(engine, runs=2, steps=2)
    player.first_token(20, 20)
    player.decode(3, 20)
    assert not engine.has_work
    assert engine.cache.stats().num_leases == 0
    engine.check()


def test_all_of_a_batch_decode_in_each_step_that_is_timed(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RuntimeConfig(
        model=model, num_blocks=64, exact="off", max_step_tokens=9, max_running=8
    )
    engine = load_runtime(config).engine  # a prompt takes more steps than are timed
    counts: list[int] = []
    timed = Player._timed_step

    def counted(player: Player) -> float:
        counts.append(len(engine.scheduler.running))
        return timed(player)

    monkeypatch.setattr(Player, "_timed_step", counted)
    Player(engine, runs=1, steps=2).decode(4, 40)
    assert counts == [4, 4]
    assert not engine.has_work


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context", "0"], "at least 1"),
        (["--batches", "65"], "max_running"),
        (["--batches", "9", "--context", "100"], "K/V memory"),
        (["--context", "300"], "--context"),
    ],
)
def test_what_can_not_be_timed_is_refused(
    model: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--model", model, "--num-blocks", "64", *flags]) == 2
    assert message in capsys.readouterr().err
