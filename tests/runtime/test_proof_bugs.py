"""What proves the cache right can fail: each step is left out once, and a test must see it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from radixcache import Namespace
from radixcache.seal import Seal, Seals
from runtime.errors import RuntimeFault
from runtime.kv.store import KVStore
from runtime.recheck import Recheck
from runtime.scheduler.admission import Admission
from runtime.sealed import SealedExecutor
from tests.core import test_seals as seals
from tests.runtime import test_kv_store as kv_store
from tests.runtime import test_recheck as recheck
from tests.runtime import test_recheck_bits as bits
from tests.runtime import test_sealed as sealed
from tests.runtime import test_staging as staging
from tests.support.planted import PlantedBug

Log = pytest.LogCaptureFixture


class Bug(NamedTuple):
    """What goes wrong, where, which text takes the place of which, and the test that fails then."""

    name: str
    where: tuple[Any, str]
    edit: tuple[str, str]
    test: Callable[[Log], object]


BUGS = (
    Bug(
        "a recheck compares its scratch blocks with themselves",
        (Recheck, "_compare"),
        ("first_difference(cached[first:], scratch,", "first_difference(scratch, scratch,"),
        lambda log: recheck.test_a_block_that_was_spoiled_is_found_told_and_found_no_more(
            1, 0, log
        ),
    ),
    Bug(
        "a recheck leaves out the last slot",
        (Recheck, "_compare"),
        ("end - first * size)\n", "end - first * size - 1)\n"),
        lambda log: recheck.test_a_block_that_was_spoiled_is_found_told_and_found_no_more(
            3, 3, log
        ),
    ),
    Bug(
        "a recheck writes where it should compare",
        (Recheck, "_compare"),
        ("cached[:first] + scratch", "cached"),
        lambda log: recheck.test_a_block_that_was_spoiled_is_found_told_and_found_no_more(
            1, 0, log
        ),
    ),
    Bug(
        "a recheck inside a block forgets what stands before it",
        (Recheck, "_compare"),
        ("if start % size else ()", "if start < 0 else ()"),
        lambda log: recheck.test_a_long_request_is_checked_in_short_steps_that_may_be_interrupted(
            64
        ),
    ),
    Bug(
        "a recheck keeps its hold",
        (Recheck, "_compare_next"),
        ("self._cache.end_hold(hold)", "pass"),
        lambda log: recheck.test_a_healthy_engine_is_found_so(),
    ),
    Bug(
        "a recheck keeps its scratch blocks",
        (Recheck, "_compare"),
        ("self._cache.release(lease)", "pass"),
        lambda log: recheck.test_a_healthy_engine_is_found_so(),
    ),
    Bug(
        "a recheck goes on where it was after its blocks were evicted",
        (Recheck, "advance"),
        ("check.num_evicted != self._num_evicted", "check.num_evicted < 0"),
        lambda log: (
            recheck.test_blocks_that_were_evicted_and_computed_anew_are_compared_from_the_begin()
        ),
    ),
    Bug(
        "a recheck of a token asks for another's noise",
        (importlib.import_module("runtime.recheck")._Check, "_slice"),
        ("draws_of(self.sequence, end)", "draws_of(self.sequence, end + 1)"),
        lambda log: bits.test_a_healthy_engine_is_found_so_with_all_it_drew(torch.float32, 16),
    ),
    Bug(
        "a wrong block is told, and its namespace goes on",
        (Recheck, "_judge"),
        ("self._quarantine(check, *outcome.block)", "pass"),
        lambda log: bits.test_a_mismatch_on_the_engines_thread_leaves_the_next_request_right(),
    ),
    Bug(
        "a wrong copy leaves the public prefix in use",
        (Recheck, "_quarantine"),
        ("shared > position", "shared < 0"),
        lambda log: (
            recheck.test_a_wrong_copy_of_the_public_prefix_takes_the_public_prefix_out_of_use()
        ),
    ),
    Bug(
        "what is about to be published counts in the epoch that its caller knows",
        (Admission, "_is_under_way"),
        ("other.lease.namespace == key.namespace", "other.lease.namespace == Namespace()"),
        lambda log: recheck.test_what_many_ask_for_after_a_quarantine_is_computed_once(),
    ),
    Bug(
        "numbers are compared instead of bits",
        (KVStore, "first_difference"),
        ("self.pool.view(_WORDS[self.pool.element_size()])", "self.pool"),
        lambda log: kv_store.test_bits_are_compared_and_not_numbers(),
    ),
    Bug(
        "keys are compared, and values are not",
        (KVStore, "first_difference"),
        (
            "words[:, :, a, :count] != words[:, :, b, :count]",
            "words[:, :1, a, :count] != words[:, :1, b, :count]",
        ),
        lambda log: bits.test_one_flipped_bit_is_found_and_nobody_reads_it_any_more(
            torch.float32, 2, 1, 4, 15, log
        ),
    ),
    Bug(
        "seals are kept, and never asked",
        (SealedExecutor, "_check"),
        ("self._seals.check_lease(lease)", "pass"),
        lambda log: (
            sealed.test_a_request_that_would_read_a_block_under_anothers_seal_ends_and_others_go_on()
        ),
    ),
    Bug(
        "a step is computed in parts whose copies were never made",
        (SealedExecutor, "execute"),
        ("if plan.copies:", "if not plan.slices:"),
        lambda log: sealed.test_a_step_that_owes_copies_ends_whole_as_none_was_made(),
    ),
    Bug(
        "a block is copied from under any seal",
        (Seals, "check_copy"),
        ("if found and", "if not found and"),
        lambda log: sealed.test_a_copy_from_another_position_or_namespace_is_refused(
            Seal(Namespace(salt="s"), 4, b"")
        ),
    ),
    Bug(
        "a block that was given up keeps its seal",
        (Seals, "removed"),
        ("del self._by_block[block_id]", "pass"),
        lambda log: seals.test_in_any_history_the_seals_hold(),
    ),
    Bug(
        "a seal covers the tokens of its own block alone",
        (seals, "seals_of"),
        ("digest.update(", "digest = blake2b(digest_size=DIGEST_BYTES)\n        digest.update("),
        lambda log: (
            seals.test_a_seal_says_whose_block_it_is_where_it_begins_and_what_comes_before()
        ),
    ),
    Bug(
        "a checksum is not looked at",
        (staging, "import_blocks"),
        ("if staged.checksums[place] != ", "if place < 0 and staged.checksums[place] != "),
        lambda log: staging.test_one_flipped_bit_is_refused_and_nothing_is_written(4, 7),
    ),
    Bug(
        "a checksum leaves out the seal",
        (importlib.import_module("runtime.kv.staging"), "_checksum"),
        (", crc32(label))", ")"),
        lambda log: staging.test_a_seal_that_was_changed_with_its_bytes_in_place_is_refused(),
    ),
    Bug(
        "a block comes back under any seal",
        (staging, "import_blocks"),
        ("if seal != want:", "if seal.start < 0:"),
        lambda log: staging.test_blocks_of_another_namespace_or_epoch_are_refused(
            Namespace(epoch=1)
        ),
    ),
    Bug(
        "a layout is not looked at",
        (staging, "import_blocks"),
        ("if staged.layout != layout:", "if staged.layout is None:"),
        lambda log: staging.test_blocks_of_another_layout_are_refused(
            staging.store_of(torch.float16), "dtype"
        ),
    ),
)
CAUGHT = (AssertionError, LookupError, ValueError, RuntimeFault, pytest.fail.Exception)
"""How a test fails, or what a broken part raises of itself."""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch, caplog: Log) -> None:
    PlantedBug(bug.name, bug.where, bug.edit, seen_by="").plant(monkeypatch)
    with pytest.raises(CAUGHT):
        bug.test(caplog)


def test_the_page_tells_of_every_bug() -> None:
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    for bug in BUGS:
        assert f"| {bug.name} |" in page, bug.name
