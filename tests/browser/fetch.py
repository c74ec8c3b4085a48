"""`python -m tests.browser.fetch`: bring a headless Chromium from the npm registry, once.

Owns: the package's address and digest, and unpacking it.  Does not know: who uses the browser.
Idea: the package `@sparticuz/chromium` holds a whole headless browser for Linux on x86-64 in one
file, so that no installer runs and nothing is installed.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

import brotli

from tests.browser.chromium import VERSION, fetched_browser

REGISTRY = "https://registry.npmjs.org"
PACKAGE = f"@sparticuz/chromium/-/chromium-{VERSION}.tgz"
SHA256 = "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b"
TIMEOUT_S = 60.0


def fetch(target: Path) -> None:
    """Download, check and unpack the browser to `target`; about 70 MB come, 200 MB are kept.

    Raises SystemExit with words where what came is not what was asked for, or doesn't start.
    """
    with urllib.request.urlopen(f"{REGISTRY}/{PACKAGE}", timeout=TIMEOUT_S) as answer:
        package = answer.read()
    if (digest := hashlib.sha256(package).hexdigest()) != SHA256:
        raise SystemExit(f"{PACKAGE} has the digest {digest}, not {SHA256}: don't use it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(package)) as files:
        part = target.with_suffix(".part")
        part.write_bytes(_unpacked(files, "chromium"))
        part.chmod(0o755)
        if not _starts(
            part
        ):  # a slim system has not all that it needs: the package brings that too
            with tarfile.open(fileobj=io.BytesIO(_unpacked(files, "al2023.tar"))) as libraries:
                libraries.extractall(target.parent, filter="data")
            if not _starts(part, target.parent / "lib"):
                raise SystemExit(
                    "the browser does not start here: name another by RADIXCACHE_BROWSER"
                )
        part.replace(target)  # last, so that a part of it is never taken for the whole


def _unpacked(files: tarfile.TarFile, name: str) -> bytes:
    found = files.extractfile(f"package/bin/{name}.br")
    assert found is not None
    whole: bytes = brotli.decompress(found.read())
    return whole


def _starts(executable: Path, libraries: Path | None = None) -> bool:
    added = {} if libraries is None else {"LD_LIBRARY_PATH": str(libraries)}
    command = [str(executable), "--headless", "--no-sandbox", "--version"]
    return subprocess.run(command, env=os.environ | added, capture_output=True).returncode == 0


if __name__ == "__main__":
    browser = fetched_browser()
    if not browser.exists():
        print(f"fetching {PACKAGE}", file=sys.stderr)
        fetch(browser)
    print(browser)
