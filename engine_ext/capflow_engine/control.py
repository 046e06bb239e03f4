"""Sync controllers: run in every worker between two steps, they see the rows of the one and steer the next."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.action import Steer, Unsteer
from capflow.consumer import Controller, StepRows
from capflow.frame import DTYPES
from capflow.message import ControllerSpec, ModelInfo
from capflow.plugins import load_plugins
from capflow.site import Site
from capflow_engine.plan import VIEW, Plan

logger = logging.getLogger("vllm.capflow.control")


class View:
    """The rows that controllers asked for of one step. rows: `[plan.rows, hidden]` in the model's dtype.

    limits: by vLLM's id, the position behind the last row that is the request's, where the step has more. hub: whose requests.
    """

    def __init__(
        self,
        step: int,
        plan: Plan,
        rows: npt.NDArray[Any],
        sites: tuple[Site, ...],
        limits: Mapping[str, int],
        hub: int = 0,
    ) -> None:
        self.step = step
        self._hub = hub
        self._plan = plan
        self._limits = limits
        self._rows = rows
        self._sites = sites

    def rows(self) -> Iterator[StepRows]:
        """Yield the rows of each request at each site, as float32."""
        for group in self._plan.groups:
            if group.channel != VIEW or group.hub != self._hub:
                continue
            for place, index in enumerate(group.sites):
                base = group.base + place * group.rows
                for number, start, length, row in group.spans:
                    request = self._plan.batch[number].request
                    end = min(start + length, self._limits.get(request.key, start + length))
                    if end <= start:
                        continue
                    values = self._rows[base + row : base + row + end - start].astype(np.float32)
                    yield StepRows(request.id, self._sites[index], start, request.prompt_length, values)


class Controllers:
    """The controllers that one hub wants in one worker, for its requests; made anew when it asks for others."""

    def __init__(self, specs: Sequence[ControllerSpec], info: ModelInfo, sites: tuple[Site, ...], hub: int) -> None:
        self.specs = tuple(specs)
        self.hub = hub
        self.info = info
        self.sites = sites
        self._running: list[Controller] = []
        known = load_plugins() if specs else {}
        for spec in specs:
            cls = known.get(spec.name)
            if cls is None or not issubclass(cls, Controller):
                logger.error("controller %s: not installed where the engine runs; it does nothing", spec.label)
                continue
            try:
                controller = cls(msgspec.msgpack.decode(spec.state, type=cls.State))
                controller.instance = spec.label
                controller.open(info)
            except Exception:
                logger.exception("controller %s did not start; it does nothing", spec.label)
                continue
            self._running.append(controller)

    def captures(self) -> list[Any]:
        """Return the specs of what the controllers are to see."""
        return [controller.spec() for controller in self._running]

    def run(
        self, step: int, plan: Plan, buffer: npt.NDArray[np.uint8], limits: Mapping[str, int]
    ) -> list[tuple[str, Steer | Unsteer]]:
        """Show the controllers a step and return what they want from the next one on, in their order, each with its controller's name."""
        rows = buffer.view(DTYPES[self.info.dtype]).reshape(-1, self.info.hidden_size)
        actions: list[tuple[str, Steer | Unsteer]] = []
        for controller in self._running:
            try:
                for action in controller.on_step(View(step, plan, rows, self.sites, limits, self.hub)):
                    if isinstance(action, Steer | Unsteer):
                        actions.append((controller.instance, action))
                    else:
                        logger.error("controller %s: %s is not for a step", controller.instance, type(action).__name__)
            except Exception:
                logger.exception("controller %s failed in step %d", controller.instance, step)
        return actions

    def forget(self, request: str) -> None:
        """Tell the controllers that a request is over."""
        for controller in self._running:
            controller.on_request_done(request)
