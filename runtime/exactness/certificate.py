"""What a verification found, where and of what, as a record and as text.

Owns: the fields, what identifies a machine and a model, the wording.  Does not know: how it was
found out.
Idea: a promise holds for one model, dtype, device, thread count and set of libraries, so all of
them stand beside the result; by the digest of the bits two machines can be compared.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from kernels import choose_backend, native
from runtime.exactness.promise import Exactness
from runtime.exactness.trial import Outcome
from runtime.models.config import ModelConfig
from runtime.models.llama import LlamaModel

_PACKAGES = ("radixcache", "torch", "triton", "numpy")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Whatever the bits of a result may depend on beside the model.

    device        "cpu", or the GPU's name
    instructions  what the kernels in C were compiled for; else the widest that torch uses here
    num_threads   of the CPU kernels
    backend       of the kernels: torch or triton
    versions      of Python and of packages, by name
    """

    device: str
    cpu: str
    instructions: str
    num_threads: int
    backend: str
    system: str
    versions: dict[str, str]


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `radixcache verify`.

    exact           True where no bit differed, and the cache was seen to work
    products        which backend multiplies, and how the weights are stored
    weights_sha256  of all weights in the dtype that they are computed in
    bits_sha256     of K/V and logits that the first scenario's prompts have alone
    check           of the model's operations, as at every start
    found           why it is not exact, "" where it is
    """

    exact: bool
    model: str
    shape: ModelConfig
    dtype: str
    products: str
    weights_sha256: str
    bits_sha256: str
    machine: Machine
    seed: int
    date: str
    seconds: float
    check: Exactness
    outcomes: list[Outcome]
    found: str = ""

    def total(self, field: str) -> int:
        """Add up a count over all scenarios."""
        return sum(getattr(outcome, field) for outcome in self.outcomes)

    def text(self) -> str:
        """Return the certificate as lines for people."""
        machine, shape = self.machine, self.shape
        versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
        counts = {name: self.total(name) for name in _COUNTED}
        return "\n".join(
            (
                f"result        {'EXACT' if self.exact else 'NOT EXACT'}"
                + (f": {self.found}" if self.found else ""),
                f"model         {self.model} ({shape.num_layers} layers, {shape.num_heads} query "
                f"heads on {shape.num_kv_heads} of {shape.head_dim}), {self.dtype}",
                f"products      {self.products}",
                f"weights       sha256 {self.weights_sha256}",
                f"bits          sha256 {self.bits_sha256}",
                f"machine       {machine.device} · {machine.cpu}, {machine.instructions} · "
                f"{machine.num_threads} threads · {machine.backend} kernels",
                f"software      {versions}, {machine.system}",
                f"operations    {self.check}",
                f"scenarios     {len(self.outcomes)} of them: {counts['sequences']:,} sequences "
                "equal to themselves alone" * self.exact,
                f"compared      {counts['kv_tokens']:,} tokens' K/V in every layer, "
                f"{counts['logit_rows']:,} rows of {shape.vocab_size:,} logits",
                f"of these      {counts['cached_tokens']:,} prompt tokens from the cache, "
                f"{counts['preemptions']:,} preemptions, {counts['forks']:,} forks, "
                f"{counts['evicted_blocks']:,} evicted blocks",
                f"date          {self.date}, {self.seconds:.0f} s, seed {self.seed}",
            )
        )


_COUNTED = (
    "sequences",
    "kv_tokens",
    "logit_rows",
    "cached_tokens",
    "preemptions",
    "forks",
    "evicted_blocks",
)


def machine_of(device: torch.device) -> Machine:
    """Describe this machine, as seen from here."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # triton is not on every platform
            continue
    is_gpu, backend = device.type == "cuda", choose_backend(device)
    return Machine(
        device=torch.cuda.get_device_name(device) if is_gpu else device.type,
        cpu=_cpu_name(),
        instructions=native.target()
        if backend == "native"
        else torch.backends.cpu.get_cpu_capability(),
        num_threads=torch.get_num_threads(),
        backend=backend,
        system=f"{platform.system()} {platform.machine()}",
        versions=versions,
    )


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in reversed(lines))
    facts = {key.strip(): value.strip() for key, _, value in pairs}  # of the first core
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [facts[key] for key in ("cpu family", "model", "stepping") if key in facts]
    return f"{name} ({'/'.join(numbers)})" if numbers else name


def weights_sha256(model: LlamaModel) -> str:
    """Return the digest of a model's weights, whatever file they came from; a second a gigabyte."""
    return sha256_of(model.tensors())


def sha256_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return the digest of tensors' bytes, one after another."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
