"""What fits an engine: steering from every source is checked here against the model and the steering bank.

Invariant: an error names the field of the user's steering that caused it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from capflow.capture.model import ModelInfo
from capflow.saes.resolve import resolved
from capflow.saes.sae import Sae
from capflow.steering.compiler import SiteError, program_of
from capflow.steering.program import SteeringProgram
from capflow.steering.request import NOTHING, Steering
from capflow_engine.steering.budget import Size
from capflow_engine.steering.store import SteeringStore


class Fit(msgspec.Struct, frozen=True):
    """The limits of one engine.

    info: the model and its taps.
    size: the size of the steering bank.
    saes: the autoencoders by whose features requests may be steered, by name.
    """

    info: ModelInfo
    size: Size
    saes: Mapping[str, Sae] = MappingProxyType({})

    def resolved(self, steering: Steering) -> Steering:
        """Return a steering with its features resolved; raise UsageError for features that there are not."""
        return resolved(steering, self.saes)

    def check(self, steering: Steering, asked: Steering) -> None:
        """Raise UsageError for a module or a global state that does not fit.

        steering: the state to store.
        asked: the user's steering that it was made of.
        """
        asked = self.resolved(asked)
        asked.check(self.info)
        self._checked(lambda: program_of(self.info, [self.resolved(steering)]), asked)

    def program(self, asked: Steering | None, store: SteeringStore) -> SteeringProgram | None:
        """Return the program of a request: the global state, its modules and its own vectors; None if there are none.

        Raises UsageError for steering that does not fit, UnknownModuleError for a module that is not in the store.

        asked: the steering that the request asks for.
        """
        asked = asked and self.resolved(asked)
        field = "steering_name" if asked and asked.modules else ""
        return self._checked(lambda: store.resolve(asked, self.info), asked or NOTHING, field)

    def _checked(
        self, make: Callable[[], SteeringProgram | None], asked: Steering, field: str = ""
    ) -> SteeringProgram | None:
        """Return the program that `make` returns, checked; errors name a field of `asked`, or else `field`."""
        try:
            program = make()
        except SiteError as e:
            raise e.named(asked.field_at(e.site, e.kind) or field) from e
        if program is not None:
            program.check(self.info)
        self.size.check(program, asked=asked)
        return program
