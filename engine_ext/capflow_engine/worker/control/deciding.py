"""How controllers see the steps of one worker, and what they decide.

Replicated controllers see a step when the next one begins, in each rank. Ordered controllers, and gates that end
requests, see it when its output is taken, and their decisions travel with the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from capflow.capture.dtypes import DTYPES
from capflow.capture.model import ModelInfo
from capflow_engine.compat import engine as compat
from capflow_engine.compat import step as compat_step
from capflow_engine.scheduler.orders import Decided, Divergence, Marked, StepAnswer, decode, encode
from capflow_engine.taps.plan import EMPTY_PLAN, Plan
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.control.controllers import Controllers
from capflow_engine.worker.control.scoring import ScoredRows
from capflow_engine.worker.control.view import Shown
from capflow_engine.worker.gates.firing import GatedStep


class Scored(NamedTuple):
    """The scores of a step for the controllers of one hub.

    scores: float32; on a GPU, first where they are computed, then where they are copied to. None if there are none.
    """

    parts: Sequence[ScoredRows]
    scores: Any


class Viewed(NamedTuple):
    """A step that controllers will see.

    buffer: the memory of its rows; None if no controller reads rows. Those of the stream come first.
    rows: how many of the stream there are.
    scored: for each hub, the scored rows and their scores.
    ready: waits until rows and scores are copied from the device.
    requests: for each hub, the keys (vLLM's ids) of the requests that controllers see, by id.
    drafts: the number of draft tokens of each request, by vLLM's id.
    """

    number: int
    plan: Plan
    buffer: Any
    rows: int
    scored: Sequence[Scored]
    ready: Callable[[], None]
    requests: Sequence[Mapping[str, str]]
    drafts: Mapping[str, int]


class Deciding:
    """The steps of one worker that controllers and ending gates have yet to see.

    requests: the running requests, by vLLM's id.
    controllers: those of each hub; one may be replaced by another.
    ranks: the number of tensor-parallel ranks.
    drafts: the number of draft tokens of each request in the step that begins or runs, by vLLM's id.
    unanswered: the launched step, until its output is taken, if controllers read rows of it.
    guarded: the launched step, until its output is taken, if a gate may end a request; in the rank that reports gates.
    marking: the same if other pipeline stages need to know where its gates opened.
    """

    def __init__(
        self, requests: Mapping[str, Tracked], controllers: Sequence[Controllers], info: ModelInfo, ranks: int
    ) -> None:
        self.drafts: Mapping[str, int] = {}
        self.guarded: GatedStep | None = None
        self.marking: GatedStep | None = None
        self._requests = requests
        self._controllers = controllers
        self._info = info
        self._ranks = ranks
        # For each hub, the keys of the requests that controllers see, by id; None after a change.
        self._visible: Sequence[Mapping[str, str]] | None = None
        # The previous step, until the next one begins.
        self._viewed: Viewed | None = None
        self.unanswered: Viewed | None = None

    def change(self) -> None:
        """Look anew at which requests controllers see: one came or went."""
        self._visible = None

    def begin(self, drafts: Mapping[str, int], cuts: Mapping[str, int]) -> list[Decided]:
        """Show the previous step to the replicated controllers; return their decisions, the same on each rank."""
        self.unanswered = self.guarded = self.marking = None
        self.drafts = drafts
        viewed, self._viewed = self._viewed, None
        decided: list[Decided] = []
        if viewed is not None:
            viewed.ready()
            requests = self._seen()
            for controllers in self._controllers:
                if controllers.here:
                    shown = self._shown(viewed, controllers.hub, cuts)
                    decided += controllers.run(shown, requests[controllers.hub])
        if self._ranks > 1 and any(controllers.here for controllers in self._controllers):
            decided = decode(compat.from_first_rank(encode(decided)))
        return decided

    def keep(
        self, number: int, plan: Plan, buffer: Any, rows: int, scored: Sequence[Scored], ready: Callable[[], None]
    ) -> None:
        """Keep a step that was just launched until controllers see it; the arguments are fields of `Viewed`."""
        viewed = Viewed(number, plan, buffer, rows, scored, ready, self._seen(), self.drafts)
        if any(controllers.here for controllers in self._controllers):
            self._viewed = viewed
        self.unanswered = viewed

    def answer(self, output: Any, marked: Sequence[Marked] = (), diverged: Divergence | None = None) -> Any:
        """Have the ordered controllers decide when a step's output is taken, and the decisions travel with it.

        That may be in another thread. It sees the step as it was launched, and changes nothing here.

        marked, diverged: what travels with the decisions.
        """
        viewed, self.unanswered = self.unanswered, None
        guarded, self.guarded = self.guarded, None
        marking, self.marking = self.marking, None
        if viewed is not None and not any(controllers.ordered for controllers in self._controllers):
            viewed = None
        if viewed is None and guarded is None and marking is None and not marked and diverged is None:
            return output
        running, drafts = tuple(self._controllers), self.drafts

        def decide(taken: Any) -> bytes:
            decided = self._decide(viewed, guarded, drafts, running, taken)
            marks = marked if marking is None else (*marked, *marking.marked())
            return StepAnswer(decided, marks, diverged).encode()

        return compat_step.with_decisions(output, decide)

    def _decide(
        self,
        viewed: Viewed | None,
        guarded: GatedStep | None,
        drafts: Mapping[str, int],
        running: Sequence[Controllers],
        output: Any,
    ) -> list[Decided]:
        """Return the decisions of gates and of the ordered controllers on a step whose output is known."""
        plan = viewed.plan if viewed is not None else EMPTY_PLAN if guarded is None else guarded.plan
        ends = {}
        for part in plan.batch if drafts else ():
            key = part.request.key
            if key in drafts:
                accepted = max(compat_step.sampled_tokens(output, key) - 1, 0)
                ends[key] = part.start + part.length - drafts[key] + accepted
        decided: list[Decided] = [] if guarded is None else list(guarded.aborts(ends))
        if viewed is not None:
            viewed.ready()
        for controllers in running if viewed is not None else ():
            assert viewed is not None
            if controllers.ordered:
                shown = self._shown(viewed, controllers.hub, ends)
                decided += controllers.run(shown, viewed.requests[controllers.hub], ordered=True)
        return decided

    def _shown(self, viewed: Viewed, hub: int, ends: Mapping[str, int]) -> Shown:
        """Return what a step has for the controllers of a hub; its copies have come."""
        rows = None
        if viewed.buffer is not None:
            width, dtype = self._info.hidden_size, DTYPES[self._info.dtype]
            stream = viewed.buffer[: viewed.rows * width * dtype.itemsize]
            rows = stream.view(dtype).reshape(viewed.rows, width)
        parts, scores = viewed.scored[hub]
        return Shown(viewed.number, viewed.plan, rows, ends, parts, scores)

    def _seen(self) -> Sequence[Mapping[str, str]]:
        """Return, for each hub, the keys of the requests that controllers see, by id.

        Other requests may read the cache blocks of a request that no controller sees, so controllers must not steer it.
        """
        if self._visible is None:
            visible: list[dict[str, str]] = [{} for _ in self._controllers]
            for key, each in self._requests.items():
                if each.view.any:
                    visible[each.hub][each.id] = key
            self._visible = visible
        return self._visible
