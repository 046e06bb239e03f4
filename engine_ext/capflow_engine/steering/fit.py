"""What fits an engine: its model and its steering bank, which all that steers is held against, whichever way it comes.

What always holds: what is refused here is named by the field that said it.
"""

from __future__ import annotations

import msgspec

from capflow.capture.model import ModelInfo
from capflow.steering.program import SiteError, SteeringProgram, program_of
from capflow.steering.request import NOTHING, Steering
from capflow_engine.steering.budget import Size
from capflow_engine.steering.store import SteeringStore


class Fit(msgspec.Struct, frozen=True):
    """info: the model and its taps. size: of the steering bank."""

    info: ModelInfo
    size: Size

    def check(self, steering: Steering, said: Steering) -> None:
        """Raise UsageError for a module or a global state that does not fit. said: what was asked for, of which it came."""
        said.check(self.info)
        try:
            program = program_of(self.info.hidden_size, [steering])
        except SiteError as e:
            raise e.named(said.field_at(e.site, e.kind) or "") from e
        if program is not None:
            program.check(self.info)
        self.size.check(program, said=said)

    def program(self, asked: Steering | None, store: SteeringStore) -> SteeringProgram | None:
        """Return everything that steers a request that asks for this, with what the store has for all; None when nothing does.

        Raises UsageError for what does not fit, UnknownModuleError for a module that the store does not have.
        """
        said = asked or NOTHING
        try:
            program = store.resolve(asked, self.info.hidden_size)
        except SiteError as e:
            raise e.named(said.field_at(e.site, e.kind) or ("steering_name" if said.modules else "")) from e
        if program is not None:
            program.check(self.info)
        self.size.check(program, said=said)
        return program
