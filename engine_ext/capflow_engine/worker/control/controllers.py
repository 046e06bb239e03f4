"""Sync controllers: they see the rows and the scores of a step, and steer requests from their next positions on.

*Replicated*: on each pipeline stage, the first tensor-parallel rank runs the controllers before the next step, and the
other ranks of the stage apply its decisions. So a plugin that fails on one rank cannot make ranks compute different
values; if each rank decided for itself, it could. The step waits for the device and for the controller.

*Ordered*: the rank that returns a step's output runs the controllers when the output is taken. The decisions travel
with the output to the scheduler, which orders all ranks of all stages to apply them. The step waits for nothing.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, UsageError, explain
from capflow.plugins.configure import Plugin, check_probe, load_plugins
from capflow.plugins.consumer import Controller, Decision, StepProbe
from capflow.protocol.message import ControllerCounts, ControllerSpec
from capflow.steering.action import Abort, Gain, Leased, SetGate, Steer, Unsteer, check_action, sites_of
from capflow.steering.request import Steering, Tier
from capflow_engine.scheduler.orders import Decided
from capflow_engine.taps.requests import VIEW, Program
from capflow_engine.worker.control.running import RunningController
from capflow_engine.worker.control.scoring import ProbeScorer
from capflow_engine.worker.control.view import Seen, Shown, View
from capflow_engine.worker.history import Owner

logger = logging.getLogger("vllm.capflow.control")

_CPU = torch.device("cpu")


class Controllers:
    """The controllers of one hub in one worker, for the hub's requests; replaced when the hub asks for others.

    Invariant: no fault of a controller ends a step. Faults are counted, logged and reported as troubles.

    hub: the index of the hub.
    sites: the sites that the worker's pipeline stage taps. A replicated controller runs in the stage of the sites that
        it reads, and steers there; one that reads or steers at several stages is refused. An ordered one reads at the
        last stage.
    decides: whether controllers run in this worker, the stage's first tensor-parallel rank; other ranks apply its
        decisions.
    last: whether this is the last pipeline stage, which returns the outputs.
    frozen: whether the engine is frozen.
    device: where the rows are.
    """

    def __init__(
        self,
        specs: Sequence[ControllerSpec],
        info: ModelInfo,
        sites: tuple[Site, ...],
        hub: int,
        *,
        decides: bool = True,
        last: bool = True,
        frozen: bool = False,
        device: torch.device = _CPU,
    ) -> None:
        self.specs = tuple(specs)
        self.hub = hub
        self.info = info
        self.sites = sites
        self._own = frozenset(sites)
        self._index = {site: n for n, site in enumerate(sites)}
        # The controllers of this stage, by their index in the hub's list.
        self._all: dict[int, RunningController] = {}
        # The requests that ended, for ordered controllers: the step that began then, and the id and vLLM's id.
        self._over: list[tuple[int, str, str]] = []
        self._frozen = frozen
        plugins, why_none = _installed() if specs and decides else ({}, "")
        probes: list[tuple[int, StepProbe]] = []
        for order, spec in enumerate(specs):
            if not spec.runs:
                continue
            running = RunningController(Owner(order, spec.label), spec)
            try:
                reads = self._reads(spec.captures) & self._own
                if not (last if spec.ordered else reads or not spec.captures):
                    continue  # it runs in another stage
            except CapflowError as e:
                running.disable(str(e))
            self._all[order] = running
            if why_none:
                running.disable(why_none)
            elif decides and not running.trouble:
                probes += self._start(running, plugins.get(spec.name))
        # What these controllers see together, by their indices.
        self.programs: dict[tuple[int, ...], Program] = {}
        self.scorer = ProbeScorer(probes, info.hidden_size, device, hub) if probes else None
        self._look()

    @property
    def here(self) -> bool:
        """Whether this stage has a replicated controller; the same on each of its tensor-parallel ranks."""
        return any(not each.spec.ordered for each in self._all.values())

    @property
    def ordered(self) -> bool:
        """Whether an ordered controller runs in this worker."""
        return any(each.spec.ordered and each.controller is not None for each in self._all.values())

    @property
    def reads_rows(self) -> bool:
        """Whether a controller reads rows, so that they must come to the host."""
        return any(each.controller is not None and each.spec.capture is not None for each in self._all.values())

    @property
    def troubles(self) -> tuple[str, ...]:
        """The trouble of each controller that has one."""
        return tuple(trouble for each in list(self._all.values()) if (trouble := each.trouble) is not None)

    @property
    def counts(self) -> dict[str, ControllerCounts]:
        """The counts of each controller that runs in this worker."""
        every = list(self._all.values())[: limits.CONTROLLERS_MAX]
        return {each.owner.name: each.counts for each in every if each.controller is not None or each.trouble}

    def owner(self, order: int) -> Owner:
        """Return the owner of a controller's actions."""
        return Owner(order, self.specs[order].label)

    def watching(self, request: str) -> tuple[int, ...]:
        """Return the indices of the controllers that run in this worker and see a request."""
        every = self._all.items()
        return tuple(n for n, each in every if each.controller is not None and each.spec.sees(request))

    def captures(self, watching: Sequence[int]) -> list[CaptureSpec]:
        """Return the specs of the rows that these controllers read or score."""
        return [capture for n in watching for capture in self._all[n].spec.captures]

    def run(self, shown: Shown, requests: Mapping[str, str], *, ordered: bool = False) -> list[Decided]:
        """Show a step to the controllers of one mode; return their decisions, in their order.

        Actions apply from the next position on. An action that would change nothing is left out.

        requests: the key (vLLM's id) of each of the hub's requests, by id.
        """
        if ordered:
            self._end_ordered(shown.step)
        decided: list[Decided] = []
        for order, each in self._all.items():
            if each.controller is None or each.spec.ordered != ordered:
                continue
            if each.keys:
                self._see_again(each, shown)
            view = View(shown, each.seen, self.hub, lambda each=each: _steered(each, requests))  # type: ignore[misc]
            began = time.perf_counter()
            try:
                decisions = _bounded(each.controller.on_step(view))
            except PLUGIN_FAULTS as e:
                each.failed(f"step {shown.step}", e)
                continue
            finally:
                each.timed(time.perf_counter() - began)
            each.succeeded()
            rows = _rows_of(shown) if decisions else {}
            for decision in decisions:
                try:
                    checked = self._decided(each, order, decision, rows, requests)
                except PLUGIN_FAULTS as e:
                    each.refuse(str(e) if isinstance(e, CapflowError) else f"{type(e).__name__}: {e}")
                else:
                    decided += checked
        return decided

    def forget(self, request: str, key: str, step: int) -> None:
        """Call each controller's `on_request_done`; an ordered one's when it has seen the steps before step `step`."""
        if self.ordered:
            self._over.append((step, request, key))
        for each in self._all.values():
            if not each.spec.ordered:
                _end(each, request, key)

    def done(self, order: int, key: str, refusal: CapflowError | None) -> None:
        """Record the outcome of an action; `refusal` is None if the action is applied."""
        each = self._all.get(order)
        if each is None:  # it runs in another stage
            return
        if refusal is None:
            each.accept()
        else:
            each.forget(key)
            each.refuse(str(refusal))

    def hold_back(self, order: int, key: str) -> None:
        """Record that an action met a freeze on its way here: it is not applied, and no trouble."""
        if order in self._all:
            self._all[order].forget(key)
            self._all[order].hold_back()

    def take_back(self, *, frozen: bool = False) -> None:
        """Note that no action of any controller holds any more.

        frozen: whether actions are held back from now on; aborts are not.
        """
        self._frozen = frozen
        for each in list(self._all.values()):
            each.take_back()

    def lease_over(self, order: int, key: str, kind: str, target: str) -> None:
        """Note that an action of a controller no longer holds, because its lease ended."""
        if order in self._all:
            self._all[order].lease_over(key, kind, target)

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

    def _start(self, running: RunningController, plugin: Plugin | None) -> list[tuple[int, StepProbe]]:
        """Start a controller; return its probes, with the indices of their sites."""
        spec = running.spec
        if plugin is None or not issubclass(plugin, Controller):
            running.disable("not installed where the engine runs")
            return []
        try:
            controller = plugin(msgspec.msgpack.decode(spec.state, type=plugin.State))
            controller.instance = spec.label
            controller.open(self.info)
            probes = list(controller.probes())
            for number, probe in enumerate(probes):
                check_probe(probe, f"probes()[{number}]")
                _check_width(probe, number, self.info.hidden_size)
            if not spec.captures:  # the hub did not send them
                own = controller.spec(), tuple(probe.spec() for probe in probes)
                spec = running.spec = msgspec.structs.replace(spec, capture=own[0], scored=own[1])
            reads, steers = self._reads(spec.captures), frozenset(controller.steers())
            if len(spec.scored) != len(probes):
                expected = f"{len(spec.scored)}, as in the hub"
                raise UsageError(explain("probes()", got=f"{len(probes)} probes", expected=expected))
            if reads - self._own:
                if spec.ordered:
                    raise UsageError(_not_last(reads, self._own))
                raise UsageError(_split("it reads", reads, self._own))
            if elsewhere := steers - self._may_steer(spec):
                raise UsageError(self._no_steering(spec, steers if not spec.ordered else elsewhere))
        except PLUGIN_FAULTS as e:
            if not isinstance(e, CapflowError):
                logger.exception("controller %s did not start", spec.label)
            running.disable(str(e) if isinstance(e, CapflowError) else f"did not start ({type(e).__name__}: {e})")
            return []
        running.controller = controller
        return [(self._index[probe.site], probe) for probe in probes]

    def _look(self) -> None:
        """Note what each controller sees, beside what the others see."""
        started = [each for each in self._all.values() if each.controller is not None]
        # By site, the sets of positions that controllers read or score there.
        every: dict[Site, set[Positions]] = {}
        for each in started:
            for capture in each.spec.captures:
                for site, want in self._resolved(capture).items():
                    every.setdefault(site, set()).add(want.positions)

        def beside(site: Site, positions: Positions) -> Positions | None:
            return None if every[site] == {positions} else positions

        places = {} if self.scorer is None else {n: o for at in self.scorer.at.values() for o, n in enumerate(at)}
        number = 0
        for each in started:
            spec = each.spec
            read = {} if spec.capture is None else self._resolved(spec.capture)
            reads = {self._index[site]: beside(site, want.positions) for site, want in read.items()}
            probes = []
            for capture in spec.scored:
                ((site, want),) = self._resolved(capture).items()
                probes.append((self._index[site], places[number], beside(site, want.positions)))
                number += 1
            each.seen = Seen(self.sites, reads, probes, None if spec.requests == "*" else spec.sees)

    def _resolved(self, capture: CaptureSpec) -> Mapping[Site, Any]:
        return capture.resolve(self.info.sites, num_layers=self.info.num_layers)

    def _reads(self, captures: Iterable[CaptureSpec]) -> frozenset[Site]:
        """Return the sites of specs; raise UsageError if the model lacks one, or its rows have a shape of their own."""
        sites = frozenset(site for capture in captures for site in self._resolved(capture))
        for site in sorted(sites):
            site.check_stream("it reads")
        return sites

    def _see_again(self, each: RunningController, shown: Shown) -> None:
        """Have a controller's actions forgotten that were decided on rows which this step computes anew."""
        for block in shown.plan.blocks:
            if block.channel == VIEW and block.hub == self.hub:
                for number, start, _, _ in block.spans:
                    if (key := shown.plan.batch[number].request.key) in each.keys:
                        each.seen_again(key, start)

    def _end_ordered(self, step: int) -> None:
        """Have ordered controllers forget the requests that ended before a step began."""
        while self._over and self._over[0][0] <= step:
            _, request, key = self._over.pop(0)
            for each in self._all.values():
                if each.spec.ordered:
                    _end(each, request, key)

    def _decided(
        self,
        each: RunningController,
        order: int,
        decision: Any,
        rows: Mapping[str, tuple[int, int]],
        requests: Mapping[str, str],
    ) -> list[Decided]:
        """Return a decision as other ranks get it; none if it changes nothing; raise if it is malformed."""
        if not isinstance(decision, Decision):
            if not isinstance(decision, Steer | Unsteer | Gain | SetGate | Abort):
                expected = "Steer, Unsteer, Gain, SetGate, Abort and Decision"
                raise UsageError(explain("on_step", got=type(decision).__name__, expected=expected))
            decision = Decision(decision.request, decision)
        action = decision.action
        if isinstance(action, Abort) and not each.spec.ordered:
            do = "set mode=ordered"
            raise UsageError(explain("on_step", got="Abort of a replicated controller", do=do))
        key = requests.get(decision.request)
        if key is None or not each.spec.sees(decision.request):
            raise UsageError(explain("on_step: request", got="one that is not running", expected="one of the view"))
        if action is not None and action.request != decision.request:
            raise UsageError(explain("on_step: request", got="a Decision for another request than its action's"))
        steers = action is not None and not isinstance(action, Abort)
        if steers and each.repeats(key, action):
            return []
        if steers and self._frozen:
            each.hold_back()
            return []
        first, row = rows.get(key, (0, -1))
        position, score, threshold, label = _cause(decision)
        if isinstance(action, Abort) and position is not None:
            position = max(position, first)  # tokens of earlier steps are with their readers
        whole = Decided(key, self.hub, order, action, row, position, score, threshold, label)
        checked = _decoder.decode(msgspec.msgpack.encode(whole))
        if checked.action is not None and not isinstance(checked.action, Abort):
            self._check(each, checked.action)
            each.sent(key, row, checked.action)
        return [checked]

    def _check(self, each: RunningController, action: Steer | Unsteer | Gain | SetGate) -> None:
        """Raise UsageError if an action does not fit the model, or the stage of a replicated controller."""
        spec = each.spec
        check_action(action)
        if isinstance(action, Leased) and action.lease_s is not None:
            expected = "lease_positions, because ranks have different clocks"
            raise UsageError(explain("on_step: lease_s", got=f"{action.lease_s:g}", expected=expected))
        own = isinstance(action, Gain) and action.owner == each.owner.gain_name
        if isinstance(action, Gain | SetGate) and not own and not spec.ordered and self.info.stages > 1:
            got, expected = f"{action.__struct_config__.tag} on one pipeline stage", "on all stages"
            raise UsageError(explain("on_step", got=got, expected=expected, do="set mode=ordered"))
        if isinstance(action, Steer):
            Steering(base=Tier(action.vectors, action.clamps)).check(self.info)
            if elsewhere := frozenset(sites_of(action)) - self._may_steer(spec):
                raise UsageError(self._no_steering(spec, elsewhere))

    def _may_steer(self, spec: ControllerSpec) -> frozenset[Site]:
        return frozenset(self.info.sites) if spec.ordered else self._own

    def _no_steering(self, spec: ControllerSpec, sites: Iterable[Site]) -> str:
        if not spec.ordered:
            return _split("it steers at", sites, self._own)
        return explain("it steers at", got=", ".join(map(str, sorted(sites))), expected="tapped sites")


PLUGIN_FAULTS = (Exception, SystemExit)
"""The exceptions of a plugin that capflow handles."""

_decoder = msgspec.msgpack.Decoder(Decided)


def _installed() -> tuple[Mapping[str, Plugin], str]:
    """Return the installed plugins by name, and why they could not be loaded (empty if they were)."""
    try:
        return load_plugins(), ""
    except PLUGIN_FAULTS as e:
        return {}, str(e) if isinstance(e, CapflowError) else f"plugins cannot be loaded ({type(e).__name__}: {e})"


def _bounded(actions: Any) -> list[Any]:
    """Return the actions of a controller as a list; `actions` may be a generator that fails or never ends."""
    bounded = list(itertools.islice(actions, limits.ACTIONS_WAITING_MAX + 1))
    if len(bounded) > limits.ACTIONS_WAITING_MAX:
        expected = f"at most {limits.ACTIONS_WAITING_MAX} in a step"
        raise UsageError(explain("on_step", got="more actions", expected=expected))
    return bounded


def _rows_of(shown: Shown) -> dict[str, tuple[int, int]]:
    """Return the first and the last valid position of each request in a step, by vLLM's id."""
    rows = {part.request.key: (part.start, part.start + part.length - 1) for part in shown.plan.batch}
    ends = {key: (rows[key][0], min(end - 1, rows[key][1])) for key, end in shown.ends.items() if key in rows}
    return rows | ends


def _end(each: RunningController, request: str, key: str) -> None:
    """Have a controller forget a request."""
    each.forget(key)
    if each.controller is not None:
        try:
            each.controller.on_request_done(request)
        except PLUGIN_FAULTS as e:
            each.failed("on_request_done", e)


def _steered(each: RunningController, requests: Mapping[str, str]) -> Collection[str]:
    """Return the ids of the requests that a controller steers."""
    keys = each.steered()
    return {request for request, key in requests.items() if key in keys} if keys else ()


def _cause(decision: Decision) -> tuple[int | None, float | None, float | None, str]:
    """Return the fields of a decision's event, as plain numbers; raise if they are none."""
    position = None if decision.position is None else int(decision.position)
    score, threshold = (None if n is None else float(n) for n in (decision.score, decision.threshold))
    if any(number is not None and not np.isfinite(number) for number in (score, threshold)):
        raise UsageError(explain("on_step: score", got="NaN or infinity", expected="a finite number"))
    if position is not None and position < 0:
        raise UsageError(
            explain("on_step: position", got=str(position), expected="a position of the request, from 0 on")
        )
    label = decision.label or ("" if decision.action is None else decision.action.label)
    return position, score, threshold, label


def _check_width(probe: StepProbe, number: int, hidden_size: int) -> None:
    width = np.asarray(probe.weight).size
    if width != hidden_size:
        expected = f"{hidden_size}, the model's width"
        raise UsageError(explain(f"probes()[{number}].weight", got=f"{width} numbers", expected=expected))


def _split(does: str, sites: Iterable[Site], own: Iterable[Site]) -> str:
    """Return the error for a controller that needs more than one pipeline stage."""
    layers = sorted({site.layer for site in own})
    expected = f"sites of one pipeline stage, such as this one with layers {layers[0]}..{layers[-1]}" if layers else ""
    do = "read and steer at layers of one stage, or run without pipeline stages"
    return explain(does, got=", ".join(map(str, sorted(sites))), expected=expected, do=do)


def _not_last(sites: Iterable[Site], own: Iterable[Site]) -> str:
    """Return the error for an ordered controller that reads at an earlier pipeline stage than the last."""
    layers = sorted({site.layer for site in own})
    expected = f"sites of the last pipeline stage, with layers {layers[0]}..{layers[-1]}" if layers else "other sites"
    do = "read there, or set mode=replicated and read and steer at layers of one stage"
    return explain("mode ordered reads", got=", ".join(map(str, sorted(sites))), expected=expected, do=do)
