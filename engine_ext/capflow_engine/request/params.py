"""vLLM's sampling parameters with what a request in Python asks of capflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from capflow.steering.request import NOTHING
from capflow_engine.compat import engine as compat

compat.require()

from vllm import SamplingParams  # noqa: E402 - after the check of its version

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
    steering_features: Any = None,
    prefill_steering_features: Any = None,
    decode_steering_features: Any = None,
    steering_patches: Any = None,
    steering_gates: Any = None,
    steering_name: Any = None,
    steering_scale: float | None = None,
    steering_module_ref: Any = None,
    **kwargs: Any,
) -> SamplingParams:
    """Return vLLM's `SamplingParams` for a request that captures or is steered.

    id: the request's name in frames, files and results; by default a new name.
    capture: a spec for every consumer that reads requests' specs:
        `{"hooks": {"post_block": [0, 5] or "all"}, "positions": "all", "tag": "mine"}`. Or one spec for each consumer
        by name: `{"filesystem": {"hooks": …}, "duckdb": {"hooks": …}}`.
    steering_vectors: `{"post_block": {12: vector}}` or `{"post_block": {12: {"vector": …, "scale": 2.0}}}`. One vector
        of `hidden_size` numbers (array, tensor or list) for each layer is added to the residual stream at every
        position. With `"relative": True` the vector has length 1 and the scale is relative to the stream's norm. The
        packed form is described in `capflow.steering.packed`.
    prefill_steering_vectors, decode_steering_vectors: the same at the prompt's or at generated positions only.
    steering_clamps: `{"post_block": {12: {"vector": …, "min": -1.0, "max": 2.0}}}`, or for heads, neurons and experts
        `{"heads": {12: {"index": [3, 5], "value": 0}}}`. `value` instead of both bounds sets
        the projection; `strength` scales the change; a list holds several directions.
    prefill_steering_clamps, decode_steering_clamps: the same at the prompt's or at generated positions only.
    steering_features: `{"sae": "mood", "features": {"123": 4.0, "7": {"set": 0}}}`: features of a sparse autoencoder
        that the engine knows by name. A number adds as much of the feature's decoder row; `set` sets its activation.
    prefill_steering_features, decode_steering_features: the same at the prompt's or at generated positions only.
    steering_patches: `{"post_block": {12: {"positions": [3, -1], "vector": …, "amount": 1.0}}}`: rows that replace the
        stream's.
    steering_gates: `{"rude": {"hook": "post_block", "layer": 9, "vector": …, "threshold": 1.5}}`: probes that decide
        where vectors, clamps and patches with `"gate": "rude"` act. `capflow.steering.gate` describes them.
    steering_name: a module of the engine, or `{name: scale}`.
    steering_scale: the module's scale.
    steering_module_ref: both, as `(name, scale)`.

    `capflow.steering.request` describes the fields. All other arguments go to `SamplingParams`.
    Raises UsageError (a ValueError) that names the wrong field.
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
        steering_features=steering_features,
        prefill_steering_features=prefill_steering_features,
        decode_steering_features=decode_steering_features,
        steering_patches=steering_patches,
        steering_gates=steering_gates,
        steering_name=steering_name,
        steering_scale=steering_scale,
        steering_module_ref=steering_module_ref,
    )
    extra_args = {**(kwargs.pop("extra_args", None) or {}), KEY: options.pack()}
    return SamplingParams(extra_args=extra_args, **kwargs)


class Prepared(msgspec.Struct, frozen=True):
    """A request that is ready for the engine.

    params: vLLM's sampling parameters, with the options packed.
    options: the request's, with its name and its compiled steering.
    applied: the summary of its steering for its output; None if it neither asks for steering nor is steered.
    """

    params: SamplingParams
    options: RequestOptions
    applied: SteeringSummary | None

    def applied_with(self, dynamic: Dynamic | None) -> SteeringSummary | None:
        """Return the output's summary of the steering, with what may have steered the request while it ran."""
        if dynamic is None or not dynamic.steers:
            return self.applied
        return (self.applied or SteeringSummary(NOTHING_KEY)).beside(dynamic)

    @classmethod
    def of(cls, params: SamplingParams, fit: Fit, store: SteeringStore, name: str) -> Prepared:
        """Return a copy of parameters whose options are checked and compiled.

        store: the modules, and the global state, which is added.
        name: the request's id if it brings none.
        Raises UsageError for what does not fit the model or the bank.
        """
        return cls.each([params], fit, store, [name])[0]

    @classmethod
    def each(
        cls, many: Sequence[SamplingParams], fit: Fit, store: SteeringStore, names: Sequence[str]
    ) -> list[Prepared]:
        """Return a copy of each parameters, as `of` does. Those that several requests share are compiled once."""
        compiled: dict[int, tuple[RequestOptions, SteeringSummary | None]] = {}
        prepared = []
        for params, name in zip(many, names, strict=True):
            if id(params) not in compiled:
                compiled[id(params)] = _compiled(params, fit, store)
            options, applied = compiled[id(params)]
            options = msgspec.structs.replace(options, id=options.id or name, samples=params.n)
            check_names(options.names, options.id or name, "id")
            clone = params.clone()
            clone.extra_args = {**(params.extra_args or {}), KEY: Ready(options)}
            prepared.append(cls(clone, options, applied))
        return prepared


def _compiled(params: SamplingParams, fit: Fit, store: SteeringStore) -> tuple[RequestOptions, SteeringSummary | None]:
    """Return the options in parameters, checked and compiled, and the summary of their steering, if there is any."""
    asked = RequestOptions.unpack(params.extra_args)
    options = asked.compiled(fit, store)
    steering, everywhere = asked.steering or NOTHING, store.global_state != NOTHING
    if options.program is None and steering == NOTHING:
        return options, None
    return options, SteeringSummary.of(options.program, steering, everywhere=everywhere, max_tokens=params.max_tokens)
