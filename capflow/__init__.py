"""capflow captures and steers what a language model computes while vLLM serves it.

These are the public names. `hookimpl`, `Consumer` and `Controller` are for plugins. `LLM`, `AsyncLLM` and `sampling_params`
need the engine extension, and so vLLM, and are loaded when they are first used. `open` reads a captured data set and needs neither.

Invariant: importing capflow imports neither torch nor vLLM, and starts nothing.
"""

from __future__ import annotations

from typing import Any

from capflow.capture.frame import Frame
from capflow.capture.result import CaptureResult, RequestDone
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, FatalError, RetryError, UsageError
from capflow.plugins.consumer import Consumer, Controller, hookimpl

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
    "LLM": "capflow_engine.llm.llm",
    "AsyncLLM": "capflow_engine.llm.async_llm",
    "sampling_params": "capflow_engine.request.params",
}


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Load `LLM`, `AsyncLLM`, `sampling_params` and `open` from their packages when they are first asked for."""
    import importlib

    if name == "open":
        return importlib.import_module("capflow_consumers.dataset.reader").open_dataset
    if name in _ENGINE:
        return getattr(importlib.import_module(_ENGINE[name]), name)
    raise AttributeError(f"module 'capflow' has no attribute {name!r}")
