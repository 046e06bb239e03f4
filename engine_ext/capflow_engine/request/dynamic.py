"""What may steer a request while it runs: actions that came through a hub, and controllers. Its answer reports both.

The scheduler knows both before a step; the front end puts them into the answer. The same report names the request's
hub, if that is a spare one: the front end asks it for the results. They travel in vLLM's own outputs, in
the field for KV connectors, which capflow refuses. Only workers know which controllers acted, and when; consumers get
that with the request's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from capflow import limits
from capflow.steering.action import Action, sites_of
from capflow_engine.request.options import KEY
from capflow_engine.steering.applied import Change, Dynamic


@dataclass
class _Report:
    """The report of a request and its samples."""

    controllers: tuple[str, ...]
    changes: list[Change] = field(default_factory=list)
    hubs: dict[str, int] = field(default_factory=dict)

    def packed(self) -> dict[str, Any]:
        return {KEY: msgspec.to_builtins(Dynamic(tuple(self.changes), self.controllers, self.hubs))}


class Reports:
    """The scheduler's reports of the requests that run. The samples of one request share one report.

    by_name: the report of each request that has anything to report, by the request's name.
    """

    def __init__(self) -> None:
        # The name of the request and the name of this sample, by vLLM's id.
        self._members: dict[str, tuple[str, str]] = {}
        self.by_name: dict[str, _Report] = {}
        # Requests that ended, until vLLM outputs their end.
        self._over: dict[str, tuple[str, str]] = {}

    def admit(self, key: str, together: str, name: str, controllers: Sequence[str], *, hub: int | None = None) -> None:
        """Note a new request.

        together: the name of the request; its samples share that.
        name: the name of this sample.
        controllers: those that watch it.
        hub: the number of its hub, if that is a spare one.
        """
        self._members[key] = together, name
        if hub is not None:
            self.by_name.setdefault(together, _Report(())).hubs[name] = hub
        if controllers:
            self.by_name.setdefault(together, _Report(())).controllers = tuple(controllers)

    def act(self, key: str, action: Action, position: int) -> None:
        """Note an action that holds from a position of a request on. A report lists the first `limits.ACTED_MAX`."""
        together, name = self._members[key]
        changes = self.by_name.setdefault(together, _Report(())).changes
        if len(changes) < limits.ACTED_MAX:
            sites = tuple(map(str, sites_of(action)))
            changes.append(Change(name, str(action.__struct_config__.tag), sites, position))

    def shift(self, key: str, first: int, count: int) -> None:
        """Lower the positions of a request's actions that hold from position `first` or from a later one."""
        together, name = self._members[key]
        if together in self.by_name:
            changes = self.by_name[together].changes
            for number, change in enumerate(changes):
                if change.request == name and change.position >= first:
                    changes[number] = msgspec.structs.replace(change, position=change.position - count)

    def end(self, key: str) -> None:
        """Note that a request ended."""
        member = self._members.pop(key, None)
        if member is not None and member[0] in self.by_name:
            self._over[key] = member

    def attach(self, outputs: Mapping[int, Any], stopped: Mapping[str, int]) -> None:
        """Put the reports on a step's outputs for the front ends.

        stopped: requests that a stop string ended.
        """
        for each in outputs.values():
            for output in each.outputs:
                key = output.request_id
                member = self._members.get(key) or self._over.get(key)
                report = self.by_name.get(member[0]) if member is not None else None
                if report is not None and (report.changes or output.finish_reason is not None or key in stopped):
                    output.kv_transfer_params = report.packed()
        running = {together for together, _ in self._members.values()} if self._over else set()
        for together, _ in self._over.values():
            if together not in running:
                self.by_name.pop(together, None)
        self._over.clear()


def taken(output: Any) -> Dynamic | None:
    """Take the report out of one of vLLM's outputs; None if it has none."""
    params = output.kv_transfer_params
    if not isinstance(params, dict) or KEY not in params:
        return None
    output.kv_transfer_params = None
    return msgspec.convert(params[KEY], Dynamic)
