"""The hooks in vLLM's V1 and V2 model runners: they report a step's batch and bracket its forward pass.

`tap_runner` subclasses a worker's runner in place, so one mixin serves every platform.
Invariant: rows are attributed by the batch that the runner prepared, in its order, never by the order in which requests
arrived.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from capflow_engine.compat import step as compat_step
from capflow_engine.worker.marks import StageMarks


class StepCapture(Protocol):
    """The interface that a runner calls; `WorkerCapture` implements it.

    margins: those of the step that was launched last; None if it had no gates.
    marks: what controllers of one pipeline stage steer in the step that was prepared last; None if no stage has one.
    rests: whether no tap has anything to do in the forward pass that begins; then `rest` is called, not `forward`.
    """

    margins: Any
    marks: StageMarks | None
    rests: bool

    def prepare(self, batch: compat_step.RunnerBatch) -> None:
        """Plan a step for its batch."""

    @property
    def gates(self) -> bool:
        """Whether the prepared step has gates."""

    def receive(self, margins: Any) -> None:
        """Take the margins that earlier pipeline stages scored in the prepared step."""

    def rest(self) -> None:
        """Begin a forward pass in which the taps are idle."""

    def interrupt(self) -> None:
        """Note that a step failed. One with a forward pass in `forward` has noted that itself."""

    def forward(self, tokens: int) -> contextlib.AbstractContextManager[None]:
        """Bracket a forward pass over tensors of `tokens` rows."""


class _StagedRunner:
    """A mixin of both model runners: margins of gates and marks go from one pipeline stage to the next."""

    capflow: StepCapture
    # The tensors that this pipeline stage received for the running `execute_model`.
    _capflow_received: Any = None

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run a step."""
        self._capflow_received = intermediate_tensors
        try:
            output = self._capflow_run(scheduler_output, intermediate_tensors, *args, **kwargs)
        except BaseException:
            self.capflow.interrupt()
            raise
        capflow = self.capflow
        if capflow.margins is not None:
            output = compat_step.with_margins(output, capflow.margins)
        if capflow.marks is not None:
            output = compat_step.with_marks(output, capflow.marks.data)
        return output

    def _capflow_run(self, *args: Any, **kwargs: Any) -> Any:
        return super().execute_model(*args, **kwargs)  # type: ignore[misc]

    def _capflow_prepare(self, batch: compat_step.RunnerBatch) -> None:
        """Plan the step; take the margins before the runner copies the other tensors to its buffers."""
        self.capflow.prepare(batch)
        received, self._capflow_received = self._capflow_received, None
        if received is None:
            return
        if self.capflow.gates and (margins := compat_step.take_margins(received)) is not None:
            self.capflow.receive(margins)
        if (marks := self.capflow.marks) is not None and (data := compat_step.take_marks(received)):
            marks.receive(data)


class StepRunner(_StagedRunner):
    """A mixin of the platform's V1 model runner; `capflow` is the worker's."""

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        self._capflow_prepare(compat_step.scheduled_batch(self, num_scheduled_tokens))
        return prepared

    def _model_forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        forward = super()._model_forward  # type: ignore[misc]
        if self.capflow.rests:
            self.capflow.rest()
            return forward(input_ids, *args, **kwargs)
        with self.capflow.forward(compat_step.forward_tokens(input_ids, kwargs)):
            return forward(input_ids, *args, **kwargs)


class StepRunnerV2(_StagedRunner):
    """A mixin of the platform's V2 model runner; `capflow` is the worker's.

    The V2 runner has no method of its own for the forward pass. So the step is open from the end of `prepare_inputs`,
    which a dummy run does not call, to the end of `execute_model`.
    """

    # Closed when vLLM's part of the running `execute_model` is over: the margins of the step are there afterwards.
    _capflow_step: contextlib.ExitStack

    def _capflow_run(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as self._capflow_step:
            return super()._capflow_run(*args, **kwargs)

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a step's batch."""
        batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self._capflow_prepare(compat_step.prepared_batch(batch))
        if self.capflow.rests:
            self.capflow.rest()
        else:
            self._capflow_step.enter_context(self.capflow.forward(batch.num_tokens_after_padding))
        return batch


def tap_runner(runner: Any, capture: StepCapture, *, v2: bool) -> None:
    """Make a model runner report its steps to `capture`."""
    runner.capflow = capture
    mixin = StepRunnerV2 if v2 else StepRunner
    runner.__class__ = type(f"Capture{type(runner).__name__}", (mixin, type(runner)), {})
