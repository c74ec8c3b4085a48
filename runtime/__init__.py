"""The runtime: matches each request's longest cached prefix and computes only the rest.

from runtime import LLM, SamplingParams
llm = LLM("smollm2-135m-instruct")
print(llm.generate("The capital of France is", SamplingParams(max_tokens=8)).text)
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.config import RuntimeConfig
from runtime.request import SamplingParams
from runtime.sessions.records import SessionLimits

if TYPE_CHECKING:
    from runtime.llm import LLM, Completion, Session

__all__ = ["LLM", "Completion", "RuntimeConfig", "SamplingParams", "Session", "SessionLimits"]


def _refuse_foreign_kernels() -> None:
    """Another distribution installs a top-level `kernels` too; say so instead of failing later."""
    spec = find_spec("kernels")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not any(Path(place, "extend_attention.py").exists() for place in places):
        found = f"the one at {places[0]} is another distribution's" if places else "there is none"
        raise ImportError(
            f"radixcache needs its own top-level package `kernels`, but {found}: "
            "pip uninstall kernels, then install radixcache again"
        )


_refuse_foreign_kernels()


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for: the scheduler and its like do not."""
    if name in ("LLM", "Completion", "Session"):
        from runtime import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
