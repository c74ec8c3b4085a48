"""Models of the Hugging Face hub.

Owns: the optional package that speaks to it.  Does not know: what a model's files hold.
"""

from __future__ import annotations

from pathlib import Path

from runtime.errors import DownloadError, ModelFileError
from runtime.weights.pull import Progress


def pull_from_hub(name: str, *, progress: Progress | None = None) -> Path:
    """Return the local folder of a Hugging Face hub repository, fetching what is missing.

    Errors: ModelFileError where the optional `huggingface_hub` is not installed; DownloadError.
    """
    try:
        import huggingface_hub  # optional, and slow to import
    except ImportError as error:
        raise ModelFileError(
            f"{name!r} is no file or folder here, and to fetch it from the Hugging Face hub run "
            "pip install 'radixcache[hub]'"
        ) from error
    if progress is not None:
        progress("download", 0, None)
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]
        )
    except Exception as error:  # the library raises its own, the HTTP client's and the system's
        raise DownloadError(
            f"{name!r} is no file or folder here, and could not be fetched from the Hugging Face "
            f"hub: {error}; check the name, the network, and that you may read it (hf auth login)"
        ) from error
    return Path(folder)
