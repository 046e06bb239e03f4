"""What a request in process asks of capflow, put into vLLM's sampling parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from capflow.steering.request import NOTHING
from capflow_engine.compat import engine as compat

compat.require()

from vllm import SamplingParams  # noqa: E402 - only once the version is known to be one that works

from capflow_engine.request.options import KEY, Ready, RequestOptions, check_names  # noqa: E402
from capflow_engine.steering.applied import NOTHING_KEY, Dynamic, SteeringSummary  # noqa: E402
from capflow_engine.steering.fit import Fit  # noqa: E402
from capflow_engine.steering.store import SteeringStore  # noqa: E402


def sampling_params(
    *,
    id: str | None = None,
    capture: Any = None,
    steering_vectors: Any = None,
    prefill_steering_vectors: Any = None,
    decode_steering_vectors: Any = None,
    steering_clamps: Any = None,
    prefill_steering_clamps: Any = None,
    decode_steering_clamps: Any = None,
    steering_patches: Any = None,
    steering_name: Any = None,
    steering_scale: float | None = None,
    steering_module_ref: Any = None,
    **kwargs: Any,
) -> SamplingParams:
    """Return vLLM's `SamplingParams` for a request that captures or is steered.

    id: what the request is called in frames, files and results; by default a new name. capture:
    `{"hooks": {"post_block": [0, 5] or "all"}, "positions": "all", "tag": "mine"}`, for every consumer that takes what requests
    ask for, or one such spec for each consumer by name: `{"filesystem": {"hooks": …}, "duckdb": {"hooks": …}}`.

    steering_vectors: `{"post_block": {12: vector}}` or `{"post_block": {12: {"vector": …, "scale": 2.0}}}`, one vector of
    `hidden_size` numbers (array, tensor or list) for each layer, added to the residual stream at every position; or
    packed, see `capflow.steering.packed`. With `"relative": True` the vector is brought to length 1 and the scale is of the stream's norm. steering_clamps: `{"post_block": {12: {"vector": …, "min": -1.0, "max": 2.0}}}`, with `value`
    instead of both bounds to set the projection, and `strength`; a list for several directions. With `prefill_` or `decode_`
    before it, either holds for prompt positions or generated ones alone. steering_patches: `{"post_block": {12: {"positions":
    [3, -1], "vector": …, "amount": 1.0}}}`, rows that replace the stream's. steering_name: a module of
    the engine's, or `{name: scale}`; steering_scale: its scale. steering_module_ref: both, as `(name, scale)`. See `capflow.steering.request`.

    Everything else goes to `SamplingParams`. Raises UsageError (a ValueError) naming the field that is wrong.
    """
    options = RequestOptions.make(
        id=id,
        capture=capture,
        steering_vectors=steering_vectors,
        prefill_steering_vectors=prefill_steering_vectors,
        decode_steering_vectors=decode_steering_vectors,
        steering_clamps=steering_clamps,
        prefill_steering_clamps=prefill_steering_clamps,
        decode_steering_clamps=decode_steering_clamps,
        steering_patches=steering_patches,
        steering_name=steering_name,
        steering_scale=steering_scale,
        steering_module_ref=steering_module_ref,
    )
    extra_args = {**(kwargs.pop("extra_args", None) or {}), KEY: options.pack()}
    return SamplingParams(extra_args=extra_args, **kwargs)


class Prepared(msgspec.Struct, frozen=True):
    """A request that is ready for the engine.

    options: of it, with its name and all that steers it. applied: what its output says of that; None when it neither asks
    for steering nor is steered.
    """

    params: SamplingParams
    options: RequestOptions
    applied: SteeringSummary | None

    def applied_with(self, dynamic: Dynamic | None) -> SteeringSummary | None:
        """Return what the output says of what steered the request, with what may have while it ran."""
        if dynamic is None:
            return self.applied
        return (self.applied or SteeringSummary(NOTHING_KEY)).beside(dynamic)

    @classmethod
    def of(cls, params: SamplingParams, fit: Fit, store: SteeringStore, name: str) -> Prepared:
        """Return a copy of parameters whose options are checked and compiled.

        store: the modules, and the global state, which is added. name: the request's id if it brings none.
        Raises UsageError for what does not fit the model or the bank.
        """
        asked = RequestOptions.unpack(params.extra_args)
        options = msgspec.structs.replace(asked.compiled(fit, store), id=asked.id or name, samples=params.n)
        check_names(options.names, options.id or name, "id")
        steering, everywhere = asked.steering or NOTHING, store.global_state != NOTHING
        applied = None
        if options.program is not None or steering != NOTHING:
            applied = SteeringSummary.of(options.program, steering, everywhere=everywhere, max_tokens=params.max_tokens)
        clone = params.clone()
        clone.extra_args = {**(params.extra_args or {}), KEY: Ready(options)}
        return cls(clone, options, applied)
