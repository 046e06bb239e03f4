"""`capflow.LLM`: vLLM's offline engine with capture and steering, and `sampling_params` for its requests."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec

from capflow import limits
from capflow.address import default_address
from capflow.client import Client
from capflow.consumer import OutboundPolicy, Policy
from capflow.errors import HubUnreachableError, UsageError, explain
from capflow.launch import HubProcess
from capflow.result import CaptureResult, joined
from capflow_engine import compat

compat.require()

from vllm import LLM as VLLM  # noqa: E402 - only once the version is known to be one that works
from vllm import RequestOutput, SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402

from capflow_engine import compat_model  # noqa: E402
from capflow_engine.holdings import Size  # noqa: E402
from capflow_engine.options import KEY, RequestOptions  # noqa: E402
from capflow_engine.settings import SITES_DEFAULT, STEERING_BANK_BYTES, Settings, engine_arguments, spool_directory  # noqa: E402
from capflow_engine.store import SteeringStore  # noqa: E402

logger = logging.getLogger("vllm.capflow")

_RESULTS_WAIT_S = 120.0
_LAUNCH_WAIT_S = 60.0
_NO_HUB_S = 60.0


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
    **kwargs: Any,
) -> SamplingParams:
    """Return vLLM's `SamplingParams` for a request that captures or is steered.

    id: what the request is called in frames, files and results; by default a new name. capture:
    `{"hooks": {"post_block": [0, 5] or "all"}, "positions": "all"}`, for consumers that take what requests ask for.

    steering_vectors: `{"post_block": {12: vector}}` or `{"post_block": {12: {"vector": …, "scale": 2.0}}}`, one vector of
    `hidden_size` numbers (array, tensor or list) for each layer, added to the residual stream at every position; or
    packed, see `capflow.packed`. steering_clamps: `{"post_block": {12: {"vector": …, "min": -1.0, "max": 2.0}}}`, with `value`
    instead of both bounds to set the projection, and `strength`; a list for several directions. With `prefill_` or `decode_`
    before it, either holds for prompt positions or generated ones alone. steering_patches: `{"post_block": {12: {"positions":
    [3, -1], "vector": …, "amount": 1.0}}}`, rows that replace the stream's. steering_name: a module of
    the engine's, or `{name: scale}`; steering_scale: its scale. See `capflow.steering`.

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
    )
    extra_args = {**(kwargs.pop("extra_args", None) or {}), KEY: options.pack()}
    return SamplingParams(extra_args=extra_args, **kwargs)


class LLM(VLLM):  # type: ignore[misc]
    """A `vllm.LLM` whose requests may capture and be steered. It takes what that takes, and more.

    consumers: consumers to run for this engine, as on the command line (`"filesystem:root=rows"`); a hub is started
    for them and stopped with `close`. hub: the address of a running hub instead. Without either, the default
    address is used. sites: patterns of the sites that carry a tap. policy: what a worker does when its
    outbound queue is full; with `spill`, spool_dir, spool_bytes and spill_fallback say where to, how much for each worker, and what
    holds then. steering_bank_bytes: the memory for the vectors that steer the requests which run; a request waits
    for room in it.

    steering: the modules that requests may name, and the global state, which steers every request of `generate` and `chat`
    besides; a `SteeringStore`. What is changed there holds for requests that come later.

    Outputs of `generate` and `chat` have `capture_results`: by consumer, what became of the request's rows. With `n` samples
    each is a request of its own, called `id#0`, `id#1`, …; each of `output.outputs` has its own results too.
    Close it with `close()` or use it as a context manager.

    Raises UsageError for wrong arguments and HubUnreachableError when `hub` was named and does not answer.
    """

    def __init__(
        self,
        model: str,
        *,
        consumers: Sequence[str] = (),
        hub: str | None = None,
        sites: Sequence[str] = SITES_DEFAULT,
        policy: OutboundPolicy = "block",
        spool_dir: str | None = None,
        spool_bytes: int = limits.SPOOL_BYTES_DEFAULT,
        spill_fallback: Policy = "block",
        steering_bank_bytes: int = STEERING_BANK_BYTES,
        **kwargs: Any,
    ) -> None:
        for name in ("worker_cls", "scheduler_cls"):
            if name in kwargs:
                raise UsageError(explain(name, got=kwargs[name], expected="to be left out; capflow brings its own"))
        compat.prepare_environment(kwargs)
        self._stop_hub: Callable[[], Any] = lambda: None  # stops the hub started here; also when this is collected
        self._client: Client | None = None
        self._no_hub_until = 0.0  # for how long nobody looks for a hub that was not there, on the clock of `monotonic`
        self._numbers = itertools.count()
        self.steering = SteeringStore()
        user = dict(kwargs.pop("additional_config", None) or {})
        tapped = compat_model.check_model(EngineArgs(model=model, **kwargs), sites)
        if consumers and hub is not None:
            raise UsageError(explain("LLM: both hub and consumers", do="give consumers to the hub with `capflow run`"))
        if consumers:
            process = HubProcess(consumers)
            process.start(_LAUNCH_WAIT_S)
            self._stop_hub = weakref.finalize(self, process.stop)
            hub = process.address
        elif hub is not None:
            with Client(hub):  # raises when nobody answers
                pass
        settings = Settings(
            engine=uuid.uuid4().hex,
            hub=hub or default_address(),
            sites=tapped.sites,
            fixed=tapped.fixed,
            policy=policy,
            spool_dir=spool_directory(policy, spool_dir),
            spool_bytes=spool_bytes,
            spill_fallback=spill_fallback,
            steering_bank_bytes=steering_bank_bytes,
            hub_wait_s=_LAUNCH_WAIT_S if hub is not None else 0.5,
            user=user,
        )
        self.capflow_settings = settings
        try:
            super().__init__(model, **engine_arguments(settings), **kwargs)
            config = self.llm_engine.vllm_config
            self.capflow_model = compat.model_info(config)
            self._bank_size = Size.of(
                steering_bank_bytes, self.capflow_model.hidden_size, config.scheduler_config.max_num_seqs
            )
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> list[RequestOutput]:
        """Generate as `vllm.LLM.generate` does; each output has `capture_results`."""
        params = self._prepared(sampling_params, 1 if _is_one_prompt(prompts) else len(prompts))
        return self._with_results(super().generate(prompts, params, **kwargs), params)

    def chat(self, messages: Any, sampling_params: Any = None, **kwargs: Any) -> list[RequestOutput]:
        """Chat as `vllm.LLM.chat` does; each output has `capture_results`."""
        one = bool(messages) and isinstance(messages[0], dict)
        params = self._prepared(sampling_params, 1 if one else len(messages))
        return self._with_results(super().chat(messages, params, **kwargs), params)

    def close(self) -> None:
        """Stop the engine, then the hub that was started for it, once its consumers took everything."""
        engine = getattr(self, "llm_engine", None)
        if engine is not None:
            engine.engine_core.shutdown()
            del self.llm_engine
        if self._client is not None:
            self._client.close()
            self._client = None
        self._stop_hub()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _prepared(self, params: Any, count: int) -> list[SamplingParams]:
        """Return one copy of the parameters for each prompt, checked, each with a name of its own."""
        if params is None:
            params = self.get_default_sampling_params()
        many = list(params) if isinstance(params, Sequence) else [params] * count
        prepared = []
        for one in many:
            options = RequestOptions.unpack(one.extra_args)
            options.check(self.capflow_model)
            options = options.resolved(self.capflow_model, self.steering)
            self._bank_size.check(options.program)
            name = options.id or f"{self.capflow_settings.engine[:8]}-{next(self._numbers)}"
            clone = one.clone()
            clone.extra_args = {
                **(one.extra_args or {}),
                KEY: msgspec.structs.replace(options, id=name, samples=one.n).pack(),
            }
            prepared.append(clone)
        names = [n for p in prepared if (n := RequestOptions.unpack(p.extra_args).id) is not None]
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise UsageError(explain("id", got=f"{twice} more than once", expected="a different id for each request"))
        return prepared

    def _with_results(self, outputs: list[Any], params: list[SamplingParams]) -> list[Any]:
        compat.flush(self.llm_engine)
        options = [RequestOptions.unpack(p.extra_args) for p in params]
        found = self._results([o for o in options if o.id is not None])
        for output, its in zip(outputs, options, strict=True):
            for name, sample in zip(its.names, output.outputs, strict=True):
                sample.capture_results = found.get(name, {})
            output.capture_results = joined({name: found[name] for name in its.names if name in found})
        return outputs

    def _results(self, options: Sequence[RequestOptions]) -> dict[str, dict[str, CaptureResult]]:
        """Return what became of the requests of which rows were wanted, by id; nothing when there is no hub."""
        asked = any(o.capture is not None for o in options)
        if self._client is None and not asked and time.monotonic() < self._no_hub_until:
            return {}
        try:
            if self._client is None:
                self._client = Client(self.capflow_settings.hub)
                self._client.__enter__()
            everything = bool(self._client.captures)
            names = [name for o in options if everything or o.capture is not None for name in o.names]
            if not names:
                return {}
            return self._client.results(names, wait=True, timeout=_RESULTS_WAIT_S)
        except HubUnreachableError as e:
            if asked or not self._no_hub_until:
                logger.warning("%s; the results of captures are not known", e)
            self._no_hub_until = time.monotonic() + _NO_HUB_S
            if self._client is not None:
                self._client.close()
            self._client = None
            return {}


def _is_one_prompt(prompts: Any) -> bool:
    """Return whether vLLM takes `prompts` as one prompt: a string, a dict, or a list of token ids."""
    if isinstance(prompts, str | dict):
        return True
    return bool(prompts) and isinstance(prompts[0], int)
