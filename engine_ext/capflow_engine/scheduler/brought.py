"""The steering that controllers bring to every request they see: compiled once, composed when a request is admitted.

Invariant: steering that does not fit ends no request and no engine. The request runs without it, and the hub hears why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from capflow.errors import CapflowError
from capflow.protocol.message import ControllerSpec
from capflow.steering.compiler import controller_owner, program_of
from capflow.steering.compose import merged
from capflow.steering.program import SteeringProgram
from capflow_engine.steering.budget import Need
from capflow_engine.steering.fit import Fit

logger = logging.getLogger("vllm.capflow.scheduler")


class HubSteering:
    """What the controllers of one hub bring.

    report: called with why controllers bring nothing, in place of what it was called with before.
    """

    def __init__(self, fit: Fit, report: Callable[[Sequence[str]], None]) -> None:
        self._fit = fit
        self._report = report
        self._specs: tuple[ControllerSpec, ...] = ()
        # The program of each controller that brings steering, by its label.
        self._programs: dict[str, SteeringProgram] = {}
        # Why a controller brings nothing, or not everything, by its label.
        self._troubles: dict[str, str] = {}

    def take(self, specs: Sequence[ControllerSpec]) -> None:
        """Compile the steering of the hub's controllers, if they changed."""
        if tuple(specs) == self._specs:
            return
        self._specs, self._programs, self._troubles = tuple(specs), {}, {}
        for spec in specs:
            if spec.steering is not None:
                self._compile(spec)
        self._report(tuple(self._troubles.values()))

    def _compile(self, spec: ControllerSpec) -> None:
        steering, where = spec.steering, f"controllers.{spec.label}"
        assert steering is not None
        try:
            steering.check(self._fit.info, where=where)
            if steering.patches or steering.modules:
                self._note(spec.label, "no request gets its steering, which has patches or modules")
                return
            program = program_of(self._fit.info, [steering], [controller_owner(spec.label)])
            if program is not None:
                program.check(self._fit.info)
                self._fit.size.check(program, asked=steering)
                self._programs[spec.label] = program
        except CapflowError as e:
            self._note(spec.label, f"no request gets its steering: {e}")
        except Exception as e:  # noqa: BLE001  what a hub sends must not end the engine
            self._note(spec.label, f"no request gets its steering: {type(e).__name__}: {e}")

    def compose(
        self,
        program: SteeringProgram | None,
        needs: tuple[Need, ...],
        controllers: Sequence[ControllerSpec],
        request: str,
        prompt_length: int,
    ) -> tuple[SteeringProgram | None, tuple[Need, ...]]:
        """Return a new request's program with what its controllers bring, and what it needs of the bank.

        program, needs: its own.
        controllers: those that see it, in the hub's order.
        request: its name.
        prompt_length: the first position that is steered like a generated one.
        """
        for spec in controllers:
            brought = self._programs.get(spec.label)
            if brought is None:
                continue
            try:
                both = merged(program, brought)
                needs = self._fit.size.check(both, prompt_length)
            except CapflowError as e:
                if spec.label not in self._troubles:
                    self._note(spec.label, f"request {request} runs without its steering: {e}")
                    self._report(tuple(self._troubles.values()))
            else:
                program = both
        return program, needs

    def _note(self, label: str, why: str) -> None:
        self._troubles[label] = f"controller {label}: {why}"
        logger.error("%s", self._troubles[label])
