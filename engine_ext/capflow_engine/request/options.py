"""What one request asks of capflow: what travels in `SamplingParams.extra_args["capflow"]`.

In process it is a plain dict of msgpack types, made by `RequestOptions.pack`; over HTTP it is the same as JSON text in
`vllm_xargs`, without the packed vectors' bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.spec import Capture, parse_capture
from capflow.errors import UsageError, explain
from capflow.steering.program import SteeringProgram
from capflow.steering.request import STEERING_FIELDS, Steering
from capflow.text import jsontext
from capflow.text.brief import brief
from capflow_engine.steering.store import SteeringStore

KEY = "capflow"
_NO_MODULES = SteeringStore()
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair: no text that can be sent


class PackedOptions(dict[str, Any]):
    """Options that this process packed, and which are as it checked them; those that a client sent are plain dicts or text."""


class Ready(PackedOptions):
    """Options with everything that steers their request worked out: nothing is to be added."""


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one request asks for.

    id: what the request is called in frames and files, unique among running ones. capture: what to capture of it for
    consumers that read requests' own specs, all or by name. steering: what steers it, as it was asked for. program: the same worked out,
    with everything else that holds for it; where that is there, `steering` is not. samples: how many samples are asked for, each
    of which is a request of its own, called `id#0`, `id#1` and so on when there are several. generated: how many of the prompt's
    last tokens are an answer so far, and are steered as such: of a beam, each of whose tokens is a request of its own; None for
    any other request.
    """

    id: str | None = None
    capture: Capture | None = None
    steering: Steering | None = None
    program: SteeringProgram | None = None
    samples: int = 1
    generated: int | None = None

    __repr__ = brief

    @property
    def names(self) -> tuple[str, ...]:
        """What the samples are called; nothing when they were given no id."""
        if self.id is None:
            return ()
        return (self.id,) if self.samples == 1 else tuple(f"{self.id}#{n}" for n in range(self.samples))

    @classmethod
    def make(cls, *, id: str | None = None, capture: Any = None, **steering: Any) -> RequestOptions:
        """Return the options that plain values describe; raise UsageError naming the field that is wrong.

        steering: the fields of `capflow.steering.request.STEERING_FIELDS`; None says nothing.
        """
        if id is not None:
            check_id(id)
        given = {name: value for name, value in steering.items() if value is not None}
        return cls(
            id=id,
            capture=None if capture is None else parse_capture(capture),
            steering=Steering.parse(given) if given else None,
        )

    def check(self, info: ModelInfo) -> None:
        """Raise UsageError unless everything fits the model and its taps."""
        if self.capture is not None:
            self.capture.resolve(info.sites, num_layers=info.num_layers)
        if self.steering is not None:
            self.steering.check(info)
        if self.program is not None:
            self.program.check(info)

    def resolved(self, info: ModelInfo, store: SteeringStore = _NO_MODULES) -> RequestOptions:
        """Return the options with what steers worked out, and what the store has for every request with it.

        What they came with was checked before. Raises UsageError for what does not fit the model, and for a module that the
        store does not have.
        """
        if self.program is not None:
            return self
        program = store.resolve(self.steering, info.hidden_size)
        if program is not None:
            program.check(info)
        return msgspec.structs.replace(self, steering=None, program=program)

    def pack(self) -> PackedOptions:
        """Return the options as plain values for `extra_args`."""
        return PackedOptions(msgspec.to_builtins(self, builtin_types=(bytes,)))

    @classmethod
    def said(cls, value: Any) -> RequestOptions:
        """Return the options as an HTTP client says them: JSON text, or the object itself. Raises UsageError."""
        if isinstance(value, str):
            try:
                text, value = value.encode(), jsontext.decode(value)
            except (msgspec.DecodeError, UnicodeEncodeError) as e:
                raise UsageError(explain(KEY, got=str(e), expected="a JSON object")) from e
            jsontext.check_keys(text, KEY)
        if not isinstance(value, dict) or set(value) - _TEXT_FIELDS:
            expected = f"an object with some of {', '.join(sorted(_TEXT_FIELDS))}"
            raise UsageError(explain(KEY, got=value, expected=expected))
        return cls.make(**value)

    @classmethod
    def unpack(cls, extra_args: dict[str, Any] | None) -> RequestOptions:
        """Return the options in a request's `extra_args`; none when there are none.

        Takes what `pack` made, and JSON text as HTTP clients send it. Raises UsageError for anything else.
        """
        value = (extra_args or {}).get(KEY)
        if value is None:
            return _NONE
        if isinstance(value, str):
            return cls.said(value)
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as e:
            do = "make it with capflow.sampling_params"
            raise UsageError(explain(KEY, got=str(e), expected="packed options", do=do)) from e


def check_id(id: Any, where: str = "id") -> None:
    """Raise UsageError unless a request may be called so: by text that hubs take."""
    if not isinstance(id, str) or not 0 < len(id) <= limits.REQUEST_ID_LENGTH_MAX or _SURROGATE.search(id):
        raise UsageError(explain(where, got=id, expected=f"1..{limits.REQUEST_ID_LENGTH_MAX} characters of Unicode"))


def check_names(names: Iterable[str], id: str, where: str) -> None:
    """Raise UsageError unless hubs take the names of a request's choices."""
    if max(map(len, names), default=0) > limits.REQUEST_ID_LENGTH_MAX:
        expected = f"{limits.REQUEST_ID_LENGTH_MAX} characters at most, with the number of the choice"
        raise UsageError(explain(where, got=id, expected=expected))


def patched(params: Any) -> RequestOptions | None:
    """Return the options in sampling parameters, as `pack` made them, where patches are among them; None elsewhere."""
    value = (params.extra_args or {}).get(KEY)
    program = value.get("program") if isinstance(value, dict) else None
    return RequestOptions.unpack(params.extra_args) if program is not None and program[_PATCHED] else None


_PATCHED = SteeringProgram.__struct_fields__.index("patched")
_NONE = RequestOptions()
_TEXT_FIELDS = frozenset(("id", "capture", *STEERING_FIELDS))
