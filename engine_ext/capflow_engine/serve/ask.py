"""What one request of the server asks of capflow: its body, parsed once, over HTTP or gRPC.

Invariant: a `ParsedRequest` fits the model, its taps and its steering bank. Its steering is compiled.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from vllm import envs

from capflow.errors import UsageError, explain
from capflow.steering.program import SteeringProgram
from capflow.steering.request import NOTHING, STEERING_FIELDS
from capflow_engine.request.options import KEY, PackedOptions, RequestOptions, check_id, check_names
from capflow_engine.serve.fields import FIELDS, XARGS, check_spelling
from capflow_engine.steering.applied import SteeringSummary, key_of
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.store import SteeringStore

SAMPLES_MAX = envs.VLLM_MAX_N_SEQUENCES
"""How many samples vLLM allows in one request."""

_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""The fields that limit the length of an answer; the first given one holds."""


class ParsedRequest(msgspec.Struct, frozen=True, weakref=True, dict=True):
    """What one request asks for.

    options: of each of its prompts, in order.
    wait: whether its response waits for the consumers; None if the request does not say.
    key: the id of its steering program; None if it neither asks for steering nor is steered.
    summary: the report of its steering for its response; None if the request does not ask for it.
    beams: whether vLLM searches its answers with beams.
    """

    options: tuple[RequestOptions, ...]
    wait: bool | None
    key: str | None = None
    summary: SteeringSummary | None = None
    beams: bool = False

    @property
    def awaits(self) -> bool:
        """Whether the response has the results of the capture."""
        return self.wait is not None or self.captures

    @property
    def captures(self) -> bool:
        """Whether the request brings a capture spec."""
        return self.options[0].capture is not None

    @property
    def reports(self) -> bool:
        """Whether the response has members of capflow."""
        return self.awaits or self.summary is not None

    @property
    def program(self) -> SteeringProgram | None:
        """The program that steers the request."""
        return self.options[0].program

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its choices, by choice index."""
        return tuple(name for options in self.options for name in options.names)

    def packed(self) -> Iterator[PackedOptions] | None:
        """Return the options of each prompt, in an endless cycle; None for beams, which are steered token by token."""
        return None if self.beams else itertools.cycle([options.pack() for options in self.options])

    @classmethod
    def of(cls, body: Any, fit: Fit, store: SteeringStore, *, id: str, prompts: int) -> ParsedRequest | None:
        """Return what a body asks for; None if it asks for nothing and no global state steers it.

        id: the response's id.
        prompts: how many the body has. Raises UsageError that begins with the path of the field that is wrong,
            UnknownModuleError for a module's name.
        """
        check_spelling(body.model_extra or ())
        xargs = getattr(body, "vllm_xargs", None)
        xargs = xargs.get(KEY) if isinstance(xargs, dict) else None
        fields = {name: value for name in FIELDS if (value := getattr(body, name)) is not None}
        # Other fields of a body have no effect.
        declared = type(body).model_fields
        beams = bool("use_beam_search" in declared and body.use_beam_search)
        if not fields and xargs is None:
            return cls._of_everyone(fit, store, prompts, beams=beams)
        samples = (body.n if "n" in declared else None) or 1
        if not 1 <= samples <= SAMPLES_MAX:
            raise UsageError(explain("n", got=samples, expected=f"1..{SAMPLES_MAX}"))
        tokens = next((n for name in _MAX_TOKENS if name in declared and (n := getattr(body, name)) is not None), None)
        ask = cls.parse(fields, xargs, fit, store, id=id, prompts=prompts, samples=samples, max_tokens=tokens)
        for name, given in (("use_beam_search", beams), ("background", getattr(body, "background", False))):
            if given and ask.awaits:
                raise UsageError(explain(name, got=True, expected="false, with capture"))
        return _nameless(ask, beams=True) if beams else ask

    @classmethod
    def _of_everyone(cls, fit: Fit, store: SteeringStore, prompts: int, *, beams: bool) -> ParsedRequest | None:
        """Return a request that asks for nothing: the global state; None if there is no global state."""
        if store.global_state == NOTHING:
            return None
        ask = _nameless(cls.parse({}, None, fit, store, id="", prompts=1, samples=1), beams=beams)
        return None if ask.program is None else msgspec.structs.replace(ask, options=ask.options * prompts)

    @classmethod
    def parse(
        cls,
        fields: Mapping[str, Any],
        xargs: Any,
        fit: Fit,
        store: SteeringStore,
        *,
        id: str,
        prompts: int,
        samples: int,
        max_tokens: int | None = None,
    ) -> ParsedRequest:
        """Return what capflow's fields of a body ask for, or its part of `vllm_xargs`.

        id: the request's name if it brings none.
        prompts: how many it has; several are called `id#0`, `id#1` and so on.
        samples: of each prompt.
        max_tokens: of each answer; None if unknown.

        Raises UsageError that begins with the path of the field that is wrong, UnknownModuleError for a module's name.
        """
        wait = _flag(fields, "capture_wait")
        report = _flag(fields, "steering_report")
        try:
            spec = _options(fields, xargs)
            options = spec.compiled(fit, store)
        except UsageError as e:
            if xargs is None or str(e).startswith(XARGS):
                raise
            where = "vllm_xargs" if str(e).startswith(KEY) else XARGS
            raise type(e)(f"{where}.{e}") from e
        steering, everywhere = spec.steering or NOTHING, store.global_state != NOTHING
        program = options.program
        summary = None
        if report:
            summary = SteeringSummary.of(program, steering, everywhere=everywhere, max_tokens=max_tokens)
        key = key_of(program) if program is not None or steering != NOTHING or report else None
        return cls(_each(options, options.id or id, prompts, samples), wait, key, summary)


def _nameless(ask: ParsedRequest, *, beams: bool) -> ParsedRequest:
    """Return a request without names of choices: vLLM's own names are used."""
    options = tuple(msgspec.structs.replace(options, id=None) for options in ask.options)
    return msgspec.structs.replace(ask, options=options, beams=beams)


def _flag(fields: Mapping[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise UsageError(explain(name, got=value, expected="true or false"))
    return value


def _options(fields: Mapping[str, Any], xargs: Any) -> RequestOptions:
    """Return the options in a body's fields or in `vllm_xargs`."""
    capture, name = fields.get("capture"), fields.get("capture_id")
    steering = {field: value for field in STEERING_FIELDS if (value := fields.get(field)) is not None}
    if xargs is not None:
        if steering or capture is not None or name is not None:
            raise UsageError(explain(XARGS, expected="nothing, beside fields of the body that say the same"))
        return RequestOptions.from_client(xargs)
    if name is not None:
        check_id(name, "capture_id")
    return RequestOptions.make(id=name, capture=capture, **steering)


def _each(options: RequestOptions, base: str, prompts: int, samples: int) -> tuple[RequestOptions, ...]:
    """Return the options of each prompt."""
    names = [base] if prompts == 1 else [f"{base}#{number}" for number in range(prompts)]
    each = tuple(msgspec.structs.replace(options, id=name, samples=samples) for name in names)
    check_names((name for options in each for name in options.names), base, "capture_id")
    return each
