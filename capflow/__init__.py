"""capflow captures and steers what a language model computes while vLLM serves it.

`hookimpl`, `Consumer` and `Controller` are for plugins; `LLM`, `AsyncLLM` and `sampling_params` need the engine extension
(and so vLLM) and are loaded when first used; `open` reads a captured data set and needs neither.
"""

from __future__ import annotations

from typing import Any

from capflow.consumer import Consumer, Controller
from capflow.errors import CapflowError, FatalError, RetryError, UsageError
from capflow.frame import Frame
from capflow.hookspecs import hookimpl
from capflow.result import CaptureResult, RequestDone
from capflow.site import Site
from capflow.spec import CaptureSpec

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapflowError",
    "CaptureResult",
    "CaptureSpec",
    "Consumer",
    "Controller",
    "FatalError",
    "Frame",
    "RequestDone",
    "RetryError",
    "Site",
    "UsageError",
    "hookimpl",
    "open",
    "sampling_params",
]


_ENGINE = {
    "LLM": "capflow_engine.llm",
    "AsyncLLM": "capflow_engine.async_llm",
    "sampling_params": "capflow_engine.params",
}


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Load `LLM`, `AsyncLLM`, `sampling_params` and `open` from their packages when they are first asked for."""
    import importlib

    if name == "open":
        return importlib.import_module("capflow_consumers.reader").open_dataset
    if name in _ENGINE:
        return getattr(importlib.import_module(_ENGINE[name]), name)
    raise AttributeError(f"module 'capflow' has no attribute {name!r}")
