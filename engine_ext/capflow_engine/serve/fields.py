"""The names of the fields that a request has for capflow, over HTTP and gRPC.

They stand at the top level of the body. `vllm_xargs` may carry `capture`, `capture_id` as `id`, and what steers as JSON
text under `capflow`.
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
"""How a field begins that is meant for capflow."""

assert all(name.startswith(_BEGINNINGS) for name in FIELDS)


def check_spelling(extra: Collection[str]) -> None:
    """Raise UsageError for a field that nobody knows and that was meant for capflow: it would have no effect."""
    name = meant_for_capflow(extra)
    if name is not None:
        raise UsageError(explain(f"{name}: unknown", expected=f"one of {', '.join(FIELDS)}"))


def meant_for_capflow(names: Collection[str]) -> str | None:
    """Return the first of a body's fields that is one of `FIELDS`, well spelt or not; None if there is none."""
    return next((name for name in names if name.startswith(_BEGINNINGS)), None)
