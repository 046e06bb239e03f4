"""capflow captures and steers what a language model computes while vLLM serves it.

These are the public names for programs, consumers and controllers; `capflow.testing` has those for their tests. Each
name is imported from its module at its first use, so a program pays only for what it uses. `LLM`, `AsyncLLM`, `cache`
and `sampling_params` need vLLM, `TorchRows` needs torch. Without it the import raises `UsageError` or `CapflowError`,
in one line that names the extra.

Invariant: `import capflow` imports only `capflow.version`, and starts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capflow.version import __version__

if TYPE_CHECKING:
    from capflow.attention import attention_weights
    from capflow.buffers.queue import ByteQueue
    from capflow.buffers.spool import Spool
    from capflow.capture.attention import AttentionForm
    from capflow.capture.frame import Block, Chunk, Frame, FrameHeader, Rank, RequestRows, Span, Weights
    from capflow.capture.model import ModelInfo
    from capflow.capture.positions import Positions
    from capflow.capture.result import CaptureResult, RequestDone, Status
    from capflow.capture.router import RouterForm
    from capflow.capture.site import Site
    from capflow.capture.spec import CaptureSpec
    from capflow.errors import CapflowError, FatalError, HubUnreachableError, RetryError, UsageError, explain
    from capflow.experts import ChosenExperts, chosen_experts
    from capflow.hub.hub import Hub
    from capflow.lenses.lens import Lens, LensReading, open_lens
    from capflow.plugins.configure import configure, configure_all, load_plugins
    from capflow.plugins.consumer import (
        Backlog,
        Consumer,
        Context,
        Controller,
        Decision,
        StepProbe,
        StepRows,
        StepScores,
        StepView,
        hookimpl,
    )
    from capflow.probes.kinds import load_probe
    from capflow.probes.probe import Probe, Scorer, load_vector, save_vector
    from capflow.protocol.routing import hub_of
    from capflow.replay.dataset import entries_of
    from capflow.replay.player import Replay, ReplayPace
    from capflow.saes.load import load_sae
    from capflow.saes.sae import Feature, Sae
    from capflow.steering.action import (
        Abort,
        Action,
        ActionApplied,
        Answered,
        Freeze,
        Gain,
        Outcome,
        Rejected,
        SetGate,
        Steer,
        Unfreeze,
        Unknown,
        Unsteer,
    )
    from capflow.steering.vector import SteeringVector
    from capflow.transport.address import check_address
    from capflow.transport.client import Client
    from capflow_consumers.dataset.reader import open_dataset as open  # noqa: A004
    from capflow_consumers.dataset.torch_rows import TorchRows
    from capflow_engine.jobs.demo import prepare as demo_model
    from capflow_engine.llm.async_llm import AsyncLLM
    from capflow_engine.llm.cache import ActivationCache, cache
    from capflow_engine.llm.llm import LLM
    from capflow_engine.request.params import sampling_params
    from capflow_engine.steering.module import load_module as load_steering_module

__all__ = [
    "LLM",
    "Abort",
    "Action",
    "ActionApplied",
    "ActivationCache",
    "Answered",
    "AsyncLLM",
    "AttentionForm",
    "Backlog",
    "Block",
    "ByteQueue",
    "CapflowError",
    "CaptureResult",
    "CaptureSpec",
    "ChosenExperts",
    "Chunk",
    "Client",
    "Consumer",
    "Context",
    "Controller",
    "Decision",
    "FatalError",
    "Feature",
    "Frame",
    "FrameHeader",
    "Freeze",
    "Gain",
    "Hub",
    "HubUnreachableError",
    "Lens",
    "LensReading",
    "ModelInfo",
    "Outcome",
    "Positions",
    "Probe",
    "Rank",
    "Rejected",
    "Replay",
    "ReplayPace",
    "RequestDone",
    "RequestRows",
    "RetryError",
    "RouterForm",
    "Sae",
    "Scorer",
    "SetGate",
    "Site",
    "Span",
    "Spool",
    "Status",
    "Steer",
    "SteeringVector",
    "StepProbe",
    "StepRows",
    "StepScores",
    "StepView",
    "TorchRows",
    "Unfreeze",
    "Unknown",
    "Unsteer",
    "UsageError",
    "Weights",
    "__version__",
    "attention_weights",
    "cache",
    "check_address",
    "chosen_experts",
    "configure",
    "configure_all",
    "demo_model",
    "entries_of",
    "explain",
    "hookimpl",
    "hub_of",
    "load_plugins",
    "load_probe",
    "load_sae",
    "load_steering_module",
    "load_vector",
    "open",
    "open_lens",
    "sampling_params",
    "save_vector",
]

_PLACES = {
    "capflow.attention": ("attention_weights",),
    "capflow.buffers.queue": ("ByteQueue",),
    "capflow.buffers.spool": ("Spool",),
    "capflow.capture.attention": ("AttentionForm",),
    "capflow.capture.frame": ("Block", "Chunk", "Frame", "FrameHeader", "Rank", "RequestRows", "Span", "Weights"),
    "capflow.capture.model": ("ModelInfo",),
    "capflow.capture.positions": ("Positions",),
    "capflow.capture.result": ("CaptureResult", "RequestDone", "Status"),
    "capflow.capture.router": ("RouterForm",),
    "capflow.capture.site": ("Site",),
    "capflow.capture.spec": ("CaptureSpec",),
    "capflow.errors": ("CapflowError", "FatalError", "HubUnreachableError", "RetryError", "UsageError", "explain"),
    "capflow.experts": ("ChosenExperts", "chosen_experts"),
    "capflow.hub.hub": ("Hub",),
    "capflow.lenses.lens": ("Lens", "LensReading", "open_lens"),
    "capflow.plugins.configure": ("configure", "configure_all", "load_plugins"),
    "capflow.plugins.consumer": (
        "Backlog",
        "Consumer",
        "Context",
        "Controller",
        "Decision",
        "StepProbe",
        "StepRows",
        "StepScores",
        "StepView",
        "hookimpl",
    ),
    "capflow.probes.kinds": ("load_probe",),
    "capflow.probes.probe": ("Probe", "Scorer", "load_vector", "save_vector"),
    "capflow.protocol.routing": ("hub_of",),
    "capflow.replay.dataset": ("entries_of",),
    "capflow.replay.player": ("Replay", "ReplayPace"),
    "capflow.saes.load": ("load_sae",),
    "capflow.saes.sae": ("Feature", "Sae"),
    "capflow.steering.action": (
        "Abort",
        "Action",
        "ActionApplied",
        "Answered",
        "Freeze",
        "Gain",
        "Outcome",
        "Rejected",
        "SetGate",
        "Steer",
        "Unfreeze",
        "Unknown",
        "Unsteer",
    ),
    "capflow.steering.vector": ("SteeringVector",),
    "capflow.transport.address": ("check_address",),
    "capflow.transport.client": ("Client",),
    "capflow_consumers.dataset.reader": ("open_dataset as open",),
    "capflow_consumers.dataset.torch_rows": ("TorchRows",),
    "capflow_engine.jobs.demo": ("prepare as demo_model",),
    "capflow_engine.llm.async_llm": ("AsyncLLM",),
    "capflow_engine.llm.cache": ("ActivationCache", "cache"),
    "capflow_engine.llm.llm": ("LLM",),
    "capflow_engine.request.params": ("sampling_params",),
    "capflow_engine.steering.module": ("load_module as load_steering_module",),
}
"""The module of each public name; the same as the imports above."""

_MODULES = {
    name.rpartition(" ")[2]: (module, name.partition(" ")[0]) for module, names in _PLACES.items() for name in names
}


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import a public name from its module, once."""
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module 'capflow' has no attribute {name!r}")
    module, inner = _MODULES[name]
    value = globals()[name] = getattr(importlib.import_module(module), inner)
    return value
