"""What one request asks of capflow: what travels in `SamplingParams.extra_args["capflow"]`.

In process it is a plain dict of msgpack types, made by `RequestOptions.pack`; over HTTP it is the same as JSON text in
`vllm_xargs`, without the packed vectors' bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.message import ModelInfo
from capflow.spec import CaptureSpec
from capflow.vector import SteeringVector, parse_steering

KEY = "capflow"


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one request asks for.

    id: what the request is called in frames and files, unique among running ones. capture: what to capture of it for
    consumers that read requests' own specs. steering: what is added to its stream. samples: how many samples are asked
    for, each of which is a request of its own, called `id#0`, `id#1` and so on when there are several.
    """

    id: str | None = None
    capture: CaptureSpec | None = None
    steering: tuple[SteeringVector, ...] = ()
    samples: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """What the samples are called; nothing when they were given no id."""
        if self.id is None:
            return ()
        return (self.id,) if self.samples == 1 else tuple(f"{self.id}#{n}" for n in range(self.samples))

    @classmethod
    def make(cls, *, id: str | None = None, capture: Any = None, steering: Any = None) -> RequestOptions:
        """Return the options that plain values describe; raise UsageError naming the field that is wrong."""
        if id is not None and (not isinstance(id, str) or not 0 < len(id) <= limits.REQUEST_ID_LENGTH_MAX):
            raise UsageError(explain("id", got=id, expected=f"1..{limits.REQUEST_ID_LENGTH_MAX} characters"))
        return cls(
            id=id,
            capture=None if capture is None else CaptureSpec.parse(capture),
            steering=() if steering is None else parse_steering(steering),
        )

    def check(self, info: ModelInfo) -> None:
        """Raise UsageError unless everything fits the model and its taps."""
        if self.capture is not None:
            self.capture.resolve(info.sites, num_layers=info.num_layers)
        seen = set()
        for vector in self.steering:
            if not 0 <= vector.layer < info.num_layers:
                expected = f"0..{info.num_layers - 1}"
                raise UsageError(explain(f"steering.{vector.hook}", got=f"layer {vector.layer}", expected=expected))
            vector.check(info.sites, info.hidden_size)
            if vector.site in seen:
                raise UsageError(explain("steering", got=f"two vectors at {vector.site}", expected="one for each site"))
            seen.add(vector.site)

    def pack(self) -> dict[str, Any]:
        """Return the options as plain values for `extra_args`."""
        packed: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return packed

    @classmethod
    def unpack(cls, extra_args: dict[str, Any] | None) -> RequestOptions:
        """Return the options in a request's `extra_args`; none when there are none.

        Takes what `pack` made, and JSON text as HTTP clients send it. Raises UsageError for anything else.
        """
        value = (extra_args or {}).get(KEY)
        if value is None:
            return _NONE
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError) as e:
                raise UsageError(explain(KEY, got=str(e), expected="a JSON object")) from e
            if not isinstance(value, dict) or set(value) - {"id", "capture", "steering"}:
                raise UsageError(explain(KEY, got=value, expected="an object with some of id, capture, steering"))
            return cls.make(**value)
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as e:
            do = "make it with capflow.sampling_params"
            raise UsageError(explain(KEY, got=str(e), expected="packed options", do=do)) from e


_NONE = RequestOptions()
