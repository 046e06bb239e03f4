"""The state of one rule for one engine, in the words of Prometheus: inactive, pending, firing.

A rule is pending while its condition holds, and fires when it has held for `for`. It is over (resolved) when its value
has been clear for `keep`. A rule without a value, such as a share of no tokens, holds nothing and is clear.
"""

from __future__ import annotations

from typing import Literal

from capflow_dashboard.views.alerts.rules import AlertRule

StateName = Literal["inactive", "pending", "firing"]


class AlertState:
    """The state of a rule.

    name: the state.
    since: when it began, in the seconds of the clock that `step` is given.
    """

    def __init__(self, rule: AlertRule, now: float) -> None:
        self.name: StateName = "inactive"
        self.since = now
        self._rule = rule
        # When the value of a firing rule became clear; None while it is not.
        self._clear_at: float | None = None

    def step(self, value: float | None, now: float) -> Literal["firing", "resolved"] | None:
        """Take a value; return what the rule changed to, if it began or ceased to fire."""
        rule = self._rule
        if self.name == "firing":
            if value is not None and not rule.is_clear(value):
                self._clear_at = None
                return None
            self._clear_at = now if self._clear_at is None else self._clear_at
            if now - self._clear_at < rule.keep_s:
                return None
            self._set("inactive", now)
            return "resolved"
        if value is None or not rule.holds(value):
            if self.name == "pending":
                self._set("inactive", now)
            return None
        if self.name == "inactive":
            self._set("pending", now)
        if now - self.since < rule.for_s:
            return None
        self._set("firing", now)
        return "firing"

    def _set(self, name: StateName, now: float) -> None:
        self.name, self.since, self._clear_at = name, now, None
