"""Which backend runs, and the package's own face."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import kernels
from kernels import choose_backend, native, store_kv

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIXCACHE_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_the_device_decides_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend(CUDA) == "triton"
    monkeypatch.setattr(native, "available", lambda: True)
    assert choose_backend(CPU) == "native"
    monkeypatch.setattr(native, "available", lambda: False)
    assert choose_backend(CPU) == "torch"


def test_the_environment_outweighs_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXCACHE_KERNELS", "torch")
    assert choose_backend(CUDA) == "torch"


def test_the_argument_outweighs_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXCACHE_KERNELS", "triton")
    assert choose_backend(CPU, "torch") == "torch"


def test_an_empty_variable_is_no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXCACHE_KERNELS", "")
    monkeypatch.setattr(native, "available", lambda: False)
    assert choose_backend(CPU) == "torch"


def test_an_unknown_name_is_refused_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"^backend is 'cuda'; choose one of torch, native, triton"
    ):
        choose_backend(CPU, "cuda")
    monkeypatch.setenv("RADIXCACHE_KERNELS", "jax")
    with pytest.raises(ValueError, match=r"^RADIXCACHE_KERNELS is 'jax'"):
        choose_backend(CPU)


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        choose_backend(CPU, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend(CPU, "triton") == "triton"


def test_native_kernels_are_for_cpus_and_say_why_they_are_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RuntimeError, match="the native backend runs on a CPU, not on cuda"):
        choose_backend(CUDA, "native")
    monkeypatch.setattr(native, "build", lambda: native.Build(None, "no C compiler 'cc'"))
    with pytest.raises(
        RuntimeError, match=r"^the native kernels are not there: no C compiler 'cc'"
    ):
        choose_backend(CPU, "native")


def test_an_operation_passes_the_wish_on() -> None:
    k, v = torch.zeros(2, 0, 1, 4)
    k_pool, v_pool = torch.zeros(2, 1, 1, 1, 4)
    with pytest.raises(ValueError, match="backend is 'numpy'"):
        store_kv(k, v, k_pool, v_pool, torch.zeros(0, dtype=torch.int64), backend="numpy")


def test_all_is_complete_and_documented() -> None:
    names = kernels.__all__
    for name in names:
        assert hasattr(kernels, name)
    public = {
        name
        for name, value in vars(kernels).items()
        if inspect.isfunction(value) or inspect.isclass(value)
    }
    assert public <= set(names)
    for name in public:
        assert inspect.getdoc(getattr(kernels, name)), f"{name} has no docstring"


def test_the_marker_tells_our_package_from_others() -> None:
    assert kernels.DISTRIBUTION == "radixcache"


def test_importing_the_package_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import kernels"
    subprocess.run([sys.executable, "-c", code], check=True)
