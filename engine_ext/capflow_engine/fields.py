"""The fields that a request over HTTP has for capflow, and what they come to.

`capture`, `capture_id`, `capture_wait` and `steering` stand at the top level of the body. `vllm_xargs` may carry the same as
JSON text under `capflow`. What always holds: what `Asked.parse` returns fits the model and its taps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.message import ModelInfo
from capflow_engine.options import KEY, RequestOptions

XARGS = f"vllm_xargs.{KEY}"
_PATH = re.compile(r"[\w.-]+")


class Asked(msgspec.Struct, frozen=True, weakref=True):
    """What one HTTP request asks for. wait: whether its response waits for the consumers; None when it says nothing of it.

    options: of each of its prompts, by order.
    """

    options: tuple[RequestOptions, ...]
    wait: bool | None

    @property
    def reports(self) -> bool:
        """Whether the response says what became of the capture."""
        return self.wait is not None or self.options[0].capture is not None

    @property
    def names(self) -> tuple[str, ...]:
        """What its choices are called, by choice index."""
        return tuple(name for options in self.options for name in options.names)

    @classmethod
    def parse(
        cls, fields: Mapping[str, Any], xargs: Any, info: ModelInfo, *, id: str, prompts: int, samples: int
    ) -> Asked:
        """Return what is asked for by the fields of a body, and by `vllm_xargs`' own if that is not None.

        id: what the request is called when it does not say so itself. prompts: how many it has, called `id#0`, `id#1`
        and so on when there are several. samples: of each prompt.

        Raises UsageError that begins with the path of the field that is wrong.
        """
        capture, steering, name, wait = (
            fields.get(field) for field in ("capture", "steering", "capture_id", "capture_wait")
        )
        if wait is not None and not isinstance(wait, bool):
            raise UsageError(explain("capture_wait", got=wait, expected="true or false"))
        if xargs is not None:
            if any(value is not None for value in (capture, steering, name)):
                raise UsageError(explain(XARGS, expected="nothing, beside fields of the body that say the same"))
            try:
                options = RequestOptions.unpack({KEY: xargs})
                _check(options, info)
            except UsageError as e:
                raise UsageError(f"{'vllm_xargs' if str(e).startswith(KEY) else XARGS}.{e}") from e
        else:
            if name is not None and (not isinstance(name, str) or not 0 < len(name) <= limits.REQUEST_ID_LENGTH_MAX):
                expected = f"1..{limits.REQUEST_ID_LENGTH_MAX} characters"
                raise UsageError(explain("capture_id", got=name, expected=expected))
            _bound(steering, info)
            options = RequestOptions.make(id=name, capture=capture, steering=steering)
            _check(options, info)
        base = options.id or id
        names = [base] if prompts == 1 else [f"{base}#{n}" for n in range(prompts)]
        each = tuple(msgspec.structs.replace(options, id=one, samples=samples) for one in names)
        if any(len(one) > limits.REQUEST_ID_LENGTH_MAX for options in each for one in options.names):
            expected = f"{limits.REQUEST_ID_LENGTH_MAX} characters at most, with the number of the choice"
            raise UsageError(explain("capture_id", got=base, expected=expected))
        return cls(each, wait)


def path_of(error: UsageError) -> str | None:
    """Return the path of the field that an error is about: what its message begins with."""
    found = _PATH.match(str(error))
    return found[0].rstrip(".") if found is not None else None


def _check(options: RequestOptions, info: ModelInfo) -> None:
    options.check(info)
    if options.samples != 1:
        raise UsageError(explain("samples", got=options.samples, expected="to be left out; `n` says it"))


def _bound(steering: Any, info: ModelInfo) -> None:
    """Raise UsageError for more vectors than there are sites, or longer ones, before any is looked into."""
    if not isinstance(steering, Mapping):
        return
    count = 0
    for hook, layers in steering.items():
        for layer, entry in layers.items() if isinstance(layers, Mapping) else ():
            count += 1
            vector = entry.get("vector") if isinstance(entry, Mapping) else entry
            if isinstance(vector, list) and len(vector) != info.hidden_size:
                expected = f"{info.hidden_size}, the model's width"
                got = f"{len(vector)} numbers"
                raise UsageError(explain(f"steering.{hook}.{layer}", got=got, expected=expected))
    if count > len(info.sites):
        expected = f"at most {len(info.sites)}, one for each tapped site"
        raise UsageError(explain("steering", got=f"{count} vectors", expected=expected))
