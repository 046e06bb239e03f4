"""The fields that a request over HTTP has for capflow, and what they come to.

`capture`, `capture_id`, `capture_wait`, the fields of `capflow.steering.request.STEERING_FIELDS` and `steering_report` stand at the top
level of the body. `vllm_xargs` may carry the first, the second as `id` and what steers as JSON text under `capflow`. What always
holds: what `Asked.parse` returns fits the model, its taps and its bank, and all that steers it is worked out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from capflow.capture.model import ModelInfo
from capflow.errors import UsageError, explain
from capflow.steering.program import SteeringProgram
from capflow.steering.request import NOTHING, STEERING_FIELDS, Steering
from capflow_engine.request.options import KEY, RequestOptions, check_id, check_names
from capflow_engine.steering.applied import SteeringSummary, key_of
from capflow_engine.steering.budget import Size
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.store import SteeringStore

XARGS = f"vllm_xargs.{KEY}"
FIELDS = ("capture", "capture_id", "capture_wait", *STEERING_FIELDS, "steering_report")
"""The names of the body's fields."""

_BEGINNINGS = ("capture", "steering", "prefill_steering", "decode_steering")
"""How a field begins that is meant for capflow."""

assert all(name.startswith(_BEGINNINGS) for name in FIELDS)


class Server(msgspec.Struct, frozen=True):
    """What a request is held against. size: of the steering bank."""

    info: ModelInfo
    store: SteeringStore
    size: Size


class Asked(msgspec.Struct, frozen=True, weakref=True):
    """What one HTTP request asks for.

    options: of each of its prompts, by order. wait: whether its response waits for the consumers; None when it says nothing of
    it. key: of what steers it; None when it neither asks for steering nor is steered. applied: what its response says of that;
    None when it was not asked to.
    """

    options: tuple[RequestOptions, ...]
    wait: bool | None
    key: str | None = None
    applied: SteeringSummary | None = None

    @property
    def awaits(self) -> bool:
        """Whether the response says what became of the capture."""
        return self.wait is not None or self.captures

    @property
    def captures(self) -> bool:
        """Whether it brings a capture spec."""
        return self.options[0].capture is not None

    @property
    def reports(self) -> bool:
        """Whether the response says anything of capflow."""
        return self.awaits or self.applied is not None

    @property
    def program(self) -> SteeringProgram | None:
        """What steers it."""
        return self.options[0].program

    @property
    def names(self) -> tuple[str, ...]:
        """What its choices are called, by choice index."""
        return tuple(name for options in self.options for name in options.names)

    @classmethod
    def parse(
        cls,
        fields: Mapping[str, Any],
        xargs: Any,
        server: Server,
        *,
        id: str,
        prompts: int,
        samples: int,
        max_tokens: int | None = None,
    ) -> Asked:
        """Return what is asked for by the fields of a body, and by `vllm_xargs`' own if that is not None.

        id: what the request is called when it does not say so itself. prompts: how many it has, called `id#0`, `id#1`
        and so on when there are several. samples: of each prompt. max_tokens: of each answer; None where it does not say.

        Raises UsageError that begins with the path of the field that is wrong, UnknownModuleError for a module's name.
        """
        wait = _flag(fields, "capture_wait")
        report = _flag(fields, "steering_report")
        try:
            options = _options(fields, xargs)
            options.check(server.info)
            program = resolved(options.steering, server)
        except UsageError as e:
            if xargs is None or str(e).startswith(XARGS):
                raise
            where = "vllm_xargs" if str(e).startswith(KEY) else XARGS
            raise type(e)(f"{where}.{e}") from e
        asked = options.steering or NOTHING
        options = msgspec.structs.replace(options, steering=None, program=program)
        everywhere = server.store.global_state != NOTHING
        applied = SteeringSummary.of(program, asked, everywhere=everywhere, max_tokens=max_tokens) if report else None
        key = key_of(program) if program is not None or asked != NOTHING or report else None
        return cls(_each(options, options.id or id, prompts, samples), wait, key, applied)


def resolved(asked: Steering | None, server: Server) -> SteeringProgram | None:
    """Return everything that steers a request that asks for this, with the global state; None when nothing does.

    Raises UsageError for what does not fit the model or the bank, UnknownModuleError for a module's name.
    """
    return Fit(server.info, server.size).program(asked, server.store)


def check_spelling(extra: Collection[str]) -> None:
    """Raise UsageError for a field that nobody knows and that was meant for capflow, which would do nothing."""
    name = meant_for_capflow(extra)
    if name is not None:
        raise UsageError(explain(f"{name}: unknown", expected=f"one of {', '.join(FIELDS)}"))


def meant_for_capflow(names: Collection[str]) -> str | None:
    """Return the first of a body's fields that is one of `FIELDS`, well spelt or not; None where none is."""
    return next((name for name in names if name.startswith(_BEGINNINGS)), None)


def _flag(fields: Mapping[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise UsageError(explain(name, got=value, expected="true or false"))
    return value


def _options(fields: Mapping[str, Any], xargs: Any) -> RequestOptions:
    """Return the options that a body or `vllm_xargs` says."""
    capture, name = fields.get("capture"), fields.get("capture_id")
    steering = {field: value for field in STEERING_FIELDS if (value := fields.get(field)) is not None}
    if xargs is not None:
        if steering or capture is not None or name is not None:
            raise UsageError(explain(XARGS, expected="nothing, beside fields of the body that say the same"))
        return RequestOptions.said(xargs)
    if name is not None:
        check_id(name, "capture_id")
    return RequestOptions.make(id=name, capture=capture, **steering)


def _each(options: RequestOptions, base: str, prompts: int, samples: int) -> tuple[RequestOptions, ...]:
    """Return the options of each prompt."""
    names = [base] if prompts == 1 else [f"{base}#{n}" for n in range(prompts)]
    each = tuple(msgspec.structs.replace(options, id=one, samples=samples) for one in names)
    check_names((one for options in each for one in options.names), base, "capture_id")
    return each
