"""teachllm: an LLM inference engine to use, to read and to watch.

The names below load on first use, so that `import teachllm` costs nothing and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teachllm.config import EngineConfig
    from teachllm.engine.async_llm import AsyncLLM
    from teachllm.engine.llm import LLM
    from teachllm.outputs import RequestOutput
    from teachllm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncLLM": "teachllm.engine.async_llm",
    "LLM": "teachllm.engine.llm",
    "EngineConfig": "teachllm.config",
    "RequestOutput": "teachllm.outputs",
    "SamplingParams": "teachllm.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'teachllm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
