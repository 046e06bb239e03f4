"""One controller in a worker: its counts, its time, and what it steers.

Invariant: a fault of a controller is counted and logged here, and ends neither a step nor another controller.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Collection, Sequence

from capflow import limits
from capflow.plugins.consumer import Controller
from capflow.protocol.message import ControllerCounts, ControllerSpec
from capflow.steering.action import Action, Gain, Leased, SetGate, Steer, Unsteer
from capflow_engine.worker.control.view import Seen
from capflow_engine.worker.history import Owner

logger = logging.getLogger("vllm.capflow.control")


class RunningController:
    """A controller and its counts.

    spec: its spec.
    seen: what it sees of the steps; empty until it is started.
    """

    def __init__(self, owner: Owner, spec: ControllerSpec) -> None:
        self.owner = owner
        self.spec = spec
        self.controller: Controller | None = None
        self.seen = Seen((), {})
        # Why it is disabled; empty if it is not.
        self._why_disabled = ""
        # Exceptions since the start.
        self._failed = 0
        self._failed_in_a_row = 0
        # Refused actions since the start.
        self._refused = 0
        # Why the latest action was refused; empty if it was applied.
        self._refusal = ""
        # Actions since the start that came while the engine was frozen.
        self._held_back = 0
        # Steps since the start that it did not see, and why it missed the latest.
        self._missed = 0
        self._miss = ""
        # The type of the latest exception.
        self._error = ""
        # The seconds of its latest calls, and why it is slow; empty if it is not.
        self._times: list[float] = []
        self._slow = ""
        self._calls = 0
        self._seconds = 0.0
        self._actions = 0
        # By vLLM's id, and by what is changed: the last position that each action was decided on, and the action.
        self._sent: dict[str, dict[_Changed, list[tuple[int, Action]]]] = {}

    @property
    def counts(self) -> ControllerCounts:
        """Its counts since the worker's start."""
        refused = self._refused + self._held_back
        return ControllerCounts(self._calls, self._seconds, self._actions, refused, self._failed)

    def disable(self, why: str) -> None:
        """Disable it until the engine starts again."""
        self.controller, self._why_disabled = None, why
        logger.error("controller %s is disabled: %s", self.owner.name, why)

    def failed(self, call: str, error: BaseException) -> None:
        """Count an exception in `call`; log the first with its traceback; disable it after too many in a row."""
        self._failed += 1
        self._failed_in_a_row += 1
        self._error = type(error).__name__
        if self._failed == 1:
            logger.error("controller %s failed in %s", self.owner.name, call, exc_info=error)
        elif not self._failed & (self._failed - 1):  # at each doubling, so that the log stays short
            logger.error("controller %s failed %d times; %s: %s", self.owner.name, self._failed, self._error, error)
        if self._failed_in_a_row >= limits.CONTROLLER_FAILURES_MAX:
            self.disable(f"failed {self._failed_in_a_row} times in a row ({self._error})")

    def succeeded(self) -> None:
        """Record a step without an exception."""
        self._failed_in_a_row = 0

    def timed(self, seconds: float) -> None:
        """Count a call; warn about a controller that is slow, and disable it if it stays so.

        The median of `limits.CONTROLLER_CALLS_TIMED` calls decides, because one call may wait for the processor. If so
        many calls or fewer take more than `limits.CONTROLLER_S_MAX` together, it is disabled at once. A call that does
        not return cannot be interrupted.
        """
        self._calls += 1
        self._seconds += seconds
        self._times.append(seconds)
        if (sum_s := sum(self._times)) > limits.CONTROLLER_S_MAX:
            got = f"{sum_s:.3g} s in {len(self._times)} steps, at most {limits.CONTROLLER_S_MAX:g} s are allowed"
            self.disable(f"too slow: {got}")
            return
        if len(self._times) < limits.CONTROLLER_CALLS_TIMED:
            return
        median = statistics.median(self._times)
        self._times.clear()
        if median <= limits.CONTROLLER_CALL_S_MAX:
            self._slow = ""
            return
        got = f"{median:.3g} s in a step, at most {limits.CONTROLLER_CALL_S_MAX:g} s are allowed"
        if self._slow:
            self.disable(f"too slow: {got}")
        else:
            self._slow = got
            logger.warning("controller %s is slow: %s; it is disabled if it stays so", self.owner.name, got)

    def refuse(self, why: str) -> None:
        """Count an action that is not applied."""
        self._refused += 1
        self._refusal = why
        if not self._refused & (self._refused - 1):
            logger.error("controller %s: an action is refused (%d so far): %s", self.owner.name, self._refused, why)

    def hold_back(self) -> None:
        """Count an action that a frozen engine does not apply. That is no trouble: a controller knows of no freeze."""
        self._held_back += 1

    def accept(self) -> None:
        """Record that an action is applied."""
        self._actions += 1
        self._refusal = ""

    def miss(self, why: str) -> None:
        """Count a step that it did not see."""
        self._missed += 1
        self._miss = why
        if not self._missed & (self._missed - 1):
            logger.error("controller %s did not see a step (%d so far): %s", self.owner.name, self._missed, why)

    @property
    def trouble(self) -> str | None:
        """Why it does not work as it should; None if it does."""
        if self._why_disabled:
            cause = f"disabled: {self._why_disabled}"
        elif self._failed_in_a_row:
            cause = f"failed in its last {self._failed_in_a_row} steps ({self._error}); see the engine's log"
        elif self._refusal:
            cause = f"refused actions: {self._refused}; the last: {self._refusal}"
        elif self._miss:
            cause = f"missed steps: {self._missed}; the last: {self._miss}"
        elif self._slow:
            cause = f"slow: {self._slow}"
        else:
            return None
        return f"controller {self.owner.name}: {cause}"[: limits.TROUBLE_LENGTH_MAX]

    # --- what it steers ---

    def repeats(self, key: str, action: Action) -> bool:
        """Return whether an action would change nothing, because it holds already. A lease begins anew."""
        if isinstance(action, Leased) and action.lease_positions is not None:
            return False
        before = self._sent.get(key, {}).get(_changed(action))
        if isinstance(action, Unsteer):
            return not before or not isinstance(before[-1][1], Steer)
        if before:
            return before[-1][1] == action
        return isinstance(action, Gain) and action.scale == 1.0

    def sent(self, key: str, position: int, action: Action) -> None:
        """Note an action on a request, decided on the rows up to a position."""
        sent = self._sent.setdefault(key, {}).setdefault(_changed(action), [])
        sent.append((position, action))
        # No step under way is older than the actions that are kept.
        del sent[: -limits.CONTROLLER_ACTIONS_KEPT]

    def seen_again(self, key: str, start: int) -> None:
        """Forget the actions that were decided on rows from position `start` on: other rows took their place."""
        for sent in self._sent.get(key, {}).values():
            while sent and sent[-1][0] >= start:
                sent.pop()

    def lease_over(self, key: str, kind: str, target: str) -> None:
        """Forget an action whose lease ended."""
        self._sent.get(key, {}).pop((kind, target), None)

    def forget(self, key: str) -> None:
        """Forget a request."""
        self._sent.pop(key, None)

    def take_back(self) -> None:
        """Note that none of its actions holds any more."""
        self._sent.clear()

    @property
    def keys(self) -> Collection[str]:
        """VLLM's ids of the requests that it acted on."""
        return self._sent.keys()

    def steered(self) -> set[str]:
        """Return vLLM's ids of the requests that it changes: by vectors or clamps, by a gain, or by a gate."""
        return {key for key, changed in list(self._sent.items()) if any(map(_holds, list(changed.values())))}


_Changed = tuple[str, str]
"""What an action changes: `steer`, `gain` or `set_gate`, and the owner of the gain or the gate."""


def _changed(action: Action) -> _Changed:
    match action:
        case Gain():
            return "gain", action.owner
        case SetGate():
            return "set_gate", action.gate
        case _:
            return "steer", ""


def _holds(sent: Sequence[tuple[int, Action]]) -> bool:
    """Return whether the latest action on one thing changes it."""
    match sent[-1][1] if sent else None:
        case Steer():
            return True
        case Gain(scale=scale):
            return scale != 1.0
        case SetGate(threshold=threshold, sharpness=sharpness, enabled=enabled):
            return (threshold, sharpness, enabled) != (None, None, None)
        case _:
            return False
