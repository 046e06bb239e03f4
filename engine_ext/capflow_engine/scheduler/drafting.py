"""Draft tokens with async scheduling: which requests may have them in the next step.

A step is then scheduled before the output of the steps under way is known. It is scheduled and planned as if all their
drafts were accepted; `Rejection` corrects its positions later. So the first position of a request's next step lies
between its number of tokens and the scheduled position.
Invariant: in all positions that may be meant, a request is captured at the same sites and has no patch. Near any other
position, and if the request is latched or watched by a controller, it gets no drafts; then its positions are certain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from capflow.capture.places import FOREVER
from capflow.capture.positions import Positions
from capflow.steering.program import SteeringProgram

# More steps than an engine has under way, beside one for each pipeline stage.
_STEPS_AHEAD = 8


class _Plain:
    """A request that may have drafts at most positions.

    sets: the sets of positions that it is captured at.
    patched: the positions that it is patched at, in order; negative ones count from the end of the prompt.
    first, stop: positions between which drafts may lie.
    """

    __slots__ = ("first", "patched", "sets", "stop")

    def __init__(self, sets: tuple[Positions, ...], patched: tuple[int, ...]) -> None:
        self.sets, self.patched = sets, patched
        self.first = self.stop = 0

    def move(self, position: int, prompt_length: int) -> None:
        """Set `first` and `stop` for drafts at a position after the prompt and later."""
        self.first = position
        self.stop = min((each.at(prompt_length).stretch(position)[1] for each in self.sets), default=FOREVER)
        following = bisect_left(self.patched, position)
        if following < len(self.patched):
            self.stop = min(self.stop, self.patched[following])


class Drafting:
    """The requests of an engine that drafts and schedules ahead.

    drafts: the largest number of drafts of a request in a step.
    stages: the number of pipeline stages.
    """

    def __init__(self, drafts: int, stages: int) -> None:
        self._reach = 1 + drafts + stages + _STEPS_AHEAD
        # By vLLM's id; without an entry, a request has no drafts.
        self._plain: dict[str, _Plain] = {}

    def admit(self, request: Any, sets: Iterable[Positions], program: SteeringProgram | None) -> None:
        """Take a request that no controller watches.

        Streaming input ends an answer at the computed positions, which vLLM counts as if all drafts were accepted; so
        such a request has no drafts.
        """
        certain = program is not None and any(gate.latched or gate.abort for gate in program.gates)
        if not certain and not request.resumable:
            patched = tuple(position for position, _ in program.patched) if program is not None else ()
            self._plain[request.request_id] = _Plain(tuple(sets), patched)

    def allowed(self, request: Any) -> bool:
        """Return whether draft tokens may be added to a request that was just scheduled."""
        plain = self._plain.get(request.request_id)
        if plain is None:
            return False
        low, high = request.num_tokens, request.num_computed_tokens + self._reach
        if not plain.first <= low <= high <= plain.stop:
            plain.move(low, request.num_prompt_tokens)
        return bool(high <= plain.stop)

    def end(self, key: str) -> None:
        """Forget a request that ended."""
        self._plain.pop(key, None)
