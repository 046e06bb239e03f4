"""Sync controllers: they run between two steps, see the rows of the first, and steer the second.

On each pipeline stage, the first tensor-parallel rank runs the controllers, and the other ranks apply its decisions. So
a plugin that fails on one rank cannot make ranks compute different values.
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
from capflow.steering.action import Steer, Unsteer, check_action
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector
from capflow_engine.taps.plan import VIEW, Plan
from capflow_engine.worker.history import Owner

logger = logging.getLogger("vllm.capflow.control")


class View:
    """The rows of one step that controllers asked for.

    rows: `[plan.rows, hidden]` in the model's dtype.
    sites: the tapped sites, in the order of their indices.
    limits: by vLLM's id, the end of a request's valid positions, for requests of which the step has more.
    hub: the index of the hub whose requests are shown.
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
        for block in self._plan.blocks:
            if block.channel != VIEW or block.hub != self._hub:
                continue
            for order, index in enumerate(block.sites):
                base = block.base + order * block.rows
                for number, start, length, row in block.spans:
                    request = self._plan.batch[number].request
                    end = min(start + length, self._limits.get(request.key, start + length))
                    if end <= start:
                        continue
                    values = self._rows[base + row : base + row + end - start].astype(np.float32)
                    yield StepRows(request.id, self._sites[index], start, request.prompt_length, values)


class Decided(NamedTuple):
    """An action of a controller, checked against the model.

    key: vLLM's id of the request.
    hub: the index of the request's hub.
    order: the controller's index in the hub's list.
    """

    key: str
    hub: int
    order: int
    action: Steer | Unsteer


class _Running:
    """A controller and its counts.

    capture: the spec of the rows that it reads; None if it could not be started.
    """

    def __init__(self, owner: Owner, capture: CaptureSpec | None) -> None:
        self.owner = owner
        self.capture = capture
        self.controller: Controller | None = None
        # Why it is disabled; empty if it is not.
        self._why_disabled = ""
        # Exceptions since the start.
        self._failed = 0
        self._failed_in_a_row = 0
        # Refused actions since the start.
        self._refused = 0
        # Why the latest action was refused; empty if it was applied.
        self._refusal = ""
        # Steps since the start that it did not see, and why it missed the latest.
        self._missed = 0
        self._miss = ""
        # The type of the latest exception.
        self._error = ""

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

    def refuse(self, why: str) -> None:
        """Count an action that is not applied."""
        self._refused += 1
        self._refusal = why
        if not self._refused & (self._refused - 1):
            logger.error("controller %s: an action is refused (%d so far): %s", self.owner.name, self._refused, why)

    def accept(self) -> None:
        """Record that an action is applied."""
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
        else:
            return None
        return f"controller {self.owner.name}: {cause}"[: limits.TROUBLE_LENGTH_MAX]


class Controllers:
    """The controllers of one hub in one worker, for the hub's requests; replaced when the hub asks for others.

    Invariant: no fault of a controller ends a step. Faults are counted, logged and reported as troubles.

    hub: the index of the hub.
    sites: the sites that the worker's pipeline stage taps. A controller runs in the stage of the sites that it reads,
        and steers there; one that reads or steers at several stages is refused.
    decides: whether controllers run in this worker, the stage's first tensor-parallel rank; other ranks apply its
        decisions.
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
        # The controllers of this stage, by their index in the hub's list.
        self._all: dict[int, _Running] = {}
        plugins, why_none = _installed() if specs and decides else ({}, "")
        for order, spec in enumerate(specs):
            running = _Running(Owner(order, spec.label), spec.capture)
            try:
                if spec.capture is not None and not self._reads(spec.capture) & self._own:
                    continue  # it runs in another stage
            except CapflowError as e:
                running.disable(str(e))
            self._all[order] = running
            if why_none:
                running.disable(why_none)
            elif decides and not running.trouble:
                self._start(running, spec, plugins.get(spec.name))

    @property
    def here(self) -> bool:
        """Whether this stage has a controller; the same on each of its tensor-parallel ranks."""
        return bool(self._all)

    @property
    def troubles(self) -> tuple[str, ...]:
        """The trouble of each controller that has one."""
        return tuple(trouble for each in list(self._all.values()) if (trouble := each.trouble) is not None)

    def owner(self, order: int) -> Owner:
        """Return the owner of a controller's actions."""
        return self._all[order].owner

    def captures(self) -> list[CaptureSpec]:
        """Return the specs of the rows that running controllers read in this worker."""
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
        """Show a step to the controllers; return their actions, in their order, which apply from the next position on.

        An action that would change nothing is left out.

        ends: by vLLM's id, the end of a request's valid positions, for requests of which the step has more.
        requests: the key (vLLM's id) of each of the hub's requests, by id.
        vectors: returns the vectors that are added to a request now, by owner.
        """
        rows = buffer.view(DTYPES[self.info.dtype]).reshape(-1, self.info.hidden_size)
        decided: list[Decided] = []
        for order, each in self._all.items():
            if each.controller is None:
                continue
            view = View(step, plan, rows, self.sites, ends, self.hub)
            try:
                actions = _bounded(each.controller.on_step(view))
            except PLUGIN_FAULTS as e:
                each.failed(f"step {step}", e)
                continue
            each.succeeded()
            for action in actions:
                try:
                    key = self._key(action, requests)
                    held = vectors(key).get(each.owner, ())
                    if held != (action.vectors if isinstance(action, Steer) else ()):
                        decided.append(Decided(key, self.hub, order, self._checked(action)))
                except PLUGIN_FAULTS as e:
                    each.refuse(str(e) if isinstance(e, CapflowError) else f"{type(e).__name__}: {e}")
        return decided

    def forget(self, request: str) -> None:
        """Call each controller's `on_request_done`."""
        for each in self._all.values():
            if each.controller is not None:
                try:
                    each.controller.on_request_done(request)
                except PLUGIN_FAULTS as e:
                    each.failed("on_request_done", e)

    def done(self, order: int, refusal: CapflowError | None) -> None:
        """Record the outcome of an action; `refusal` is None if the action is applied."""
        if refusal is None:
            self._all[order].accept()
        else:
            self._all[order].refuse(str(refusal))

    def missed(self, rows: int, rows_max: int) -> None:
        """Record that controllers do not see a step, because its rows do not fit in the device's staging memory."""
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
            running.disable("not installed where the engine runs")
            return
        try:
            controller = plugin(msgspec.msgpack.decode(spec.state, type=plugin.State))
            controller.instance = spec.label
            controller.open(self.info)
            if running.capture is None:  # the hub did not send it
                running.capture = controller.spec()
            if self._reads(running.capture) - self._own:
                running.disable(_split("it reads", self._reads(running.capture), self._own))
            elif (steers := frozenset(controller.steers())) - self._own:
                running.disable(_split("it steers at", steers, self._own))
            else:
                running.controller = controller
        except PLUGIN_FAULTS as e:
            logger.exception("controller %s did not start", spec.label)
            running.disable(str(e) if isinstance(e, CapflowError) else f"did not start ({type(e).__name__}: {e})")

    def _reads(self, capture: CaptureSpec) -> frozenset[Site]:
        """Return the sites of a spec; raise UsageError if the model lacks one."""
        return frozenset(capture.resolve(self.info.sites, num_layers=self.info.num_layers))

    @staticmethod
    def _key(action: Any, requests: Mapping[str, str]) -> str:
        if not isinstance(action, Steer | Unsteer):
            raise UsageError(explain("on_step", got=type(action).__name__, expected="Steer and Unsteer"))
        key = requests.get(action.request)
        if key is None:
            raise UsageError(explain("on_step: request", got="one that is not running", expected="one of the view"))
        return key

    def _checked(self, action: Steer | Unsteer) -> Steer | Unsteer:
        """Return an action as other ranks get it; raise if it is malformed or does not fit the model or the stage."""
        decoded: Steer | Unsteer = _actions.decode(msgspec.msgpack.encode(action))
        check_action(decoded)
        if isinstance(decoded, Steer):
            if decoded.clamps or decoded.gain != 1.0 or decoded.lease_s or decoded.lease_positions:
                got = "clamps, a gain or a lease"
                raise UsageError(explain("on_step", got=got, expected="a Steer with vectors only"))
            Steering(base=Tier(decoded.vectors)).check(self.info)
            if elsewhere := frozenset(vector.site for vector in decoded.vectors) - self._own:
                raise UsageError(_split("it steers at", elsewhere, self._own))
        return decoded


PLUGIN_FAULTS = (Exception, SystemExit)
"""The exceptions of a plugin that capflow handles."""

_actions = msgspec.msgpack.Decoder(Steer | Unsteer)
_shared = msgspec.msgpack.Decoder(list[Decided])


def _installed() -> tuple[Mapping[str, Plugin], str]:
    """Return the installed plugins by name, and why they could not be loaded (empty if they were)."""
    try:
        return load_plugins(), ""
    except PLUGIN_FAULTS as e:
        return {}, str(e) if isinstance(e, CapflowError) else f"plugins cannot be loaded ({type(e).__name__}: {e})"


def encode(decided: Sequence[Decided]) -> bytes:
    """Return decisions as bytes for the other tensor-parallel ranks."""
    return msgspec.msgpack.encode(decided)


def decode(data: bytes) -> list[Decided]:
    """Return the decisions that `encode` encoded."""
    return _shared.decode(data)


def _bounded(actions: Any) -> list[Any]:
    """Return the actions of a controller as a list; `actions` may be a generator that fails or never ends."""
    bounded = list(itertools.islice(actions, limits.ACTIONS_WAITING_MAX + 1))
    if len(bounded) > limits.ACTIONS_WAITING_MAX:
        expected = f"at most {limits.ACTIONS_WAITING_MAX} in a step"
        raise UsageError(explain("on_step", got="more actions", expected=expected))
    return bounded


def _split(does: str, sites: Iterable[Site], own: Iterable[Site]) -> str:
    """Return the error for a controller that needs more than one pipeline stage."""
    layers = sorted({site.layer for site in own})
    expected = f"sites of one pipeline stage, such as this one with layers {layers[0]}..{layers[-1]}" if layers else ""
    do = "read and steer at layers of one stage, or run without pipeline stages"
    return explain(does, got=", ".join(map(str, sorted(sites))), expected=expected, do=do)
