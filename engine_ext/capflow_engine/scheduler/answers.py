"""The answers to actions on requests with drafts under way: they wait until the actions' positions are certain.

A step is scheduled as if all drafts of the steps under way were accepted. Each rejected draft lowers the first position
of an action that the step brought.
Invariant: an answer waits for no step that was scheduled with its action or later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from capflow.steering.action import ActionApplied, Outcome


class UnderWay(msgspec.Struct):
    """A step that was scheduled and whose output the scheduler does not have yet.

    requests: the number of tokens that the step computes of each request, by vLLM's id.
    drafts: for each request with draft tokens, the position after the last draft token, and the number of drafts. The
        position is right if the drafts of the earlier steps under way are all accepted.
    """

    requests: Mapping[str, int]
    drafts: dict[str, tuple[int, int]]


class CertainAnswers:
    """The answers that wait.

    send: sends an answer.
    waiting: the answers, each with vLLM's id of its request.
    """

    def __init__(self, send: Callable[[Outcome], None]) -> None:
        self._send = send
        # With vLLM's ids of their requests, in the order of the actions.
        self.waiting: list[tuple[str, ActionApplied]] = []

    def apply(self, key: str, applied: ActionApplied) -> None:
        """Take the answer to an action; `settle` sends it.

        key: vLLM's id of the action's request; empty for all requests of the engine.
        """
        self.waiting.append((key, applied))

    def shift(self, key: str, first: int, count: int) -> None:
        """Lower the positions of a request's actions that hold from position `first` or from a later one."""
        self.waiting = [
            (its, replace(applied, position=applied.position - count))
            if its == key and applied.position is not None and applied.position >= first
            else (its, applied)
            for its, applied in self.waiting
        ]

    def settle(self, under_way: Mapping[int, UnderWay]) -> None:
        """Send the answers that no step under way can change.

        under_way: by number.
        """
        waiting, self.waiting = self.waiting, []
        for key, applied in waiting:
            if any(number < applied.step and key in step.drafts for number, step in under_way.items()):
                self.waiting.append((key, applied))
            else:
                self._send(applied)

    def end(self, key: str) -> None:
        """Send the answers for a request that ended."""
        waiting, self.waiting = self.waiting, []
        for its, applied in waiting:
            if its == key:
                self._send(applied)
            else:
                self.waiting.append((its, applied))
