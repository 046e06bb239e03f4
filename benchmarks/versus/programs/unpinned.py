"""vLLM's `ExampleHiddenStatesConnector` without pinned memory, for which it asks and which PyTorch refuses on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


def _empty_like(tensor: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return torch.empty_like(tensor, **arguments | {"pin_memory": False})


class _Torch(SimpleNamespace):
    """`torch` as the connector's module sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


example.torch = _Torch(empty_like=_empty_like)
Connector = example.ExampleHiddenStatesConnector
