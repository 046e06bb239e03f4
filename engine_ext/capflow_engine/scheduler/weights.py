"""The weights of an engine: how often they changed, and what the last change was called.

Invariant: the number rises with the first step after a change. So two steps with one number had the same weights, and
several calls of one update count once.
"""

from __future__ import annotations

from capflow import limits
from capflow.capture.frame import Weights


class WeightsNow:
    """The weights that compute the next step.

    They belong to the thread of the scheduler.

    last: those of the last step.
    next: those of the next step, if they changed since the last one.
    """

    def __init__(self) -> None:
        self.last = Weights(0)
        self.next: Weights | None = None

    def change(self, name: str | None) -> None:
        """Note that the weights change.

        name: of the new weights; None where the change does not name them.
        """
        label = "" if name is None else name[: limits.REQUEST_ID_LENGTH_MAX]
        if self.next is None and name is not None and label == self.last.label:
            return
        if self.next is None or name is not None:
            self.next = Weights(self.last.version + 1, label)

    @property
    def now(self) -> Weights:
        """The weights that compute the next step."""
        return self.last if self.next is None else self.next

    def take(self) -> Weights:
        """Return the weights of a step that begins."""
        if self.next is not None:
            self.last, self.next = self.next, None
        return self.last
