"""The cost of specs: prompts that an engine computes although its prefix cache holds them.

A consumer's own spec applies to every request. A spec that names prompt positions keeps every request from reading
cached blocks.
"""

from __future__ import annotations

import msgspec

from capflow import limits
from capflow.capture.spec import CaptureSpec
from capflow.plugins.consumer import Consumer, Controller

_PROMPT_LONG = limits.POSITION_MAX // 2  # tokens; a position wanted of every prompt lies before its end


def notice(name: str, consumer: Consumer | type[Controller], spec: CaptureSpec | None) -> str | None:
    """Return which consumer limits cached reads, by which positions, and what to set instead; None if it does not.

    name: the consumer's, or the controller's.
    spec: its own.
    """
    first = None if spec is None else _first_of_every_prompt(spec)
    if spec is None or first is None:
        return None
    form = spec.positions if isinstance(spec.positions, str) else msgspec.json.encode(spec.positions).decode()
    read = "nothing" if first == 0 else f"only what lies before position {first}"
    options = consumer.Config.__struct_fields__
    remedies = ["positions=all_generated", "positions=last_prompt"] if "positions" in options else []
    remedies += ["capture=requests"] if "capture" in options else []
    remedy = f"set {' or '.join(remedies)}" if remedies else "have its spec() name all_generated or last_prompt"
    kind = "consumer" if isinstance(consumer, Consumer) else "controller"
    subject = f"{kind} {name} captures positions {form} of every request"
    return f"{subject}: prompts read {read} from the prefix cache; to use the cache, {remedy}"


def _first_of_every_prompt(spec: CaptureSpec) -> int | None:
    """Return the first position that a spec names in every prompt; None if all are near the prompt's end."""
    positions = spec.set_of_positions()
    first = positions.at(_PROMPT_LONG).first()
    return first if first < _PROMPT_LONG and first == positions.at(_PROMPT_LONG - 1).first() else None
