"""Planted bugs: the oracles catch what they are there to catch.

The state machine must fail within its bounded histories once a bug is planted.  Without one it
passes the same histories: that is the state machine's own test.
"""

from __future__ import annotations

import importlib
import io
from contextlib import redirect_stdout

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from radixcache import CacheError
from tests.core.conftest import new_cache
from tests.core.test_state_machine import EYES, CacheMachine
from tests.core.test_state_machine_keeping import KeepingMachine
from tests.support.histories import BOUNDED, STRESS
from tests.support.planted import PLANTED_BUGS, PlantedBug
from tests.support.planted_keeping import KEEPING_BUGS

ALL_BUGS = (*PLANTED_BUGS, *KEEPING_BUGS)
CLAIMS = [
    pytest.param(bug, eye, id=f"{eye}: {bug.name}")
    for bug in ALL_BUGS
    for eye in bug.seen_by.split()
]
IDS = [bug.name.replace(" ", "_") for bug in ALL_BUGS]
CAUGHT = (AssertionError, CacheError, LookupError, TypeError, ValueError)
"""How a broken cache shows: an eye complains, or a call fails of itself."""


def run_machine(bug: PlantedBug, eyes: frozenset[str], bounds: settings) -> None:
    kind: type[CacheMachine] = CacheMachine
    if bug in KEEPING_BUGS:
        kind, bounds = KeepingMachine, settings(bounds, max_examples=2 * bounds.max_examples)
    machine = type("WatchedMachine", (kind,), {"eyes": eyes})
    no_shrinking = settings(bounds, phases=[Phase.generate], print_blob=False)
    with redirect_stdout(io.StringIO()):
        run_state_machine_as_test(machine, settings=no_shrinking)


@pytest.mark.parametrize("bug", ALL_BUGS, ids=IDS)
def test_a_planted_bug_is_caught(bug: PlantedBug, monkeypatch):
    bug.plant(monkeypatch)
    with pytest.raises(CAUGHT):
        hunt(bug)


def hunt(bug: PlantedBug) -> None:
    """Run the machine, or the named test where the machine is too unlikely to get there."""
    if not bug.test:
        return run_machine(bug, EYES, BOUNDED)
    module, _, function = bug.test.partition(":")
    return getattr(importlib.import_module(module), function)(new_cache())


@pytest.mark.parametrize("bug", [bug for bug in ALL_BUGS if bug.test], ids=lambda bug: bug.test)
def test_a_named_test_passes_without_its_bug(bug: PlantedBug):
    hunt(bug)


@pytest.mark.parametrize(("bug", "eye"), CLAIMS if STRESS else [])
def test_each_eye_that_is_said_to_see_a_bug_sees_it_alone(bug: PlantedBug, eye, monkeypatch):
    bug.plant(monkeypatch)
    with pytest.raises(CAUGHT):
        run_machine(bug, frozenset({eye}), settings(BOUNDED, max_examples=2000))


def test_no_bug_is_seen_by_nobody():
    for bug in ALL_BUGS:
        assert set(bug.seen_by.split()) <= EYES
        assert bool(bug.seen_by) != bool(bug.test)
