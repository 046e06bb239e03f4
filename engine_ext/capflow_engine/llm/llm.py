"""`capflow.LLM`: vLLM's offline engine with capture and steering."""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from capflow import limits
from capflow.buffers.policy import POLICY_DEFAULT
from capflow.capture.result import joined
from capflow.divergence import ON_DIVERGENCE_DEFAULT
from capflow.errors import UsageError, explain
from capflow.steering.program import SteeringProgram
from capflow.steering.request import Steering
from capflow_engine.compat import engine as compat
from capflow_engine.compat.versions.surface import BEAM_SEARCH

compat.require()

from vllm import LLM as VLLM  # noqa: E402 - after the check of its version
from vllm import RequestOutput  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402

from capflow_engine.llm.arming import arm  # noqa: E402
from capflow_engine.llm.readers import Readers  # noqa: E402
from capflow_engine.llm.results import AllResults  # noqa: E402
from capflow_engine.request.beams import with_program  # noqa: E402
from capflow_engine.request.dynamic import taken  # noqa: E402
from capflow_engine.request.options import RequestOptions  # noqa: E402
from capflow_engine.request.params import Prepared  # noqa: E402
from capflow_engine.request.reach import check_added  # noqa: E402
from capflow_engine.settings import SITES_DEFAULT, STEERING_BANK_BYTES, Outbound, engine_arguments  # noqa: E402
from capflow_engine.steering.budget import Size  # noqa: E402
from capflow_engine.steering.fit import Fit  # noqa: E402
from capflow_engine.steering.sharing import Sharing  # noqa: E402
from capflow_engine.steering.store import SteeringStore  # noqa: E402


class LLM(VLLM):  # type: ignore[misc]
    """A `vllm.LLM` whose requests may capture and be steered. It takes what that takes, and more.

    consumers: consumers to run for this engine, as on the command line (`"filesystem:root=rows"`). A hub is started for
        them; `close` stops it.
    hub: the address of a running hub instead, or of several, which divide the requests among them. By default the
        default address.
    spare_hubs: the addresses of hubs that may start later. From its first answer on, such a hub has its share of new
        requests.
    key: this engine's key, by name or path, for a hub that has one; by default that of `CAPFLOW_KEY`.
    insecure: allows a hub on another machine without keys.
    sites: patterns of the sites that carry a tap.
    steer_sites: patterns of those that can be steered; by default all. The others can only be captured, and leave vLLM
        its fusion of all-reduce and norm.
    policy: what a worker does if its outbound queue is full.
    spool_dir, spool_bytes, spill_fallback: with the policy `spill`, the directory, the bytes of each worker, and what a
        worker does if those are full.
    steering_bank_bytes: the memory for the vectors that steer running requests. A request waits for room in it.
    engine_name: the engine's name in data and at its hubs; by default a random one at each start.
    engine_id: what all processes of one engine are given, new at each start; see `--engine-id` of `capflow serve`.
    on_divergence: what the engine does if its tensor-parallel ranks or pipeline stages steer differently: `warn`,
        `freeze` or `abort`.
    saes: autoencoders by whose features requests may be steered, each `PATH`, `PATH@SITE` or `NAME=PATH@SITE`, as in
        `load_sae`.
    steering: a `SteeringStore`: the modules that requests may name, and the global state, which steers every request of
        `generate`, `chat`, `enqueue` and `enqueue_chat`. It refuses what does not fit the model. A change holds for
        later requests.

    `beam_search` is steered by its argument `steering`. Outputs of `generate`, `chat` and `wait_for_completion` have

    * `capture_results`: the result of each consumer. Each of `n` samples is a request of its own, called `id#0`, `id#1`
      and so on; each of `output.outputs` has its own results.
    * `steering_applied`: the summary of the request's steering; None if it neither asked for steering nor was steered.

    Close it with `close()` or use it as a context manager.
    Raises UsageError for wrong arguments, HubUnreachableError if a named hub does not answer.
    """

    def __init__(
        self,
        model: str,
        *,
        consumers: Sequence[str] = (),
        hub: str | Sequence[str] | None = None,
        spare_hubs: Sequence[str] = (),
        key: str | None = None,
        insecure: bool = False,
        sites: Sequence[str] = SITES_DEFAULT,
        steer_sites: Sequence[str] | None = None,
        policy: str = POLICY_DEFAULT,
        spool_dir: str | None = None,
        spool_bytes: int | None = None,
        spill_fallback: str | None = None,
        steering_bank_bytes: int = STEERING_BANK_BYTES,
        engine_name: str | None = None,
        engine_id: str | None = None,
        on_divergence: str = ON_DIVERGENCE_DEFAULT,
        saes: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        compat.prepare_environment(kwargs)
        # Stops the hub that was started here; also when this object is collected.
        self._stop_hub: Callable[[], Any] = lambda: None
        # Other processes of the engine name requests, too.
        self._prefix = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        # The program of the running beam search; None if it is not steered.
        self._beams: SteeringProgram | None = None
        # How many tokens of an answer each beam has; None while no beams are searched.
        self._generated: int | None = None
        # Enqueued requests, by the names of their outputs.
        self._enqueued: dict[str, Prepared] = {}
        armed = arm(
            EngineArgs,
            model,
            kwargs,
            consumers=consumers,
            hub=hub,
            spare_hubs=spare_hubs,
            key=key,
            insecure=insecure,
            sites=sites,
            steer_sites=steer_sites,
            outbound=Outbound.of(policy, spool_dir, spool_bytes, spill_fallback),
            bank_bytes=steering_bank_bytes,
            engine_name=engine_name,
            engine_id=engine_id,
            on_divergence=on_divergence,
            saes=saes,
        )
        if armed.hub is not None:
            self._stop_hub = weakref.finalize(self, armed.hub.stop)
        self.capflow_settings = settings = armed.settings
        self._results = AllResults(settings)
        self._readers = Readers(settings)
        self._sharing: Sharing | None = None
        try:
            super().__init__(model, **engine_arguments(settings), **kwargs)
            config = self.llm_engine.vllm_config
            self.capflow_model = compat.model_info(config)
            requests_max = config.scheduler_config.max_num_seqs
            size = Size.of(steering_bank_bytes, self.capflow_model.steered_width, requests_max)
            self._fit = Fit(self.capflow_model, size, armed.saes)
            self.steering = SteeringStore(check=self._fit.check, resolve=self._fit.resolved)
            self._sharing = Sharing.start(settings, self.steering)
            check_added(self.llm_engine, config.model_config.max_model_len)
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> list[RequestOutput]:
        """Generate as `vllm.LLM.generate` does; each output has `capture_results` and `steering_applied`."""
        params = self._prepared(sampling_params, 1 if _is_one_prompt(prompts) else len(prompts))
        return self._with_results(super().generate(prompts, [one.params for one in params], **kwargs), params)

    def chat(self, messages: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        """Chat as `vllm.LLM.chat` does; each output has `capture_results` and `steering_applied`."""
        params = self._prepared(sampling_params, _conversations(messages))
        return self._with_results(super().chat(messages, [one.params for one in params], *args, **kwargs), params)

    def enqueue(self, prompts: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> list[str]:
        """Enqueue as `vllm.LLM.enqueue` does, steered by what holds now. `wait_for_completion` returns the outputs."""
        params = self._prepared(sampling_params, 1 if _is_one_prompt(prompts) else len(prompts))
        return self._remembered(super().enqueue(prompts, [one.params for one in params], *args, **kwargs), params)

    def enqueue_chat(self, messages: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> list[str]:
        """Enqueue as `vllm.LLM.enqueue_chat` does, steered by what holds now."""
        params = self._prepared(sampling_params, _conversations(messages))
        return self._remembered(super().enqueue_chat(messages, [one.params for one in params], *args, **kwargs), params)

    def wait_for_completion(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Wait as `vllm.LLM.wait_for_completion` does; each output has `capture_results` and `steering_applied`."""
        return self._with_results(super().wait_for_completion(*args, **kwargs), [])

    def beam_search(
        self, prompts: Any, params: Any, *args: Any, steering: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Search as `vllm.LLM.beam_search` does, steered by `steering` and the global state.

        steering: fields of `sampling_params`, such as `{"decode_steering_vectors": …}`.
        Raises UsageError for what does not fit.
        """
        compat.need(BEAM_SEARCH)
        options = RequestOptions(steering=Steering.parse(steering) if steering else None)
        options.check(self.capflow_model)
        self._beams = self._fit.program(options.steering, self.steering)
        try:
            outputs: list[Any] = super().beam_search(prompts, params, *args, **kwargs)
        finally:
            self._beams = self._generated = None
        return outputs

    def close(self) -> None:
        """Stop the engine, then the hub that was started for it, once its consumers took everything."""
        engine = getattr(self, "llm_engine", None)
        if engine is not None:
            engine.engine_core.shutdown(timeout=limits.ENGINE_END_S_MAX)
            del self.llm_engine
        self._results.close()
        if self._sharing is not None:
            self._sharing.close()
        self._stop_hub()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _beam_search_step(self, instances_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._generated = compat.generated_by_beams(instances_batch)
        return super()._beam_search_step(instances_batch, *args, **kwargs)

    def _render_and_run_requests(self, prompts: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if self._generated is not None:
            params = [with_program(one, self._beams, self._generated) for one in params]
        return super()._render_and_run_requests(prompts, params, *args, **kwargs)

    def _prepared(self, params: Any, count: int) -> list[Prepared]:
        """Return one checked copy of the parameters for each prompt, each with a name of its own."""
        if params is None:
            params = self.get_default_sampling_params()
        many = list(params) if isinstance(params, Sequence) else [params] * count
        own = [f"{self._prefix}-{next(self._numbers)}" for _ in many]
        prepared = Prepared.each(many, self._fit, self.steering, own)
        names = [one.options.id for one in (*self._enqueued.values(), *prepared)]
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise UsageError(explain("id", got=f"{twice} more than once", expected="a different id for each request"))
        self._readers.check([one.options for one in prepared])
        return prepared

    def _remembered(self, keys: list[str], params: list[Prepared]) -> list[str]:
        self._enqueued.update(zip(map(compat.outside_id, keys), params, strict=True))
        return keys

    def _with_results(self, outputs: list[Any], params: list[Prepared]) -> list[Any]:
        """Return outputs with the results of their requests.

        params: of the requests that were not enqueued before, in order.
        """
        compat.flush(self.llm_engine)
        others = iter(params)
        prepared = [self._enqueued.get(output.request_id) or next(others) for output in outputs]
        self._enqueued.clear()  # vLLM runs all that was enqueued
        reports = [taken(output) for output in outputs]
        placed = {name: hub for report in reports if report is not None for name, hub in report.hubs.items()}
        results = self._results.ask([one.options for one in prepared], placed)
        for output, one, report in zip(outputs, prepared, reports, strict=True):
            names = one.options.names
            for name, sample in zip(names, output.outputs, strict=True):
                sample.capture_results = results.get(name, {})
            output.capture_results = joined({name: results[name] for name in names if name in results})
            output.steering_applied = one.applied_with(report)
        return outputs


def _conversations(messages: Any) -> int:
    """Return how many conversations vLLM takes `messages` as: one, or a list of them."""
    return 1 if messages and isinstance(messages[0], dict) else len(messages)


def _is_one_prompt(prompts: Any) -> bool:
    """Return whether vLLM takes `prompts` as one prompt: a string, a dict, or a list of token ids."""
    if isinstance(prompts, str | dict):
        return True
    return bool(prompts) and isinstance(prompts[0], int)
