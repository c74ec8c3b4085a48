"""Compiling the kernels in C: once, kept by what decides the result, explained where it fails."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from kernels import choose_backend, native
from kernels.native import compiler
from runtime.config import RuntimeConfig
from runtime.errors import InvalidSetting
from runtime.loading import choose_device

CPU = torch.device("cpu")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], native.Build]:
    """A build of a small program, unchecked, in a folder of its own."""
    if not native.available():
        pytest.skip(native.build().reason)
    sources = tmp_path / "sources"
    sources.mkdir()
    names = "".join(f"long {name}(void) {{ return 0; }}\n" for name in native._SIGNATURES)
    (sources / "all.c").write_text(names)
    (sources / "more.c").write_text("long more(void) { return 1; }\n")
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setattr(compiler, "check_library", lambda *_: None)
    monkeypatch.setenv("RADIXCACHE_HOME", str(tmp_path / "home"))
    return partial(native._build, None)


def made(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "home" / "native").glob("[!.]*"))


def test_what_was_compiled_is_opened_again(
    compiled: Callable[[], native.Build], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled().library is not None
    [file] = made(tmp_path)
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
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
    found, reason, _ = compiled()
    assert found is None
    assert "failed: " in reason
    assert "error:" in reason
    assert made(tmp_path) == []


def test_a_missing_compiler_is_named(
    compiled: Callable[[], native.Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert compiled() == native.Build(
        None,
        "no C compiler 'no-such-compiler' is installed; install gcc 9 or newer, or set CC",
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
    monkeypatch.setattr(native, "_opened", [])
    with caplog.at_level(logging.WARNING, logger="radixcache.kernels"):
        reason = native.build().reason
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
    assert "kernels cannot be made or opened" in compiled().reason
    monkeypatch.setenv("CC", "'gcc")
    assert "can't be read" in compiled().reason


def test_progress_is_shown_file_by_file_and_then_nothing_is_logged(
    compiled: Callable[[], native.Build], caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[tuple[str, int, int | None]] = []
    with caplog.at_level(logging.WARNING, logger="radixcache.kernels"):
        native._build(lambda *news: shown.append(news))
    assert shown == [("compiling kernels", done, 2) for done in range(3)]
    assert not caplog.messages


def test_two_starts_at_once_compile_once(
    compiled: Callable[[], native.Build], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second finds the lock taken, waits, and opens what the first one made."""
    count = tmp_path / "count"
    slow = tmp_path / "slow-cc"
    slow.write_text(f'#!/bin/sh\necho run >> {count}\nsleep 0.3\nexec cc "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    program = (
        "import sys; from pathlib import Path; from kernels import native;"
        "from kernels.native import compiler; compiler.check_library = lambda *_: None;"
        "native.SOURCES = Path(sys.argv[1]); print(native._build(None).reason)"
    )
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(native.SOURCES)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for _ in range(2)
    ]
    assert [start.communicate()[0].strip() for start in starts] == ["", ""]
    assert len(count.read_text().split()) == 3, "two files and a link"
    assert len(made(tmp_path)) == 1


def test_a_killed_holder_leaves_no_lock(
    compiled: Callable[[], native.Build], tmp_path: Path
) -> None:
    folder = tmp_path / "home" / "native"
    folder.mkdir(parents=True)
    program = (
        "import fcntl, sys, time; lock = open(sys.argv[1], 'wb');"
        "fcntl.flock(lock, fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(folder / ".lock")], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(compiled)
        time.sleep(0.1)
        assert not waiting.done()
        holder.kill()
        assert waiting.result().library is not None
    holder.communicate()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("exit 1", "failed: "),
        ("kill -SEGV $$", "failed: "),
        ("exit 0", "kernels cannot be made or opened"),  # wrote nothing
    ],
)
def test_a_broken_compiler_is_a_reason_that_says_what_to_do(
    compiled: Callable[[], native.Build],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    reason: str,
) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text(f"#!/bin/sh\n{body}\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    found, told, _ = compiled()
    assert found is None
    assert reason in told
    assert made(tmp_path) == []


def test_kernels_that_compute_wrong_values_are_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a compiler that miscompiles would make them: a norm that adds where it should multiply."""
    if not native.available():
        pytest.skip(native.build().reason)
    sources = tmp_path / "sources"
    sources.mkdir()
    for file in (*native.SOURCES.glob("*.c"), *native.SOURCES.glob("*.h")):
        text = file.read_text()
        wrong = text.replace("rounded(dtype, value) * factor", "rounded(dtype, value) + factor")
        assert (wrong != text) == (file.name == "rows.c")
        (sources / file.name).write_text(wrong)
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setenv("RADIXCACHE_HOME", str(tmp_path / "home"))
    found, reason, _ = native._build(None)
    assert found is None
    assert "compute wrong values (a norm in torch.float32 is off by" in reason
    assert "or set CC" in reason
    assert made(tmp_path) == []


@pytest.mark.parametrize("name", ["x86-64-v9", "AVX2", "x86-64-v4-or-so"])
def test_an_instruction_set_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("RADIXCACHE_CPU", name)
    monkeypatch.setattr(native, "_opened", [])
    with pytest.raises(ValueError, match=f"RADIXCACHE_CPU is '{name}': this processor can run nat"):
        choose_backend(CPU)
    with pytest.raises(InvalidSetting, match="RADIXCACHE_CPU"):
        choose_device(RuntimeConfig(device="cpu"))


def test_a_target_whose_instructions_the_processor_lacks_is_not_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has = "flags : sse2 avx2 fma f16c bmi1 bmi2 abm movbe popcnt"
    monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")
    for features, names in (
        (has, ["native", "x86-64", "x86-64-v3"]),
        (has.replace(" movbe", ""), ["native", "x86-64"]),
        (f"{has} avx512f avx512bw avx512cd avx512dq", ["native", "x86-64", "x86-64-v3"]),
    ):
        monkeypatch.setattr(compiler, "cpu_features", lambda features=features: features)
        assert list(compiler.available_targets()) == names


def test_what_a_killed_start_left_is_removed_by_the_next_that_compiles(
    compiled: Callable[[], native.Build], tmp_path: Path
) -> None:
    left = tmp_path / "home" / "native" / "unfinished-x"
    left.mkdir(parents=True)
    (left / "linear.o").write_text("half")
    compiled()
    assert not left.exists()
