"""The steering of a job: files of modules and the fields of its prompts, checked before the model is loaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping

from capflow.capture.model import ModelInfo
from capflow.errors import UsageError, explain
from capflow.saes.sae import Sae
from capflow.steering.request import NOTHING, Steering
from capflow_engine.jobs.job import JobRequest
from capflow_engine.steering.budget import Size
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.module import load_module, load_modules, of_file
from capflow_engine.steering.store import SteeringStore


def store_for(job: JobRequest, info: Callable[[], ModelInfo], saes: Mapping[str, Sae]) -> SteeringStore:
    """Return the modules that a job's prompts may name, and the global state, which steers all prompts.

    info: returns the description of the model; called if there is steering.
    saes: the autoencoders that these may name.

    Everything is checked against the model's configuration before the weights are loaded.

    Raises UsageError that begins with the file, or with the line of the prompts file.
    """
    store = SteeringStore()
    if not (job.steering or job.steering_modules or saes or any(prompt.steering for prompt in job.prompts)):
        return store
    fit = _fit(info(), job.steering_bank_bytes, saes)
    for name, module in load_modules(job.steering_modules, fit).items():
        store.register(name, module)
    if job.steering is not None:
        module = load_module(job.steering)
        with of_file(job.steering):
            module = fit.resolved(module)
            fit.check(module, module)
            store.set_global(module)
    for prompt in job.prompts:
        with of_line(job.prompts_file, prompt.line):
            _check(prompt.steering or NOTHING, store, fit)
    return store


def _fit(info: ModelInfo, bank_bytes: int, saes: Mapping[str, Sae]) -> Fit:
    """Return the sizes of the model and the bank. The number of slots is unknown here: only the engine knows it."""
    return Fit(info, Size.of(bank_bytes, info.steered_width, 0)._replace(slots=sys.maxsize), saes)


def _check(steering: Steering, store: SteeringStore, fit: Fit) -> None:
    """Raise UsageError, the field first, for steering that does not fit the model or the bank, or names no module."""
    names = store.names
    for use in steering.modules:
        if use.name not in names:
            expected = f"a module of --steering-modules ({', '.join(names) or 'none is given'})"
            raise UsageError(explain("steering_name", got=use.name, expected=expected))
    steering.check(fit.info)
    fit.program(steering, store)


@contextlib.contextmanager
def of_line(file: str, line: int) -> Iterator[None]:
    """Name the line of a prompts file in the UsageErrors of a block."""
    try:
        yield
    except UsageError as e:
        raise UsageError(f"{file}, line {line}, {e}") from e
