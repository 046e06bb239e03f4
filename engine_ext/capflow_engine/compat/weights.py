"""Changes of the weights of vLLM's engines: `EngineCore` reports each call that makes one to its scheduler.

An engine core runs such calls between two steps, and each worker takes calls and steps in one order. So what the
scheduler puts on the next step holds on every rank. Verified with vLLM 0.32.0.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

# The methods of workers that change weights: vLLM's own, and those that worker extensions of RL frameworks add.
_CHANGING = re.compile(r"(load|reset|sync|update)_weight|finish_weight_update")
# The level of sleep that discards the weights.
_DISCARDED = 2

Change = Callable[[Any, str | None], None]


def watch(change: Change) -> None:
    """Make the engine core of this process report each change of its weights, before it happens.

    change: is given the scheduler, and the name of the new weights, or None where the call does not name them.
    """
    from vllm.v1.engine.core import EngineCore

    for name, reading in (
        ("collective_rpc", _of_call),
        ("set_weight_version", _of_name),
        ("sleep", _of_sleep),
        ("add_lora", _of_adapter),
    ):
        original = getattr(EngineCore, name, None)
        if original is not None:  # vLLM below 0.32 does not name weights
            original = getattr(original, "capflow_original", original)
            setattr(EngineCore, name, _reporting(original, reading, change))


def adapter_of(request: Any) -> str:
    """Return the name of a request's LoRA adapter; empty for none."""
    lora = getattr(request, "lora_request", None)
    return "" if lora is None else str(lora.lora_name)


def _reporting(original: Any, reading: Callable[..., tuple[bool, str | None]], change: Change) -> Any:
    @functools.wraps(original)
    def reporting(core: Any, *args: Any, **kwargs: Any) -> Any:
        changes, name = reading(*args, **kwargs)
        if changes:
            change(core.scheduler, name)
        return original(core, *args, **kwargs)

    reporting.capflow_original = original  # type: ignore[attr-defined]
    return reporting


def _of_call(method: Any, *_: Any, **__: Any) -> tuple[bool, str | None]:
    return isinstance(method, str) and _CHANGING.search(method) is not None, None


def _of_name(weight_version: Any) -> tuple[bool, str | None]:
    return True, str(weight_version)


def _of_sleep(level: int = 1, *_: Any, **__: Any) -> tuple[bool, str | None]:
    return level >= _DISCARDED, None


def _of_adapter(lora_request: Any) -> tuple[bool, str | None]:
    return bool(getattr(lora_request, "load_inplace", False)), None
