"""The names of the fields that a request has for capflow, over HTTP and gRPC.

They are at the top level of the body. `vllm_xargs` may have `capture`, `capture_id` as `id`, and the steering fields as
JSON text under `capflow`.
"""

from __future__ import annotations

from collections.abc import Collection

from capflow.errors import UsageError, explain
from capflow.steering.request import STEERING_FIELDS
from capflow_engine.request.options import KEY

XARGS = f"vllm_xargs.{KEY}"
FIELDS = ("capture", "capture_id", "capture_wait", *STEERING_FIELDS, "steering_report")
"""The names of the body's fields."""

_BEGINNINGS = ("capture", "steering", "prefill_steering", "decode_steering")
"""How the name of a field begins that is meant for capflow."""

assert all(name.startswith(_BEGINNINGS) for name in FIELDS)


def check_spelling(extra: Collection[str]) -> None:
    """Raise UsageError for an unknown field that was meant for capflow: it would have no effect."""
    name = meant_for_capflow(extra)
    if name is not None:
        raise UsageError(explain(f"{name}: unknown", expected=f"one of {', '.join(FIELDS)}"))


def meant_for_capflow(names: Collection[str]) -> str | None:
    """Return the first of a body's fields that is meant for capflow, also if misspelt; None if there is none."""
    return next((name for name in names if name.startswith(_BEGINNINGS)), None)
