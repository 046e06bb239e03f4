"""The class that vLLM is given as `scheduler_cls`.

`CaptureScheduler`, called with vLLM's arguments, returns vLLM's own scheduler (async or not, as configured) with
`Captured` mixed in. `Captured` reports every event of vLLM's scheduler to an `Admission`.
"""

from __future__ import annotations

from typing import Any

from capflow_engine.compat import cache as compat_cache
from capflow_engine.compat import connectors
from capflow_engine.compat import engine as compat
from capflow_engine.compat import step as compat_step
from capflow_engine.compat import weights as compat_weights
from capflow_engine.compat.waiting import holding_back
from capflow_engine.scheduler.admission import Admission
from capflow_engine.scheduler.calls import answer
from capflow_engine.stepclock import SCHEDULER


class Captured:
    """Mixed in before vLLM's scheduler; its state is the `Admission` in `self.capflow`."""

    def __init__(self, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        super().__init__(*args, vllm_config=vllm_config, **kwargs)  # type: ignore[call-arg]
        compat.let_workers_end()
        compat.call_before_kill("end_capture")
        compat.take_sigterm_from_ray()
        compat.take_calls(answer)
        compat_weights.watch(_change_weights)
        compat_cache.limit_reads(self)
        connectors.limit_loads(self)
        self.capflow = Admission(vllm_config, hash_block_size=kwargs.get("hash_block_size") or kwargs["block_size"])

    def add_request(self, request: Any) -> None:
        """Admit a request; vLLM's scheduler takes it from here."""
        new = request.request_id not in self.requests  # type: ignore[attr-defined]
        if new:
            connectors.follow_forks(self, request)
        taken = self.capflow.admit(request) if new else True
        if not new and compat_step.ends_input(request):
            self.capflow.input_over.add(request.request_id)
        super().add_request(request)  # type: ignore[misc]
        if not taken and compat.abort(self, request.request_id):
            self.capflow.aborted.append(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step and put its orders on it."""
        capflow = self.capflow
        begun = SCHEDULER.begin_step(capflow.step + 1)
        capflow.take_actions(self)
        capflow.holding_back = False
        SCHEDULER.end(begun)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        begun = SCHEDULER.begin()
        capflow.order(output, self.requests)  # type: ignore[attr-defined]
        SCHEDULER.end(begun)
        return output

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        if self.capflow.drafting is not None:
            for key in scheduler_output.num_scheduled_tokens:
                request = self.requests[key]  # type: ignore[attr-defined]
                if request.spec_token_ids and not self.capflow.drafting.allowed(request):
                    request.spec_token_ids = []

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take a step's output; requests that actions aborted are reported with it."""
        capflow, update = self.capflow, super().update_from_output  # type: ignore[misc]
        # vLLM calls this for each request. A call of ours costs a microsecond, so there is one only if it may matter.
        looks = capflow.read(model_runner_output, self.requests)  # type: ignore[attr-defined]
        if looks:
            self._update_request_with_output = self._update_tokens
        try:
            outputs: dict[int, Any] = update(scheduler_output, model_runner_output)
        finally:
            if looks:
                del self._update_request_with_output
        begun = SCHEDULER.begin()
        capflow.settle(scheduler_output, model_runner_output)
        if capflow.decisions.any:
            capflow.aborted += capflow.decisions.apply(self, outputs)
            capflow.aborted += capflow.react(self)
        if capflow.aborted:
            compat.add_finished_outputs(outputs, capflow.aborted)
            capflow.aborted.clear()
        if capflow.reports.by_name:
            capflow.reports.attach(outputs, capflow.stops.limits)
        SCHEDULER.end(begun)
        return outputs

    def _update_tokens(self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        """Do what vLLM's `_update_request_with_output` does, with an eye on stop strings and on decided ends."""
        kept = self.capflow.decisions.kept(request, new_token_ids)
        update = super()._update_request_with_output  # type: ignore[misc]
        tokens, stopped = update(request, kept, *args, **kwargs)
        self.capflow.stops.take(request, tokens)
        return tokens, self.capflow.decisions.stop(request, stopped)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        computed = request.num_computed_tokens
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        if compat_step.drops_steps_under_way(request):
            self.capflow.drop_under_way(request, computed)
        else:
            self.capflow.keep_reached(request, computed)

    def _handle_stopped_request(self, request: Any) -> bool:
        over: bool = super()._handle_stopped_request(request)  # type: ignore[misc]
        if not over:  # more input takes the place of the token that it stopped at
            self.capflow.cut(request.request_id, request.num_computed_tokens)
        return over

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        computed = session.num_computed_tokens
        super()._update_request_as_session(session, update)  # type: ignore[misc]
        self.capflow.extend_prompt(session, computed)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.capflow.end(request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Leave the hubs, then stop."""
        self.capflow.close()
        super().shutdown()  # type: ignore[misc]


def _change_weights(scheduler: Any, name: str | None) -> None:
    scheduler.capflow.weights.change(name)


_classes: dict[type[Any], type[Any]] = {}


def CaptureScheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> Any:  # noqa: N802 - vLLM takes it as a class
    """Return vLLM's scheduler for this configuration, with capflow's part mixed in."""
    base = compat.scheduler_base(vllm_config)
    mixins = (Captured, holding_back(base))
    cls = _classes.setdefault(base, type(f"Capture{base.__name__}", (*mixins, base), {}))
    return cls(*args, vllm_config=vllm_config, **kwargs)
