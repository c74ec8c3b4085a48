"""The state machine under each policy whose order the reference knows."""

from __future__ import annotations

from tests.core.test_state_machine import CacheMachine
from tests.support.histories import BOUNDED, LONG, STRESS


def machine_of(policy: str) -> type[CacheMachine]:
    """The same machine under another policy."""
    return type(f"{policy.upper()}Machine", (CacheMachine,), {"policy": policy})


class TestAnyHistoryUnderLFU(machine_of("lfu").TestCase):
    settings = LONG if STRESS else BOUNDED


class TestAnyHistoryUnderSLRU(machine_of("slru").TestCase):
    settings = LONG if STRESS else BOUNDED


class TestAnyHistoryUnderMRU(machine_of("mru").TestCase):
    settings = LONG if STRESS else BOUNDED


class TestAnyHistoryUnderCostAware(machine_of("cost").TestCase):
    settings = LONG if STRESS else BOUNDED
