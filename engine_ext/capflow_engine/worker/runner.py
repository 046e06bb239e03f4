"""The hooks in vLLM's V1 and V2 model runners: they report a step's batch and bracket its forward pass.

`tap_runner` subclasses a worker's runner in place, so one mixin serves every platform.
Invariant: rows are attributed by the batch that the runner prepared, in its order, never by the order in which requests
arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from capflow_engine.compat import step as compat_step


class StepCapture(Protocol):
    """The interface that a runner calls; `WorkerCapture` implements it."""

    def prepare(self, parts: Sequence[tuple[str, int, int, int]]) -> None:
        """Plan a step for its batch."""

    def forward(self, tokens: int) -> contextlib.AbstractContextManager[None]:
        """Bracket a forward pass over tensors of `tokens` rows."""


class StepRunner:
    """A mixin of the platform's V1 model runner; `capflow` is the worker's."""

    capflow: StepCapture

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        self.capflow.prepare(compat_step.scheduled_batch(self, num_scheduled_tokens))
        return prepared

    def _model_forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        with self.capflow.forward(compat_step.forward_tokens(input_ids, kwargs)):
            return super()._model_forward(input_ids, *args, **kwargs)  # type: ignore[misc]


class StepRunnerV2:
    """A mixin of the platform's V2 model runner; `capflow` is the worker's.

    The V2 runner has no method of its own for the forward pass. So the step is open from the end of `prepare_inputs`,
    which a dummy run does not call, to the end of `execute_model`.
    """

    capflow: StepCapture
    # Closed at the end of the running `execute_model`.
    _capflow_step: contextlib.ExitStack

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step."""
        with contextlib.ExitStack() as self._capflow_step:
            return super().execute_model(*args, **kwargs)  # type: ignore[misc]

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a step's batch."""
        batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self.capflow.prepare(compat_step.prepared_batch(batch))
        self._capflow_step.enter_context(self.capflow.forward(batch.num_tokens_after_padding))
        return batch


def tap_runner(runner: Any, capture: StepCapture, *, v2: bool) -> None:
    """Make a model runner report its steps to `capture`."""
    runner.capflow = capture
    mixin = StepRunnerV2 if v2 else StepRunner
    runner.__class__ = type(f"Capture{type(runner).__name__}", (mixin, type(runner)), {})
