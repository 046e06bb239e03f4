"""vLLM's `ExampleHiddenStatesConnector` without an accelerator.

It asks for pinned memory, which PyTorch refuses on a CPU, and for CUDA's streams and events, whose stand-ins in vLLM's
worker for CPUs lack what it calls. It gets ordinary memory, and events that have happened: on a CPU a copy is over when
it returns.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class _Happened:
    """A stream or an event for which nothing has to wait."""

    def record(self, *_: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def wait_event(self, _: Any) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return that it has happened."""
        return True


class _Torch(SimpleNamespace):
    """`torch` as the connector's module sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _empty_like(tensor: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return torch.empty_like(tensor, **arguments | {"pin_memory": False})


example.torch = _Torch(
    empty_like=_empty_like,
    cuda=SimpleNamespace(Event=_Happened, Stream=_Happened, stream=contextlib.nullcontext),
)
Connector = example.ExampleHiddenStatesConnector
