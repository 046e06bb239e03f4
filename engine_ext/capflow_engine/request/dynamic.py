"""What may steer a request while it runs, told with its answer: actions that came through a hub, and controllers.

The scheduler knows both before a step, and the front end puts them into the answer. They travel in vLLM's own outputs, in the
field for KV connectors, which capflow refuses. Which controllers did act, and when, only workers know: consumers are told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from capflow import limits
from capflow.steering.action import Steer, Unsteer
from capflow_engine.request.options import KEY
from capflow_engine.steering.applied import Change, Dynamic


@dataclass
class _Told:
    """What is told of a request and its samples."""

    controllers: tuple[str, ...]
    changes: list[Change] = field(default_factory=list)

    def packed(self) -> dict[str, Any]:
        return {KEY: msgspec.to_builtins(Dynamic(tuple(self.changes), self.controllers))}


class Reports:
    """What the scheduler tells of the requests that run. Samples of one request share what is told."""

    def __init__(self) -> None:
        # By vLLM's id: what all samples of the request are called together, and what this one is called.
        self._members: dict[str, tuple[str, str]] = {}
        # By what samples are called together, where there is anything to tell.
        self._told: dict[str, _Told] = {}
        # Requests that are over, until the outputs that say so are there.
        self._over: dict[str, tuple[str, str]] = {}

    def admit(self, key: str, together: str, name: str, controllers: Sequence[str]) -> None:
        """Note a new request, which these controllers watch."""
        self._members[key] = together, name
        if controllers:
            self._told.setdefault(together, _Told(tuple(controllers)))

    def act(self, key: str, action: Steer | Unsteer, position: int) -> None:
        """Note an action that holds from a position of a request on; those behind the first `limits.ACTED_MAX` are not listed."""
        together, name = self._members[key]
        changes = self._told.setdefault(together, _Told(())).changes
        if len(changes) < limits.ACTED_MAX:
            sites = tuple(f"{v.site.hook}:{v.site.layer}" for v in action.vectors) if isinstance(action, Steer) else ()
            changes.append(Change(name, str(action.__struct_config__.tag), sites, position))

    def end(self, key: str) -> None:
        """Note that a request is over."""
        member = self._members.pop(key, None)
        if member is not None and member[0] in self._told:
            self._over[key] = member

    def attach(self, outputs: Mapping[int, Any], stopped: Mapping[str, int]) -> None:
        """Put what is told on a step's outputs for the front ends. stopped: requests that a stop string ended."""
        if not self._told:
            return
        for each in outputs.values():
            for output in each.outputs:
                key = output.request_id
                member = self._members.get(key) or self._over.get(key)
                told = self._told.get(member[0]) if member is not None else None
                if told is not None and (told.changes or output.finish_reason is not None or key in stopped):
                    output.kv_transfer_params = told.packed()
        running = {together for together, _ in self._members.values()} if self._over else set()
        for together, _ in self._over.values():
            if together not in running:
                self._told.pop(together, None)
        self._over.clear()


def taken(output: Any) -> Dynamic | None:
    """Take what is told out of one of vLLM's outputs; None where it has nothing."""
    told = output.kv_transfer_params
    if not isinstance(told, dict) or KEY not in told:
        return None
    output.kv_transfer_params = None
    return msgspec.convert(told[KEY], Dynamic)
