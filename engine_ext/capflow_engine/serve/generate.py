"""The engine's `generate`, as vLLM's routes call it: with options that capflow's routes parsed, or the global state.

Invariant: the global state steers all that vLLM generates in this process, on every route.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import msgspec

from capflow.steering.request import NOTHING
from capflow_engine.compat import engine as compat
from capflow_engine.request.beams import BEAMS
from capflow_engine.request.dynamic import taken
from capflow_engine.request.options import KEY, PackedOptions
from capflow_engine.request.reach import check_params
from capflow_engine.serve.ask import ParsedRequest
from capflow_engine.serve.front import Front

_BROUGHT: ContextVar[Iterator[PackedOptions] | None] = ContextVar("capflow_brought", default=None)
"""The options of each prompt, for a route of vLLM's that makes a new body from the request's."""


@contextlib.contextmanager
def bringing(body: Any, ask: ParsedRequest) -> Iterator[None]:
    """Give the prompts of a body the options that were parsed for them, while the block runs vLLM's handler."""
    body.options = options = ask.packed()
    token = _BROUGHT.set(options)
    try:
        yield
    finally:
        _BROUGHT.reset(token)


def steering(front: Front, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return an engine's `generate` that applies the global state to requests that no route of capflow parsed.

    It raises UsageError before any answer for patches of positions that the request never computes.
    """

    @functools.wraps(generate)
    def steered(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        beams = BEAMS.get()
        params = beams.steered(prompt, sampling_params) if beams is not None else _steered(front, sampling_params)
        length = compat.rendered_length(prompt)
        if length is not None:
            check_params(params, length, front.length_max)
        return _heard(front, generate(prompt, params, *args, **kwargs), params)

    return steered


def _steered(front: Front, params: Any) -> Any:
    """Return sampling parameters with all that steers their request.

    Raises UsageError for options in a form that only the server's own routes may use.
    """
    packed = (params.extra_args or {}).get(KEY)
    if isinstance(packed, PackedOptions):
        return params
    brought = _BROUGHT.get()
    if brought is not None:
        return _with_options(params, next(brought))
    if packed is None and front.store.global_state == NOTHING:
        return params
    (options,) = ParsedRequest.parse({}, packed, front.fit, front.store, id="", prompts=1, samples=params.n).options
    return _with_options(params, msgspec.structs.replace(options, id=options.id or None).pack())


def _with_options(params: Any, options: PackedOptions) -> Any:
    params = copy.copy(params)
    params.extra_args = {**(params.extra_args or {}), KEY: options}
    return params


async def _heard(front: Front, outputs: Any, params: Any) -> AsyncIterator[Any]:
    """Yield vLLM's outputs. Their reports for capflow go to the front."""
    packed = (params.extra_args or {}).get(KEY)
    name = None if packed is None else packed.options.id
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            dynamic = taken(output)
            if dynamic is not None and name is not None:
                front.hear(name, dynamic)
            yield output
