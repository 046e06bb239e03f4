"""`capflow.AsyncLLM`: vLLM's asyncio engine with capture and steering."""

from __future__ import annotations

import contextlib
import itertools
import uuid
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

from capflow import limits
from capflow.buffers.policy import POLICY_DEFAULT
from capflow.capture.result import joined
from capflow.divergence import ON_DIVERGENCE_DEFAULT
from capflow.errors import UsageError, explain
from capflow.transport.hub_process import HubProcess
from capflow_engine.compat import engine as compat
from capflow_engine.compat.launch import before_kill
from capflow_engine.compat.versions.surface import ASYNC_LLM

compat.require()
compat.need(ASYNC_LLM)

from vllm import AsyncLLMEngine, RequestOutput, SamplingParams  # noqa: E402 - after the version check
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402

from capflow_engine.llm.arming import arm  # noqa: E402
from capflow_engine.llm.readers import Readers  # noqa: E402
from capflow_engine.llm.results import Askers  # noqa: E402
from capflow_engine.request.dynamic import taken  # noqa: E402
from capflow_engine.request.options import KEY, Ready, RequestOptions  # noqa: E402
from capflow_engine.request.params import Prepared  # noqa: E402
from capflow_engine.request.reach import check_added  # noqa: E402
from capflow_engine.settings import (  # noqa: E402
    SITES_DEFAULT,
    STEERING_BANK_BYTES,
    Outbound,
    Settings,
    engine_arguments,
)
from capflow_engine.steering.applied import Dynamic  # noqa: E402
from capflow_engine.steering.budget import Size  # noqa: E402
from capflow_engine.steering.fit import Fit  # noqa: E402
from capflow_engine.steering.sharing import Sharing  # noqa: E402
from capflow_engine.steering.store import SteeringStore  # noqa: E402


class AsyncLLM(AsyncLLMEngine):  # type: ignore[misc]
    """vLLM's `AsyncLLM` whose requests may capture and be steered; made by `start`.

    steering: the modules that requests may name, and the global state, which steers every request. It refuses what does
        not fit the model.
    """

    steering: SteeringStore
    capflow_settings: Settings
    # The names of the samples of running requests.
    _running: set[str]

    @classmethod
    def start(
        cls,
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
        capture_wait_s: float = limits.CAPTURE_WAIT_S_DEFAULT,
        **kwargs: Any,
    ) -> Self:
        """Start an engine. Call this where the event loop runs; it blocks until the engine is ready.

        The arguments are those of `capflow.LLM`, with one more. All others go to vLLM's `AsyncEngineArgs`.

        capture_wait_s: how long the last output of a request waits for the consumers.

        Raises UsageError for wrong arguments, HubUnreachableError if a named hub does not answer.
        """
        compat.prepare_environment(kwargs)
        armed = arm(
            AsyncEngineArgs,
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
        try:
            self: Self = cls.from_engine_args(
                AsyncEngineArgs(model=model, **engine_arguments(armed.settings), **kwargs)
            )
        except BaseException:
            if armed.hub is not None:
                armed.hub.stop()
            raise
        self.capflow_settings = armed.settings
        self.capflow_model = compat.model_info(self.vllm_config)
        self._capture_wait_s = capture_wait_s
        self._knows_hub = bool(consumers) or hub is not None
        self._asker = Askers(armed.settings)
        self._readers = Readers(armed.settings)
        # Other processes of the engine name requests, too.
        self._prefix = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        self._running = set()
        requests_max = self.vllm_config.scheduler_config.max_num_seqs
        size = Size.of(steering_bank_bytes, self.capflow_model.steered_width, requests_max)
        self._fit = Fit(self.capflow_model, size, armed.saes)
        self.steering = SteeringStore(check=self._fit.check, resolve=self._fit.resolved)
        self._sharing = Sharing.start(armed.settings, self.steering)
        check_added(self, self.vllm_config.model_config.max_model_len)
        if armed.hub is not None:
            self._stop_hub = armed.hub.stop
        self._at_exit = weakref.finalize(self, _end, self.engine_core, armed.hub)
        return self

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str | None = None, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs as vLLM's `generate` does. The last one has `capture_results` and `steering_applied`.

        Both are as in an output of `capflow.LLM`. With the last output, each of `n` samples gets `capture_results` of
        its own, in the output in which it ended: vLLM does not yield it again when other samples end later.

        request_id: vLLM's name of the request; by default that of its parameters, or a new one.
        Raises UsageError for what does not fit the model, the bank or the prompt, for a part of a streaming input that
        asks for capture or steering, and for a request in the engine's own form.
        """
        _check_prompt(prompt)
        name = request_id or f"{self._prefix}-{next(self._numbers)}"
        prepared = Prepared.of(sampling_params, self._fit, self.steering, name)
        await self._readers.check_async([prepared.options])
        names = prepared.options.names
        if not self._running.isdisjoint(names):
            raise UsageError(explain("id", got=prepared.options.id, expected="one that no running request has"))
        self._running.update(names)
        if isinstance(prompt, AsyncGenerator):
            prompt = _checked_parts(prompt)
        outputs = super().generate(prompt, prepared.params, request_id or prepared.options.id, **kwargs)
        dynamic: Dynamic | None = None
        # The newest state of each sample, by its number.
        samples: dict[int, Any] = {}
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    dynamic = taken(output) or dynamic
                    samples.update((sample.index, sample) for sample in output.outputs)
                    if output.finished:
                        await self._add_results(output, samples, prepared.options, dynamic)
                        output.steering_applied = prepared.applied_with(dynamic)
                    yield output
        finally:
            self._running.difference_update(names)

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a request as vLLM's `add_request` does, steered by what holds now. Its outputs have nothing of capflow.

        Raises UsageError as `generate` does.
        """
        _check_prompt(prompt)
        if isinstance(params, SamplingParams) and not isinstance((params.extra_args or {}).get(KEY), Ready):
            params = Prepared.of(params, self._fit, self.steering, request_id).params
            if isinstance(prompt, AsyncGenerator):
                prompt = _checked_parts(prompt)
        return await super().add_request(request_id, prompt, params, *args, **kwargs)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine, then the hub that was started for it, once its consumers took everything.

        A second call does nothing. With `data_parallel_backend="ray"`, vLLM kills the replicas, and rows that wait in
        them are lost. The end of `async with` has them sent first.

        timeout: how long the engine may take, in seconds; by default as long as its hub takes rows, a minute at most.
        """
        if self._at_exit is not None and self._at_exit.detach() is None:
            return
        super().shutdown(timeout=limits.ENGINE_END_S_MAX if timeout is None else timeout)
        if self._sharing is not None:
            self._sharing.close()
        self._stop_hub()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._at_exit is not None and self._at_exit.alive:
            await before_kill(self, "flush_capture")
        self.shutdown()

    # Ends an engine that was not shut down; dead after a shutdown.
    _at_exit: weakref.finalize[Any, Any] | None = None
    _stop_hub: Callable[[], Any] = staticmethod(lambda: None)
    _sharing: Sharing | None = None

    async def _add_results(
        self,
        output: RequestOutput,
        samples: Mapping[int, Any],
        options: RequestOptions,
        dynamic: Dynamic | None,
    ) -> None:
        """Put the results of a request on its last output, and its own on the last state of each sample.

        There are none if no hub is known and the request did not ask for any.
        """
        results = {}
        captures = options.capture is not None
        if captures or self._knows_hub:
            wait_s = self._capture_wait_s
            placed = {} if dynamic is None else dynamic.hubs
            results = await self._asker.ask(options.names, placed, captures=captures, wait_s=wait_s, patient=captures)
        output.capture_results = joined(results)
        for number, sample in samples.items():
            sample.capture_results = results.get(options.names[number], {})


def _end(core: Any, hub: HubProcess | None) -> None:
    """End the engine, then its hub."""
    core.shutdown(timeout=limits.ENGINE_END_S_MAX)
    if hub is not None:
        hub.stop()


def _check_prompt(prompt: Any) -> None:
    """Raise UsageError for a request in the engine's own form: its parameters would replace those of the call."""
    if compat.is_engine_request(prompt):
        do = "give it as text, as tokens, or as vLLM's renderer returns it"
        raise UsageError(explain("prompt", got="an EngineCoreRequest", expected="a prompt", do=do))


async def _checked_parts(parts: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield the parts of a streaming input. Raises UsageError for a part that asks for capture or steering itself."""
    async with contextlib.aclosing(parts):
        async for part in parts:
            if part.sampling_params is not None and KEY in (part.sampling_params.extra_args or {}):
                where = "sampling_params of a part of the input"
                raise UsageError(
                    explain(where, got="capture or steering", expected="none: generate's hold for all parts")
                )
            yield part
