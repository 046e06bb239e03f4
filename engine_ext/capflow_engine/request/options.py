"""What one request asks of capflow. It travels in `SamplingParams.extra_args["capflow"]`.

`RequestOptions.pack` makes three pieces of bytes of it: the program's rows, the rest of the program, and the rest of
the options. vLLM's processes copy bytes, and need not make objects of them. Over HTTP it is JSON text in
`vllm_xargs`, where packed vectors are base64.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Self

import msgspec

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.spec import Capture, parse_capture
from capflow.errors import UsageError, explain
from capflow.steering.program import SteeringProgram
from capflow.steering.request import STEERING_FIELDS, Steering
from capflow.text import jsontext
from capflow.text.brief import brief
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.store import SteeringStore

KEY = "capflow"
_NO_MODULES = SteeringStore()
# Half of a surrogate pair; text with one cannot be sent.
_SURROGATE = re.compile("[\ud800-\udfff]")


class PackedOptions(dict[str, Any]):
    """The bytes of options that this process made, and those options themselves.

    vLLM sends the bytes to its engine; this process reads the options. What a client sent is a plain dict or text.
    """

    def __init__(self, options: RequestOptions) -> None:
        program = options.program
        super().__init__(options=_encoder.encode(options.without_program()))
        if program is not None:
            self.update(program=program.head, rows=program.rows)
        self.options = options

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # vLLM copies parameters; options never change


class Ready(PackedOptions):
    """Packed options whose steering is compiled: a front end adds nothing to them."""


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one request asks for.

    id: the request's name in frames and files, unique among running requests.
    capture: what to capture of it, for all consumers that read requests' own specs, or for each by name.
    steering: the steering that the request asks for; None after it is compiled.
    program: all that steers it, compiled.
    samples: how many samples are asked for. Each of several is a request of its own, called `id#0`, `id#1` and so on.
    generated: how many of the prompt's last tokens are a beam's answer so far, and are steered as such. Each token of a
        beam is a request of its own. None for any other request.
    """

    id: str | None = None
    capture: Capture | None = None
    steering: Steering | None = None
    program: SteeringProgram | None = None
    samples: int = 1
    generated: int | None = None

    __repr__ = brief

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle is slow with structs. It writes a program once that several requests have.
        return _decoded, (_encoder.encode(self.without_program()), self.program)

    def without_program(self) -> RequestOptions:
        """Return the options without their program."""
        return self if self.program is None else msgspec.structs.replace(self, program=None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the samples; empty if the request has no id."""
        if self.id is None:
            return ()
        return (self.id,) if self.samples == 1 else tuple(f"{self.id}#{n}" for n in range(self.samples))

    @classmethod
    def make(cls, *, id: str | None = None, capture: Any = None, **steering: Any) -> RequestOptions:
        """Return the options that plain values describe. Raises UsageError that names the wrong field.

        steering: fields of `capflow.steering.request.STEERING_FIELDS`; None is as if the field was not given.
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

    def compiled(self, fit: Fit, store: SteeringStore = _NO_MODULES) -> RequestOptions:
        """Return the options, checked, with the program of all that steers the request: its own and the store's.

        A program that the options already have is checked and stays. Raises UsageError for what does not fit the model
        or the bank, UnknownModuleError for a module that the store does not have.
        """
        self.check(fit.info)
        program = self.program
        if program is None:
            program = fit.program(self.steering, store)
        else:
            fit.size.check(program)
        return msgspec.structs.replace(self, steering=None, program=program)

    def pack(self) -> PackedOptions:
        """Return the options as plain values for `extra_args`."""
        return PackedOptions(self)

    @classmethod
    def from_client(cls, value: Any) -> RequestOptions:
        """Return the options that an HTTP client sent: JSON text, or the object itself. Raises UsageError."""
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
        """Return the options in a request's `extra_args`; empty ones if there are none.

        Accepts what `pack` made, here or in another process, and JSON text as HTTP clients send it. Raises UsageError
        for anything else.
        """
        value = (extra_args or {}).get(KEY)
        if value is None:
            return _NONE
        if isinstance(value, PackedOptions):
            return value.options
        if isinstance(value, str):
            return cls.from_client(value)
        try:
            packed = msgspec.convert(value, _Packed, builtin_types=(bytes,))
            program = None if packed.program is None else SteeringProgram.unpack(packed.program, packed.rows)
            return _decoded(packed.options, program)
        except msgspec.MsgspecError as e:
            do = "make it with capflow.sampling_params"
            raise UsageError(explain(KEY, got=str(e), expected="packed options", do=do)) from e


def check_id(id: Any, where: str = "id") -> None:
    """Raise UsageError unless `id` may be the id of a request: text that hubs accept."""
    if not isinstance(id, str) or not 0 < len(id) <= limits.REQUEST_ID_LENGTH_MAX or _SURROGATE.search(id):
        raise UsageError(explain(where, got=id, expected=f"1..{limits.REQUEST_ID_LENGTH_MAX} characters of Unicode"))


def check_names(names: Iterable[str], id: str, where: str) -> None:
    """Raise UsageError unless hubs accept the names of a request's choices."""
    if max(map(len, names), default=0) > limits.REQUEST_ID_LENGTH_MAX:
        expected = f"{limits.REQUEST_ID_LENGTH_MAX} characters at most, with the number of the choice"
        raise UsageError(explain(where, got=id, expected=expected))


class _Packed(msgspec.Struct, forbid_unknown_fields=True):
    """The pieces of `PackedOptions`."""

    options: bytes
    program: bytes | None = None
    rows: bytes = b""


def _decoded(data: bytes, program: SteeringProgram | None) -> RequestOptions:
    options = _decoder.decode(data)
    return options if program is None else msgspec.structs.replace(options, program=program)


_NONE = RequestOptions()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestOptions)
_TEXT_FIELDS = frozenset(("id", "capture", *STEERING_FIELDS))
