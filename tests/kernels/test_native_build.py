"""Compiling the kernels in C: once, kept by what decides the result, explained where it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels import native


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], native.Build]:
    """A build of a small program, in a folder of its own, that forgets what came before."""
    if not native.available():
        pytest.skip(native.build().reason)
    sources = tmp_path / "sources"
    sources.mkdir()
    names = "".join(f"long {name}(void) {{ return 0; }}\n" for name in native._SIGNATURES)
    (sources / "all.c").write_text(names)
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setenv("RADIXCACHE_HOME", str(tmp_path / "home"))
    return native.build.__wrapped__


def made(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "home" / "native").iterdir())


def test_what_was_compiled_is_opened_again(
    compiled: Callable[[], native.Build], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled().library is not None
    [file] = made(tmp_path)
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiled().library is not None
    assert made(tmp_path) == [file], "nothing is left of the compiling"


def test_other_sources_are_another_file(
    compiled: Callable[[], native.Build], tmp_path: Path
) -> None:
    compiled()
    (native.SOURCES / "vector.h").write_text("/* changed */")
    compiled()
    assert len(made(tmp_path)) == 2


def test_a_program_that_does_not_compile_is_refused_with_the_compilers_words(
    compiled: Callable[[], native.Build], tmp_path: Path
) -> None:
    (native.SOURCES / "all.c").write_text("int f( {")
    found, reason = compiled()
    assert found is None
    assert "failed: " in reason
    assert "error:" in reason
    assert made(tmp_path) == []


def test_a_missing_compiler_is_named(
    compiled: Callable[[], native.Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert compiled() == (
        None,
        "no C compiler 'no-such-compiler' is installed; install gcc, or set CC",
    )


@pytest.mark.parametrize("damage", ["no library", "its tail is gone", "a byte is another"])
def test_a_damaged_file_is_compiled_anew(
    compiled: Callable[[], native.Build], tmp_path: Path, damage: str
) -> None:
    """The loader looks at little: without its tail a library ended the process by a bus error."""
    compiled()
    [file] = made(tmp_path)
    whole = file.read_bytes()
    other = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    file.unlink()  # it is mapped: what is mapped must not change
    file.write_bytes(
        {"no library": b"not a library", "its tail is gone": whole[:4096]}.get(damage, other)
    )
    assert compiled().library is not None
    assert [found.read_bytes() for found in made(tmp_path)] == [whole]


def test_builds_at_once_each_end_with_a_whole_library(
    compiled: Callable[[], native.Build], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as threads:
        builds = [threads.submit(compiled) for _ in range(4)]
        assert all(each.result().library is not None for each in builds)
    assert all(file.suffix == ".so" for file in made(tmp_path)), "nothing is left unfinished"


def test_only_who_compiles_says_so(
    compiled: Callable[[], native.Build], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="radixcache.kernels"):
        compiled()
        compiled()
    assert caplog.messages == ["compiling kernels for this processor: some seconds, once a machine"]


def test_that_torch_computes_is_said_with_the_reason(
    compiled: Callable[[], native.Build],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING, logger="radixcache.kernels"):
        reason = compiled().reason
    assert caplog.messages == [f"torch computes, slower than kernels in C would: {reason}"]


def test_a_folder_that_cannot_be_made_is_a_reason_and_no_crash(
    compiled: Callable[[], native.Build], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RADIXCACHE_HOME", str(tmp_path / "file"))
    assert "kernels cannot be made or opened in" in compiled().reason


def test_what_cannot_be_read_or_is_not_what_was_to_be_compiled_is_a_reason(
    compiled: Callable[[], native.Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    (native.SOURCES / "all.c").write_text("long other(void) { return 0; }")
    assert "kernels cannot be made or opened in" in compiled().reason
    monkeypatch.setenv("CC", "'gcc")
    assert "can't be read" in compiled().reason
