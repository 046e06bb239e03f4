"""Changes of the steering of one worker's requests, by hubs, by controllers and by the engine itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capflow.errors import CapflowError
from capflow.steering.action import (
    Abort,
    Gain,
    SetGate,
    Steer,
    Unsteer,
    scale_of,
    sites_of,
    target_of,
    threshold_of,
)
from capflow.steering.compose import without_controllers
from capflow.steering.program import SteeringProgram
from capflow_engine.scheduler.orders import Decided, Ended, FreezeOrder, LeaseEnd, News, Ordered
from capflow_engine.steering.timeline import ENGINE, hub_owner
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.control.controllers import Controllers
from capflow_engine.worker.events import Events
from capflow_engine.worker.history import Histories


class Changes:
    """What changes the steering of running requests.

    requests: the running requests, by vLLM's id.
    controllers: those of each hub; one may be replaced by another.
    first, last: whether this is the first or the last pipeline stage. One stage records an event: the first, or the
        last if it is the one that knows of it.
    """

    def __init__(
        self,
        requests: Mapping[str, Tracked],
        histories: Histories,
        controllers: Sequence[Controllers],
        events: Events,
        *,
        first: bool,
        last: bool,
    ) -> None:
        self._requests = requests
        self._histories = histories
        self._controllers = controllers
        self._events = events
        self._first = first
        self._last = last
        # For each owner that has a gain for all requests, the action that gave it.
        self._gains: dict[str, Ordered] = {}
        self._frozen_label = ""

    def begin(self, tracked: Tracked, program: SteeringProgram | None) -> None:
        """Steer a new request as it asked, and as the engine's state allows."""
        if program is not None:
            self._histories.admit(tracked, program)
        if not self._first:  # one record is enough: the other stages have the same program
            return
        own = None if program is None else without_controllers(program)
        if own is not None and own.steers:
            first = own.first_steered(tracked.prompt_length, tracked.steered_from)
            self._events.note(tracked, "request", "steer", tuple(sorted(own.sites)), position=first)
        if self._histories.frozen:
            self._events.note(tracked, "engine", "freeze", (), position=0, label=self._frozen_label)
        else:
            self._note_gains(tracked, 0)

    def take(self, news: News) -> None:
        """Apply what the scheduler ordered."""
        for lease in news.leases:
            if lease.key in self._requests:
                self._end_lease(lease)
        for order in news.freezes:
            self._freeze(order)
        for ordered in news.actions:
            self._order(ordered)

    def _order(self, ordered: Ordered) -> None:
        """Apply an action that the scheduler ordered; the scheduler has checked that it fits in the bank."""
        key, by, action, prompt_length = ordered
        if key:
            if key in self._requests:
                self._histories.act(self._requests[key], hub_owner(by), action, prompt_length=prompt_length)
            return
        assert isinstance(action, Gain)
        for gains in (self._histories.gains, self._gains):
            gains.pop(action.owner, None)
        if action.scale != 1.0:
            self._histories.gains[action.owner], self._gains[action.owner] = action.scale, ordered
        for tracked in self._requests.values():
            self._histories.act(tracked, ENGINE, action)
            if self._first and not self._histories.frozen:
                self._note_gain(tracked, ordered, tracked.computed)

    def _note_gains(self, tracked: Tracked, position: int) -> None:
        """Record the gains of the engine that hold from a position of a request on."""
        for ordered in self._gains.values():
            self._note_gain(tracked, ordered, position)

    def _note_gain(self, tracked: Tracked, ordered: Ordered, position: int) -> None:
        gain = ordered.action
        self._events.note(
            tracked,
            ordered.by,
            "gain",
            (),
            position=position,
            label=gain.label,
            target=target_of(gain),
            scale=scale_of(gain),
        )

    def _end_lease(self, lease: LeaseEnd) -> None:
        """End an action whose lease is over."""
        tracked = self._requests[lease.key]
        if lease.action is not None:
            self._histories.act(tracked, hub_owner(lease.by), lease.action)
        if self._first:
            self._events.note(tracked, lease.by, "lease_end", (), position=lease.position, label=lease.label)

    def end_controllers_leases(self) -> None:
        """Record which leases of controllers' actions ended; the steering ended at its position by itself."""
        for key, slot, position, label in self._histories.ended_leases():
            owner, tracked = slot.owner, self._requests[key]
            controllers = self._controllers[tracked.hub]
            controllers.lease_over(owner.order, key, slot.kind, slot.target)
            specs = controllers.specs
            if self._last or not (owner.order < len(specs) and specs[owner.order].ordered):
                self._events.note(tracked, owner.gain_name, "lease_end", (), position=position, label=label)

    def _freeze(self, order: FreezeOrder) -> None:
        """Take every dynamic change back, or end that."""
        frozen, label = order
        if self._histories.frozen == frozen:
            return
        self._histories.frozen, self._frozen_label = frozen, label
        for controllers in self._controllers:
            controllers.take_back(frozen=frozen)
        for tracked in self._requests.values():
            self._histories.freeze(tracked, frozen=frozen)
            if self._first:
                kind = "freeze" if frozen else "unfreeze"
                self._events.note(tracked, "engine", kind, (), position=tracked.computed, label=label)
                if not frozen:
                    self._note_gains(tracked, tracked.computed)

    def decide(self, decided: Decided) -> None:
        """Apply a controller's decision if there is room for it; all ranks that apply it come to the same outcome."""
        if decided.key not in self._requests:
            return
        controllers, tracked = self._controllers[decided.hub], self._requests[decided.key]
        if decided.order >= len(controllers.specs):
            return
        by = f"controller {controllers.owner(decided.order).name}"
        action = decided.action
        if action is None:
            position = decided.row if decided.position is None else decided.position
            self._note_once(decided, by, None, position)
            return
        assert not isinstance(action, Abort)
        first = max(tracked.computed, tracked.prompt_length)
        if self._histories.frozen:
            controllers.hold_back(decided.order, decided.key)
            return
        try:
            names = [spec.label for spec in controllers.specs if spec.sees(tracked.id)]
            self._histories.act(tracked, controllers.owner(decided.order), action, controllers=names)
        except CapflowError as e:
            controllers.done(decided.order, decided.key, e)
            return
        controllers.done(decided.order, decided.key, None)
        self._note_once(decided, by, action, first)

    def _note_once(
        self, decided: Decided, by: str, action: Steer | Unsteer | Gain | SetGate | None, position: int
    ) -> None:
        """Record a decision; of those that all stages apply, the last stage keeps the record."""
        if not self._last and self._controllers[decided.hub].specs[decided.order].ordered:
            return
        kind = "gate" if action is None else str(action.__struct_config__.tag)
        threshold = decided.threshold
        if threshold is None and action is not None:
            threshold = threshold_of(action)
        self._events.note(
            self._requests[decided.key],
            by,
            kind,
            () if action is None else sites_of(action),
            position=position,
            score=decided.score,
            threshold=threshold,
            label=decided.label,
            target="" if action is None else target_of(action),
            scale=None if action is None else scale_of(action),
        )

    def note_end(self, tracked: Tracked, ended: Ended, step: int | None) -> None:
        """Record that a gate, a controller or the engine itself ended a request.

        step: the last step that holds the request; None if there is none.
        """
        abort = ended.decided
        if abort is None or not self._last:
            return
        by = f"gate {abort.gate}" if abort.gate else "engine"
        controllers = self._controllers[tracked.hub]
        if 0 <= abort.order < len(controllers.specs):  # a hub that came back may have others
            by = f"controller {controllers.owner(abort.order).name}"
        self._events.note(
            tracked,
            by,
            "abort",
            (),
            position=ended.limit,
            score=abort.score,
            threshold=abort.threshold,
            label=abort.label,
            step=step,
        )
