"""Sync controllers: run between two steps, they see the rows of the one and steer the next.

On each pipeline stage the first tensor-parallel rank runs them, and the others do what it decides: so no fault of a plugin on
one rank makes ranks compute different things.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.dtypes import DTYPES
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, UsageError, explain
from capflow.plugins.configure import Plugin, load_plugins
from capflow.plugins.consumer import Controller, StepRows
from capflow.protocol.message import ControllerSpec
from capflow.steering.action import Steer, Unsteer
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector
from capflow_engine.taps.plan import VIEW, Plan
from capflow_engine.worker.history import Owner

logger = logging.getLogger("vllm.capflow.control")


class View:
    """The rows that controllers asked for of one step.

    rows: `[plan.rows, hidden]` in the model's dtype.

    limits: by vLLM's id, the position behind the last row that is the request's, where the step has more.
    hub: whose requests.
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


class Decided(NamedTuple):
    """An action that a controller decided on, which fits the model.

    key: vLLM's id of its request.
    order: the controller's place.
    """

    key: str
    hub: int
    order: int
    action: Steer | Unsteer


class _Running:
    """A controller that runs, and how it does.

    capture: what it sees; None when it could not be started.
    """

    def __init__(self, owner: Owner, capture: CaptureSpec | None) -> None:
        self.owner = owner
        self.capture = capture
        self.controller: Controller | None = None
        # Why it does nothing.
        self._why_not = ""
        # Steps, since the start.
        self._failed = 0
        self._failed_in_a_row = 0
        # Actions, since the start.
        self._refused = 0
        # Why the latest action was refused; empty when it was not.
        self._refusal = ""
        # Steps, since the start.
        self._missed = 0
        self._miss = ""
        self._error = ""

    def stop(self, why: str) -> None:
        """Have it do nothing from now on."""
        self.controller, self._why_not = None, why
        logger.error("controller %s: %s; it does nothing", self.owner.name, why)

    def failed(self, what: str, error: BaseException) -> None:
        """Count an exception; the first is logged whole, and too many in a row switch the controller off."""
        self._failed += 1
        self._failed_in_a_row += 1
        self._error = type(error).__name__
        if self._failed == 1:
            logger.error("controller %s failed in %s", self.owner.name, what, exc_info=error)
        elif not self._failed & (self._failed - 1):  # at each doubling, so that the log stays short
            logger.error("controller %s failed %d times; %s: %s", self.owner.name, self._failed, self._error, error)
        if self._failed_in_a_row >= limits.CONTROLLER_FAILURES_MAX:
            self.stop(f"failed {self._failed_in_a_row} times in a row ({self._error}), so it is switched off")

    def did(self) -> None:
        """Note that it did a step without an exception."""
        self._failed_in_a_row = 0

    def refuse(self, why: str) -> None:
        """Count an action that is not done."""
        self._refused += 1
        self._refusal = why
        if not self._refused & (self._refused - 1):
            logger.error("controller %s: an action is refused, %d so far; %s", self.owner.name, self._refused, why)

    def accept(self) -> None:
        """Note that an action is done."""
        self._refusal = ""

    def miss(self, why: str) -> None:
        """Count a step that it did not see."""
        self._missed += 1
        self._miss = why
        if not self._missed & (self._missed - 1):
            logger.error("controller %s did not see a step, %d so far: %s", self.owner.name, self._missed, why)

    @property
    def trouble(self) -> str | None:
        """Why it does not do what it is there for; None when it does."""
        what = None
        if self._why_not:
            what = self._why_not
        elif self._failed_in_a_row:
            what = f"failed in its last {self._failed_in_a_row} steps ({self._error}); see the engine's log"
        elif self._refusal:
            what = f"{self._refused} actions were refused; the last: {self._refusal}"
        elif self._miss:
            what = f"did not see {self._missed} steps; the last: {self._miss}"
        return None if what is None else f"controller {self.owner.name}: {what}"[: limits.TROUBLE_LENGTH_MAX]


class Controllers:
    """The controllers that one hub wants in one worker, for its requests; made anew when it asks for others.

    sites: those that the worker's pipeline stage taps. A controller runs in the stage that has the sites it reads, and
        steers there; one that reads or steers at several stages is refused.
    decides: whether it runs in this worker, which is the stage's first tensor-parallel rank; the others do what that
        one decides.

    Invariant: nothing that a controller does ends a step. What it cannot do is counted, logged and told as a trouble.
    """

    def __init__(
        self,
        specs: Sequence[ControllerSpec],
        info: ModelInfo,
        sites: tuple[Site, ...],
        hub: int,
        *,
        decides: bool = True,
    ) -> None:
        self.specs = tuple(specs)
        self.hub = hub
        self.info = info
        self.sites = sites
        self._own = frozenset(sites)
        # By place, those of this stage.
        self._all: dict[int, _Running] = {}
        known, why_not = _installed() if specs and decides else ({}, "")
        for order, spec in enumerate(specs):
            running = _Running(Owner(order, spec.label), spec.capture)
            try:
                if spec.capture is not None and not self._reads(spec.capture) & self._own:
                    continue  # another stage's
            except CapflowError as e:
                running.stop(str(e))
            self._all[order] = running
            if why_not:
                running.stop(why_not)
            elif decides and not running.trouble:
                self._start(running, spec, known.get(spec.name))

    @property
    def here(self) -> bool:
        """Whether any controller is this stage's; the same on each of its tensor-parallel ranks."""
        return bool(self._all)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why controllers do not do what they are there for."""
        return tuple(trouble for each in list(self._all.values()) if (trouble := each.trouble) is not None)

    def owner(self, order: int) -> Owner:
        """Return whose the actions of the controller at a place are."""
        return self._all[order].owner

    def captures(self) -> list[CaptureSpec]:
        """Return the specs of what the controllers are to see in this worker."""
        return [each.capture for each in self._all.values() if each.controller is not None and each.capture is not None]

    def run(
        self,
        step: int,
        plan: Plan,
        buffer: npt.NDArray[np.uint8],
        ends: Mapping[str, int],
        requests: Mapping[str, str],
        vectors: Callable[[str], Mapping[Owner, tuple[SteeringVector, ...]]],
    ) -> list[Decided]:
        """Show the controllers a step and return what they want from the next position on, in their order.

        ends: by vLLM's id, the position behind the last row that is the request's, where the step has more.
        requests: vLLM's ids of the hub's requests, by id.
        vectors: returns what is added to a request now, by owner; an action that would change nothing is left out.
        """
        rows = buffer.view(DTYPES[self.info.dtype]).reshape(-1, self.info.hidden_size)
        decided: list[Decided] = []
        for order, each in self._all.items():
            if each.controller is None:
                continue
            view = View(step, plan, rows, self.sites, ends, self.hub)
            try:
                wanted = _bounded(each.controller.on_step(view))
            except PLUGIN_FAULTS as e:
                each.failed(f"step {step}", e)
                continue
            each.did()
            for action in wanted:
                try:
                    key = self._key(action, requests)
                    held = vectors(key).get(each.owner, ())
                    if held != (action.vectors if isinstance(action, Steer) else ()):
                        decided.append(Decided(key, self.hub, order, self._checked(action)))
                except PLUGIN_FAULTS as e:
                    each.refuse(str(e) if isinstance(e, CapflowError) else f"{type(e).__name__}: {e}")
        return decided

    def forget(self, request: str) -> None:
        """Tell the controllers that a request is over."""
        for each in self._all.values():
            if each.controller is not None:
                try:
                    each.controller.on_request_done(request)
                except PLUGIN_FAULTS as e:
                    each.failed("on_request_done", e)

    def done(self, order: int, refusal: CapflowError | None) -> None:
        """Note what came of an action of the controller at a place."""
        if refusal is None:
            self._all[order].accept()
        else:
            self._all[order].refuse(str(refusal))

    def missed(self, rows: int, rows_max: int) -> None:
        """Note that controllers do not see a step, which had more rows for them than there is memory for on the device."""
        why = explain(
            "staging memory",
            got=f"{rows:,} rows of a step",
            expected=f"at most {rows_max:,}",
            do="read fewer sites or positions, or start the engine with a smaller --max-num-batched-tokens",
        )
        for each in self._all.values():
            if each.controller is not None:
                each.miss(why)

    def _start(self, running: _Running, spec: ControllerSpec, plugin: Plugin | None) -> None:
        if plugin is None or not issubclass(plugin, Controller):
            running.stop("not installed where the engine runs")
            return
        try:
            controller = plugin(msgspec.msgpack.decode(spec.state, type=plugin.State))
            controller.instance = spec.label
            controller.open(self.info)
            if running.capture is None:  # of a hub that does not tell it
                running.capture = controller.spec()
            if self._reads(running.capture) - self._own:
                running.stop(_split("it reads", self._reads(running.capture), self._own))
            elif (steers := frozenset(controller.steers())) - self._own:
                running.stop(_split("it steers at", steers, self._own))
            else:
                running.controller = controller
        except PLUGIN_FAULTS as e:
            logger.exception("controller %s did not start", spec.label)
            running.stop(str(e) if isinstance(e, CapflowError) else f"did not start ({type(e).__name__}: {e})")

    def _reads(self, capture: CaptureSpec) -> frozenset[Site]:
        """Return the sites that a spec names; raise UsageError for one that the model does not tap."""
        return frozenset(capture.resolve(self.info.sites, num_layers=self.info.num_layers))

    @staticmethod
    def _key(action: Any, requests: Mapping[str, str]) -> str:
        if not isinstance(action, Steer | Unsteer):
            raise UsageError(explain("on_step", got=type(action).__name__, expected="Steer and Unsteer"))
        key = requests.get(action.request)
        if key is None:
            raise UsageError(explain("on_step: request", got="one that does not run", expected="one of the view's"))
        return key

    def _checked(self, action: Steer | Unsteer) -> Steer | Unsteer:
        """Return an action as it travels; raise what shows that it is none, or does not fit the model and the stage."""
        decoded: Steer | Unsteer = _actions.decode(msgspec.msgpack.encode(action))
        if isinstance(decoded, Steer):
            Steering(base=Tier(decoded.vectors)).check(self.info)
            if elsewhere := frozenset(vector.site for vector in decoded.vectors) - self._own:
                raise UsageError(_split("it steers at", elsewhere, self._own))
        return decoded


PLUGIN_FAULTS = (Exception, SystemExit)
"""What a plugin may raise that is its own affair."""

_actions = msgspec.msgpack.Decoder(Steer | Unsteer)
_shared = msgspec.msgpack.Decoder(list[Decided])


def _installed() -> tuple[Mapping[str, Plugin], str]:
    """Return the plugins that are installed here by name, and why there are none."""
    try:
        return load_plugins(), ""
    except PLUGIN_FAULTS as e:
        return {}, str(e) if isinstance(e, CapflowError) else f"plugins cannot be loaded ({type(e).__name__}: {e})"


def encode(decided: Sequence[Decided]) -> bytes:
    """Return decisions as they travel to the other tensor-parallel ranks."""
    return msgspec.msgpack.encode(decided)


def decode(data: bytes) -> list[Decided]:
    """Return the decisions that `encode` made bytes of."""
    return _shared.decode(data)


def _bounded(actions: Any) -> list[Any]:
    """Return what a controller returned, all of it; it may be a generator that fails, or one that never ends."""
    found = list(itertools.islice(actions, limits.ACTIONS_WAITING_MAX + 1))
    if len(found) > limits.ACTIONS_WAITING_MAX:
        got = f"more than {limits.ACTIONS_WAITING_MAX} actions"
        raise UsageError(explain("on_step", got=got, expected="at most so many in a step"))
    return found


def _split(does: str, sites: Iterable[Site], own: Iterable[Site]) -> str:
    """Return why a controller cannot run that needs more than one pipeline stage."""
    layers = sorted({site.layer for site in own})
    expected = f"sites of one pipeline stage, as of this one with layers {layers[0]}..{layers[-1]}" if layers else ""
    do = "read and steer at layers of one stage, or run without pipeline stages"
    return explain(does, got=", ".join(map(str, sorted(sites))), expected=expected, do=do)
