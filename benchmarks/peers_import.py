"""Import SGLang's caches without the rest of SGLang.

Owns: what stands in for packages that are imported on the way and never used.  No
module of SGLang's own is replaced but its two package files, which register models and patch
others: what runs is SGLang's code.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
import warnings
from typing import Any


class _AnyType(type):
    """The class of stand-ins: any attribute, item or union of one is a stand-in again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):
            return args[0]  # used as a decorator
        return super().__call__()

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


def _stand_in(name: str) -> Any:
    body = {
        "__init_subclass__": classmethod(lambda cls, **kwargs: None),
        "__getattr__": lambda self, name: _AnyType.__getattr__(type(self), name),
        "__call__": lambda self, *args, **kwargs: args[0] if args else None,
    }
    return _AnyType(name, (), body)


class _StandInModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # a package, so that submodules are asked for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _stand_in(name))
        return getattr(self, name)


NEVER_USED = frozenset(
    (
        *("IPython", "PIL", "compressed_tensors", "cuda", "fastapi", "flashinfer"),
        *("huggingface_hub", "mistral_common", "openai", "pydantic", "pydantic_core"),
        *("pynvml", "safetensors", "sentencepiece", "sgl_kernel", "starlette"),
        *("torch_memory_saver", "torchcodec", "torchvision", "transformers", "tvm_ffi"),
        *("uvloop", "xgrammar", "zmq"),
    )
)
"""Packages that SGLang imports on the way and its caches never use."""


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages; to be asked last, so that what is installed is used.

    names  the packages, whole
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_sglang() -> None:
    """Make `sglang.srt.mem_cache` importable: what `sglang` itself runs on import is left out."""
    if "sglang" in sys.modules:
        return
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    home = spec.submodule_search_locations[0]
    for name, module in (
        ("sglang", types.ModuleType("sglang")),
        ("sglang.srt.configs", _StandInModule("sglang.srt.configs")),  # registers models
    ):
        module.__path__ = [os.path.join(home, *name.split(".")[1:])]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    sys.meta_path.append(StandIns(NEVER_USED))
