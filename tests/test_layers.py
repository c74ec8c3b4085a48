"""The layers: who may import whom, where, and how long a file or function may be.

runtime: server ──► engine ──► scheduler ──────────► radixcache
                               executor … ──► kernels
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("radixcache", "kernels", "runtime")
FILES = [
    path
    for folder in (*PACKAGES, "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
CODE = [path for path in FILES if path.relative_to(ROOT).parts[0] in PACKAGES]

CORE_MAY_IMPORT = {"radixcache", "msgspec", "numpy", "sortedcontainers"}
CORE_MUST_NOT_IMPORT = {"asyncio", "logging", "multiprocessing", "socket", "threading", "time"}
KERNELS_MAY_IMPORT = {"kernels", "torch", "triton"}
TORCH_FREE = (
    "request",
    "sequence",
    "config",
    "plan",
    "engine",
    "engine_stats",
    "scheduler",
    "loop",
    "completion",
    "recheck",
    "sealed",
    "sessions/book",
    "sessions/holds",
    "sessions/records",
    "sessions/conversation",
    "sessions/scoring",
    "curves",
    "trace_log",
    "tree",
    "cli/quick",
    "cli/simulate",
    "cli/top",
    "top",
    "misses",
    "doctor",
)
DEVICE_SIDE = ("executor", "kv", "models", "weights", "decoding")
DECIDING_SIDE = ("runtime.scheduler", "runtime.engine", "runtime.server")
TENSORS = {"torch", "triton"}

OPTIONAL = {"huggingface_hub", "llguidance", "matplotlib", "opentelemetry", "triton", "zmq"}
"""Third parties that may be absent: they, and the files of ours that import them, may come late."""

LATE_ON_PURPOSE = {
    ("runtime/__init__.py", "__getattr__"): "what needs torch is imported when it is asked for",
    ("runtime/cli/entry.py", "main"): "an environment variable must be set before torch is loaded",
}

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_TRITON_LINES = 400, 60, 120


class Import(NamedTuple):
    """One imported module.

    module     full name; of `from a import b`, `a.b` where that is a module of ours, else `a`
    function   the function that it stands in, or None
    for_types  True where only a type checker sees it
    """

    module: str
    function: str | None
    for_types: bool


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Iterate over everything that a module imports, wherever it stands."""
    stack: list[tuple[ast.AST, str | None, bool]] = [(tree, None, False)]
    while stack:
        node, function, for_types = stack.pop()
        for module in imported_modules(node):
            yield Import(module, function, for_types)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += [(child, function, True) for child in node.body]
            stack += [(child, function, for_types) for child in node.orelse]
        else:
            stack += [(child, function, for_types) for child in ast.iter_child_nodes(node)]


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        module = node.module or ""
        names = [f"{module}.{alias.name}" for alias in node.names]
        modules = [name for name in names if file_of(name)]
        return modules if modules == names else [module, *modules]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("import_module", "__import__")
    ):
        return [ast.unparse(node.args[0]).strip("'\"")]
    return []


def file_of(module: str) -> Path | None:
    """The file of one of our modules; None for any other."""
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    found = [file for file in candidates if file.is_file()]
    return found[0] if found and module.partition(".")[0] in PACKAGES else None


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def top(module: str) -> str:
    return module.partition(".")[0]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def files_of(package: str) -> list[Path]:
    return [path for path in CODE if name_of(path).startswith(f"{package}/")]


def within(folders: tuple[str, ...], package: str) -> list[Path]:
    """The files of these modules and subpackages of a package."""
    prefixes = tuple(f"{package}/{name}{end}" for name in folders for end in (".py", "/"))
    return [path for path in CODE if name_of(path).startswith(prefixes)]


def loaded_with(module: str, seen: set[str] | None = None) -> set[str]:
    """Every module that importing one of ours loads, of ours and of others."""
    seen = set() if seen is None else seen
    packages = [module[:at] for at, letter in enumerate(module) if letter == "."]
    for name in (*packages, module):
        path = file_of(name)
        if name in seen:
            continue
        seen.add(name)
        for found in imports_of(parsed(path)) if path else ():
            if found.function is None and not found.for_types:
                loaded_with(found.module, seen)
    return seen


@pytest.mark.parametrize("path", files_of("radixcache"), ids=name_of)
def test_the_core_imports_its_few_libraries_and_neither_threads_nor_clocks(path):
    used = {top(found.module) for found in imports_of(parsed(path))}
    assert used - sys.stdlib_module_names <= CORE_MAY_IMPORT
    assert not used & CORE_MUST_NOT_IMPORT


@pytest.mark.parametrize("path", files_of("kernels"), ids=name_of)
def test_the_kernels_import_only_torch_and_triton(path):
    used = {top(found.module) for found in imports_of(parsed(path))}
    assert used - sys.stdlib_module_names <= KERNELS_MAY_IMPORT


@pytest.mark.parametrize("path", within(TORCH_FREE, "runtime"), ids=name_of)
def test_the_deciding_half_of_the_runtime_loads_no_torch(path):
    module = name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    loaded = {top(name) for name in loaded_with(module)}
    assert not loaded & TENSORS


@pytest.mark.parametrize("path", within(DEVICE_SIDE, "runtime"), ids=name_of)
def test_the_device_half_of_the_runtime_knows_no_scheduler_engine_or_server(path):
    for found in imports_of(parsed(path)):
        assert not f"{found.module}.".startswith(tuple(f"{name}." for name in DECIDING_SIDE))


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_an_import_comes_late_only_for_an_optional_third_party(path):
    for found in imports_of(parsed(path)):
        if found.function is None or (name_of(path), found.function) in LATE_ON_PURPOSE:
            continue
        assert top(found.module) in OPTIONAL or wraps_an_optional(found.module), (
            f"{found.module} is imported inside {found.function}"
        )


def wraps_an_optional(module: str) -> bool:
    """True for a file of ours that imports an optional third party."""
    path = file_of(module)
    if path is None:
        return False
    uses = {top(found.module) for found in imports_of(parsed(path)) if found.function is None}
    return bool(uses & OPTIONAL)


@pytest.mark.parametrize("optional", sorted(OPTIONAL - {"triton"}))
def test_an_optional_third_party_is_imported_in_one_file(optional):
    users = [
        name_of(path)
        for path in CODE
        if any(top(found.module) == optional for found in imports_of(parsed(path)))
    ]
    assert len(users) <= 1


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_stay_short(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            limit = MAX_TRITON_LINES if is_triton(node) else MAX_FUNCTION_LINES
            assert num_lines(node) <= limit, f"{node.name} has {num_lines(node)} lines"


C_FILES = sorted((ROOT / "kernels" / "native").glob("*.[ch]"))


@pytest.mark.parametrize("path", C_FILES, ids=name_of)
def test_files_and_functions_in_c_stay_short_and_begin_with_what_they_own(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    assert max(map(len, text.splitlines())) <= 100
    head = text.partition("*/")[0]
    assert head.startswith("/* ")
    assert "Owns: " in head
    for function in re.findall(r"^[\w].*\{\n(?:.*\n)*?\}", text, re.MULTILINE):
        assert function.count("\n") < MAX_FUNCTION_LINES, function.partition("\n")[0]


def is_triton(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton." in ast.unparse(decorator) for decorator in function.decorator_list)


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, the docstring left out: shapes and sources may take room."""
    first, last = function.body[0], function.end_lineno or function.lineno
    doc = 0
    if ast.get_docstring(function) is not None:
        doc = (first.end_lineno or first.lineno) - first.lineno + 1
    return last - function.lineno + 1 - doc


HIDDEN = """
import os.path as p
if TYPE_CHECKING:
    from torch import Tensor
class A:
    async def late(self):
        from radixcache import cache
        importlib.import_module("threading")
"""


def test_imports_are_found_wherever_they_stand():
    assert set(imports_of(ast.parse(HIDDEN))) == {
        Import("os.path", None, False),
        Import("torch", None, True),
        Import("radixcache.cache", "late", False),
        Import("threading", "late", False),
    }


def test_what_a_module_loads_includes_what_its_imports_load():
    loaded = loaded_with("radixcache.cache")
    assert {"radixcache", "radixcache.tokens", "numpy", "sortedcontainers"} <= loaded
    assert "torch" in loaded_with("kernels")


def test_lines_are_counted_without_the_docstring():
    (function,) = ast.parse('def f(a,\n b):\n    """One.\n\n    Two.\n    """\n    return 1\n').body
    assert num_lines(function) == 3
