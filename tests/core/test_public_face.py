"""The package as a caller sees it: its names, their docs, their examples, and what it needs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import radixcache
from radixcache import errors

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(radixcache.__path__, "radixcache.")
)


def test_the_public_names_are_these():
    assert radixcache.__all__ == sorted(radixcache.__all__, key=_constants_first)
    assert set(radixcache.__all__) == {
        *("DEFAULT_NAMESPACE", "LRU", "BlockCopy", "CacheConfig", "CacheError", "CacheStats"),
        *("CallerError", "Commit", "EvictionPolicy", "InvalidConfig", "InvalidLease"),
        *(
            "InvalidTokens",
            "InvalidTrace",
            "InvariantViolation",
            "Lease",
            "Match",
            "Namespace",
            "NodeFacts",
        ),
        *("NodeView", "OutOfBlocks", "PrefixKey", "RadixCache", "TreeView", "pack_tokens"),
        *("render_text", "unpack_tokens"),
        *("AllBlocksCleared", "BlockHasher", "BlockRemoved", "BlockStored", "EventRecorder"),
        *("Evicted", "GhostMemory", "encode_batch"),
        *("FIFO", "LFU", "MRU", "POLICIES", "SLRU", "CostAware", "TreeObserver"),
        *("Cause", "Explanation", "Hold", "NamespaceStats", "Priority", "Quota", "Retention"),
        *("InvalidSnapshot", "StaleEpoch", "dump_tree", "load_tree"),
        *("BrokenSeal", "Seal", "Seals", "seals_of", "tree_seals"),
    }


def _constants_first(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_every_name_that_the_package_binds_is_public_or_a_module():
    bound = {
        name
        for name, value in vars(radixcache).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert bound == set(radixcache.__all__)


def test_every_error_of_the_core_is_public_and_drawn_in_the_tree_of_errors():
    names = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.CacheError)
    }
    assert names <= set(radixcache.__all__)
    for name in names:
        assert name in (errors.__doc__ or ""), f"{name} is missing from the drawing"


def documented_things():
    for name in radixcache.__all__:
        value = getattr(radixcache, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        yield name, value
        for member, attribute in vars(value).items() if inspect.isclass(value) else ():
            if member.startswith("_"):
                continue
            if isinstance(attribute, (property, classmethod)) or inspect.isfunction(attribute):
                yield f"{name}.{member}", attribute


THINGS = dict(documented_things())


@pytest.mark.parametrize("name", THINGS)
def test_every_public_name_is_documented(name):
    doc = (
        vars(THINGS[name]).get("__doc__")
        if inspect.isclass(THINGS[name])
        else (THINGS[name].__doc__)
    )
    assert doc, f"{name} has no docstring of its own"
    first = doc.strip().split("\n\n")[0]
    assert first.rstrip().endswith((".", "!")), f"{name} does not begin with a sentence"


@pytest.mark.parametrize("name", ["CacheConfig", "CacheStats", "Match", "Commit", "Namespace"])
def test_every_field_of_a_record_is_documented(name):
    record = getattr(radixcache, name)
    for field in msgspec.structs.fields(record):
        assert f"\n    {field.name} " in record.__doc__, f"{name}.{field.name}"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_owns_and_every_constant_what_it_is(module):
    source = Path(importlib.import_module(module).__file__).read_text()
    tree = ast.parse(source)
    assert "Owns: " in (ast.get_docstring(tree) or "") or module.endswith("errors")
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.Assign) and not node.targets[0].id.startswith("_"):
            assert isinstance(after, ast.Expr), f"{module}: {ast.unparse(node.targets[0])}"
            assert isinstance(after.value, ast.Constant)


@pytest.mark.parametrize("module", ["radixcache", *MODULES])
def test_the_examples_in_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0


def test_there_are_examples_of_the_main_things():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {
        test.name
        for module in MODULES
        for test in finder.find(importlib.import_module(module))
        if test.examples
    }
    assert {"radixcache.cache.RadixCache", "radixcache.tokens.pack_tokens"} <= found


WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "kernels", "runtime"):
            raise ImportError(f"{name} is not to be imported here")

sys.meta_path.insert(0, Absent())
try:
    import torch
except ImportError:
    pass
else:
    raise SystemExit("torch could still be imported")
from radixcache import CacheConfig, PrefixKey, RadixCache, render_text
cache = RadixCache(CacheConfig(num_blocks=8, block_size=2))
lease = cache.acquire(PrefixKey.of([1, 2, 3, 4, 5]))
cache.commit(lease, 5)
branch = cache.fork(lease)
cache.release(lease)
cache.release(branch)
assert cache.match(PrefixKey.of([1, 2, 3, 4])).num_tokens == 4
print(render_text(cache.view()))
cache.evict(8)
cache.check()
"""


def test_the_core_works_where_torch_can_not_be_imported():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH],
        capture_output=True,
        text=True,
        cwd=Path(radixcache.__file__).parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 2 3 4  · 4 tokens in 2 blocks · evictable, goes 1.\n"
