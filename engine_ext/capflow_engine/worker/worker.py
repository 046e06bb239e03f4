"""The worker's part: taps in the model, a plan for each step, and rows for the sender.

vLLM gets `CaptureWorker` as its `worker_cls`: the platform's own worker, with its runner subclassed in place. All state
of capflow is in one object, `worker.capflow`.

Order of a step: `begin` takes the scheduler's orders and hands the steps that they settle to the sender; `prepare`
makes the plan when the runner has prepared its batch; `forward` brackets the model. The step and its rows are then
pending until a later `begin` settles it.

The scheduler resolves the consumers' specs, once for the engine. Each rank resolves a request's own spec: that takes
7 µs for one site and 53 µs for 128. To read it resolved takes 5 and 28 µs, after 8 and 79 µs in the scheduler to write
it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from capflow import limits
from capflow.capture.frame import Rank
from capflow.capture.site import Site
from capflow.capture.spec import Capture, Wanted, join
from capflow.protocol.message import ControllerSpec, CpuTime
from capflow.steering.action import FROZEN_TROUBLE
from capflow.system.cpu import thread_times_ns
from capflow.text.token_texts import TokenTexts
from capflow_engine.compat import engine as compat
from capflow_engine.compat import launch
from capflow_engine.compat import model as compat_model
from capflow_engine.compat import step as compat_step
from capflow_engine.compat.versions.surface import V2_RUNNER
from capflow_engine.layer.structure import HookPlace
from capflow_engine.ranks.agreement import Agreement
from capflow_engine.ranks.checksums import Checksums
from capflow_engine.scheduler.orders import (
    FIRST_WEIGHTS,
    Admitted,
    Ended,
    News,
    Orders,
    Rejection,
    Unscheduled,
    Wants,
)
from capflow_engine.settings import Settings
from capflow_engine.steering.budget import Size
from capflow_engine.stepclock import SCHEDULER, StepClock
from capflow_engine.taps import height
from capflow_engine.taps import step as step_module
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.gates import Gating
from capflow_engine.taps.plan import EMPTY_PLAN, Plan, Planner
from capflow_engine.taps.requests import Program, Tracked
from capflow_engine.taps.step import Step
from capflow_engine.taps.tables import Tables
from capflow_engine.taps.tap import Tap, install
from capflow_engine.taps.ways import Ways
from capflow_engine.taps.widths import Widths
from capflow_engine.worker.changes import Changes
from capflow_engine.worker.control.controllers import Controllers
from capflow_engine.worker.control.deciding import Deciding, Scored
from capflow_engine.worker.events import Events
from capflow_engine.worker.gates.firing import Firing, GatedStep
from capflow_engine.worker.gates.latches import Latches
from capflow_engine.worker.history import Histories
from capflow_engine.worker.lineup import Lineup
from capflow_engine.worker.marks import StageMarks
from capflow_engine.worker.outlets import Outlets
from capflow_engine.worker.pending import READY, Pending
from capflow_engine.worker.ring import Ring
from capflow_engine.worker.rows import RowMemory
from capflow_engine.worker.runner import tap_runner
from capflow_engine.worker.sender import Computed

logger = logging.getLogger("vllm.capflow.worker")


_NO_TOKENS = np.empty(0, np.int32)


class _HubWants(NamedTuple):
    """The wants of one hub.

    wants: what it wants of each of its requests.
    program: the program of a request without a spec of its own.
    """

    wants: Wants
    program: Program


class WorkerCapture:
    """The state of capflow in one worker, from the loading of the model to the worker's end."""

    # The texts of tokens; None without a tokenizer, and in ranks that send nothing.
    _texts: TokenTexts | None = None
    # Of the step that was prepared last; None if no pipeline stage has a controller of its own.
    marks: StageMarks | None = None
    # Whether the taps have nothing to do in the forward pass that begins, and it has no events. Then `rest` is called,
    # not `forward`.
    rests = False

    def __init__(self, worker: Any, settings: Settings) -> None:
        self.settings = settings
        self.info = compat.model_info(worker.vllm_config)
        self.runner = worker.model_runner
        self.device: torch.device = worker.device
        self.rank = Rank(*compat.rank_of(worker))
        self._ranks = worker.vllm_config.parallel_config.tensor_parallel_size
        self.dtype: torch.dtype = worker.model_config.dtype
        owned = sorted(
            compat_model.owned_sites(self.runner.get_model(), self.info, self.dtype), key=lambda place: place[0]
        )
        self.sites = tuple(site for site, _, _ in owned)
        self.index = {site: n for n, site in enumerate(self.sites)}
        self.widths = Widths.of(self.info, self.sites)
        self.planner = Planner(len(self.sites), len(self.settings.hubs), self.widths.of_site)
        self._divides = any(each.divided for each in self.widths.classes)
        self.memory = RowMemory(self.widths, self.dtype, self._ranks)
        requests = worker.scheduler_config.max_num_seqs
        self.tables = self._make_tables(worker.scheduler_config.max_num_batched_tokens, requests)
        size = Size.of(self.settings.steering_bank_bytes, self.info.steered_width, requests)
        begins = [self.widths.classes[number].begin(self.rank.tp) for number in self.widths.of_site]
        self.bank = Bank(size.plus(size.reserve), self.index, self.info.steered_width, self.device, begins)
        self.histories = Histories(self.bank, size.reserve, self.info)
        self._install(owned)
        # A stage without taps sends too: its part of a request ends like that of any other stage.
        self.sends = self.rank.tp == 0
        self.ring, self.checksums = Ring(self.settings.outbound_bytes_max, pinned=self.tables.resident), Checksums()
        self.agreement = self._agreement()
        # The wants of each hub, by the number that orders give them.
        self.wants: dict[int, tuple[_HubWants, ...]] = {}
        self.controllers = [self._controllers((), hub) for hub in range(len(self.settings.hubs))]
        self.latches, self.clock = Latches(self.device), StepClock()
        self.firing, self._pending = Firing(), Pending()
        # The last pipeline stage has the margins of all stages; its first rank reports them.
        self._reports_gates = self.rank.tp == 0 and self.rank.pp == self.info.stages - 1
        # The step that was launched last, if it had gates; only in ranks that ship rows or report gates.
        self.gated_step: GatedStep | None = None
        # The margins that earlier pipeline stages scored in the step that is being prepared.
        self._received: torch.Tensor | None = None
        # How the last step that steered did so, on the CPU.
        self._ways: Ways | None = None
        # The margins of the step that was launched last, for the next pipeline stage; None if it had no gates.
        self.margins: torch.Tensor | None = None
        # The running requests, by vLLM's id.
        self.requests: dict[str, Tracked] = {}
        self._lineup = Lineup(self.requests)
        self.deciding = Deciding(self.requests, self.controllers, self.info, self._ranks)
        self._events = Events(self._pending)
        self.changes = Changes(
            self.requests, self.histories, self.controllers, self._events, first=self.rank.pp == 0, last=self._last
        )
        # The step between `prepare` and the end of `forward`. All that is wanted of it:
        self._planned = EMPTY_PLAN
        # What the taps do, which is less if there is no room; None in a dummy run.
        self._plan: Plan | None = None
        # The weights that compute it.
        self._weights = FIRST_WEIGHTS
        # The plan of the last step if its taps were idle.
        self._rested: Plan | None = None
        # The memory that its rows are copied to.
        self._buffer: Any = None
        # Why its rows for consumers are lost.
        self._lost: str | None = None
        self._copy_stream: Any = torch.cuda.Stream() if self.tables.resident else None
        # The event after the copy of the previous step's rows from the staging buffer.
        self._copied: Any = None
        self.outlets = self._make_outlets(worker.vllm_config) if self.sends else None
        self.agreement.start()
        addresses = ", ".join(hub.address for hub in self.settings.hubs)
        logger.info("capflow: %d taps; rows go to %s", len(self.sites), addresses)

    def _install(self, owned: Sequence[tuple[Site, Any, HookPlace]]) -> None:
        """Put a tap at each site, given its layer and its place there.

        Taps before one module run in the order in which they are put there: that of the sites in the forward pass, so
        that a gate is scored before it acts.
        """
        for n, (site, layer, place) in sorted(enumerate(owned), key=lambda each: each[1][0].depth):
            number = self.widths.of_site[n]
            width = self.widths.classes[number].part
            tap = Tap(n, place, self.tables, self.bank, self.device, number, width)
            height.register(tap.site, str(site), width)
            install(layer, site.hook, place, tap)
            if site.hook == "neurons":
                compat_model.give_tensor(layer.get_submodule(place.module))
        height.watch(self.runner.get_model())

    @property
    def _last(self) -> bool:
        """Whether this is the last pipeline stage, which returns the outputs."""
        return self.rank.pp == self.info.stages - 1

    def _make_outlets(self, vllm_config: Any) -> Outlets:
        if compat.has_tokenizer(vllm_config):
            load = functools.partial(compat.load_tokenizer, vllm_config)
            self._texts = TokenTexts(load, compat.tokenizer_key(vllm_config))
        return Outlets(
            self.settings,
            rank=self.rank,
            info=self.info,
            sites=self.sites,
            widths=self.widths.classes,
            ring=self.ring,
            text_of=self._texts,
            reports=lambda hub: (self._troubles(hub), self.controllers[hub].counts),
            determinism=lambda: self.agreement.result if self.rank.pp == 0 else None,
            cpu=self._cpu_times,
        )

    def _cpu_times(self) -> dict[str, CpuTime]:
        """Return the processor time of capflow in this process. Callable on any thread."""
        threads = {name: CpuTime(spent) for name, spent in thread_times_ns().items()}
        times = {"worker": self.clock.time, "scheduler": SCHEDULER.time}
        return threads | {part: spent for part, spent in times.items() if spent.steps}

    def _agreement(self) -> Agreement:
        stages, ranks = self.info.stages, self._ranks
        store = compat.rank_store if stages * ranks > 1 else None
        reaction = self.settings.on_divergence
        return Agreement(self.checksums, self.rank, stages=stages, ranks=ranks, store=store, reaction=reaction)

    def _troubles(self, hub: int) -> tuple[str, ...]:
        """Return what a hub hears of the worker's troubles. Callable on any thread."""
        trouble = self.agreement.trouble
        frozen = (FROZEN_TROUBLE,) if self.histories.frozen else ()
        return (*frozen, *self.controllers[hub].troubles, *(() if trouble is None else (trouble,)))

    def _controllers(self, specs: Sequence[ControllerSpec], hub: int) -> Controllers:
        decides = self.rank.tp == 0
        frozen, last = self.histories.frozen, self._last
        return Controllers(
            specs, self.info, self.sites, hub, decides=decides, last=last, frozen=frozen, device=self.device
        )

    def _make_tables(self, tokens: int, requests: int) -> Tables:
        rows = [0] * len(self.widths.classes)
        for number in self.widths.of_site:
            rows[number] += tokens if number else 2 * tokens  # controllers read rows of class 0 alone
        parts = [each.part for each in self.widths.classes]
        wanted = sum(count * part for count, part in zip(rows, parts, strict=True)) * self.dtype.itemsize
        if wanted > self.settings.staging_bytes_max:
            rows = [count * self.settings.staging_bytes_max // wanted for count in rows]
        return Tables(
            sites=max(len(self.sites), 1),
            tokens=tokens,
            rows=rows[0],
            shaped=[*zip(rows[1:], parts[1:], strict=True)],
            hidden=self.info.hidden_size,
            dtype=self.dtype,
            device=self.device,
            resident=self.device.type != "cpu",
            requests=requests,
        )

    @functools.cached_property
    def _ids(self) -> Any:
        """The runner's buffer of input ids, on the CPU: it is there once the runner has prepared a step."""
        return compat_step.input_ids(self.runner).numpy()

    # --- between steps ---

    def begin(self, orders: Orders | None, scheduler_output: Any) -> None:
        """Take the orders of the step that begins, and send the steps that they settle."""
        orders = orders or Orders(self._events.number)
        begun = self.clock.begin_step(orders.step)
        news, settled, drafts = orders.news, orders.settled, compat_step.drafts(scheduler_output)
        if self._events.step is not None:
            self._events.keep()
        cuts = {} if news is None else self._take_back(news)
        # The forward pass empties the caches, so each call costs a microsecond: there is none without a reason.
        if self.firing.steps:
            self._events.note_gates(self.firing, settled, self.requests)
        if self.checksums.gates:
            self.checksums.settle(settled)
        decisions = self.deciding.begin(drafts, cuts)
        if news is not None:
            self._end(news, orders.step)
        if self._pending.steps or self._pending.finished:
            for step in self._pending.settle(settled):
                assert self.outlets is not None
                self.outlets.put(step)
        self._events.number = orders.step
        self._weights = orders.weights
        if self.histories.leases:
            self.changes.end_controllers_leases()
        for decided in decisions:
            self.changes.decide(decided)
        if news is not None:
            for decided in news.decided:
                self.changes.decide(decided)
            self.changes.take(news)
        for key, prompt_length in compat_step.new_requests(scheduler_output):
            self._take_new(key, prompt_length, {} if news is None else news.admitted)
        self.clock.end(begun)

    def _take_back(self, news: News) -> dict[str, int]:
        """Correct the steps that are not settled; return the position after the last row of each request."""
        cuts = news.cuts | {key: ended.limit for key, ended in news.ended.items()}
        for rejection in news.rejected:
            self._reject(rejection, cuts.get(rejection.key))
        for key, limit in cuts.items():
            self.firing.cut(key, limit)
        return cuts

    def _end(self, news: News, step: int) -> None:
        """Forget the requests that ended before a step, and take what the hubs want from now on."""
        self._cut(news.cuts)
        for key, ended in news.ended.items():
            self._forget(key, ended, step)
        for number, wants in news.wants.items():
            self.wants[number] = tuple(_HubWants(w, self._program(w.wanted, hub)) for hub, w in enumerate(wants))
        self._end_unscheduled(news.unscheduled)
        self._pending.mark(news.marked)

    def _take_new(self, key: str, prompt_length: int, admitted: Mapping[str, Admitted]) -> None:
        """Take a request that the step sends as new.

        admitted: those that are first scheduled now.
        """
        former = self.requests.get(key)
        if former is None:
            if key in admitted:
                self._admit(key, prompt_length, admitted[key])
        elif former.prompt_length != prompt_length:
            # Streaming input makes the prompt longer. Pending steps keep the prompt that they were planned with.
            self.requests[key] = replace(former, prompt_length=prompt_length)
            self.planner.drop(former)
            self._lineup.change()
            self.histories.lengthen(self.requests[key])

    def _reject(self, rejection: Rejection, cut: int | None) -> None:
        """Correct the positions of a request's steps, which were planned as if all drafts were accepted.

        cut: where the request's rows end besides, in corrected positions.
        """
        key, _, limit, drafts = rejection
        self._pending.reject(rejection)
        self.firing.reject(rejection)
        if key in self.requests:
            self.requests[key].computed -= drafts
            if cut is not None and cut <= limit:  # what controllers did on these rows is undone
                self.histories.cut(self.requests[key], cut)
            self.histories.shift(self.requests[key], limit + drafts, drafts)

    def _cut(self, cuts: Mapping[str, int]) -> None:
        """Drop rows that belong to no request; `cuts` are the positions after the last row of each request."""
        for key, limit in cuts.items():
            self._pending.cut(key, limit)
            if key in self.requests:
                self.requests[key].computed = min(self.requests[key].computed, limit)
                self.histories.cut(self.requests[key], limit)

    def _admit(self, key: str, prompt_length: int, request: Admitted) -> None:
        hub = request.hub
        wants, program = self.wants[request.wants][hub]
        if self.outlets is not None and (hub >= self.settings.regular or wants != Wants()):
            self.outlets.expect(hub)
        if wants.controllers != self.controllers[hub].specs:
            self.controllers[hub] = self._controllers(wants.controllers, hub)
            if self.info.stages > 1:
                specs = (spec for controllers in self.controllers for spec in controllers.specs)
                marks = any(spec.runs and not spec.ordered for spec in specs)
                self.marks = (self.marks or StageMarks()) if marks else None
        options = request.options
        wanted = wants.wanted
        if options.capture is not None:
            wanted = join((wanted, self._wanted([options.capture])))
            program = self._program(wanted, hub)
        tracked = Tracked(
            key,
            request.name,
            prompt_length,
            # All ranks plan alike, so that the rows that are divided among them have the same places.
            ship=program if self.sends or self._divides else self.planner.nothing,
            view=self._view(hub, request.name),
            capture=options.capture,
            generated=options.generated or 0,
            hub=hub,
            incarnation=request.incarnation,
            watched=self.sends and bool(wanted),
            noted=self.sends and (bool(wanted) or wants.actions),
            adapter=request.adapter,
        )
        self.requests[key] = tracked
        self._lineup.change()
        self.deciding.change()
        self.changes.begin(tracked, options.program)

    def _view(self, hub: int, request: str) -> Program:
        """Return the program of the rows that controllers see of a request."""
        controllers = self.controllers[hub]
        watching = controllers.watching(request)
        program = controllers.programs.get(watching)
        if program is None:
            wanted = self._wanted(controllers.captures(watching))
            program = controllers.programs[watching] = self._program(wanted, hub)
        return program

    def _wanted(self, specs: Sequence[Capture | None]) -> Wanted:
        info = self.info
        return join(s.resolve(info.sites, num_layers=info.num_layers) for s in specs if s is not None)

    def _gathered(self, plan: Plan) -> list[int]:
        """Return the width classes of which the first rank gathers the rows of a plan."""
        fits = self.tables.fits(plan)
        return [n for n, width in enumerate(self.widths.classes[: len(fits)]) if width.divided and fits[n]]

    def _program(self, wanted: Wanted, hub: int) -> Program:
        places = {self.index[site]: w.positions for site, w in wanted.items() if site in self.index}
        return self.planner.program(places, hub)

    def answer(self, output: Any) -> Any:
        """Send decisions on a step, the marks of all stages, and a difference of ranks with the step's output."""
        marked = () if self.marks is None else self.marks.take()
        diverged = None if output is None or self.agreement.divergence is None else self.agreement.take()
        deciding = self.deciding
        if marked or diverged or deciding.unanswered or deciding.guarded or deciding.marking:
            return deciding.answer(output, marked, diverged)
        return output

    def _forget(self, key: str, ended: Ended, step: int) -> None:
        tracked = self.requests.get(key)
        if tracked is None:
            return
        self.changes.note_end(tracked, ended, self._pending.last_step_of(key))
        del self.requests[key]
        self._lineup.change()
        self.deciding.change()
        self.histories.forget(tracked)
        self.planner.drop(tracked)
        self.latches.forget(key)
        self.firing.forget(key)
        self.controllers[tracked.hub].forget(tracked.id, key, step)
        if tracked.watched:
            self._pending.end(tracked, ended)

    def _end_unscheduled(self, requests: Mapping[str, Unscheduled]) -> None:
        """Report the end of requests that were never scheduled, if a consumer wants rows of them."""
        for key, never in requests.items():
            name, wants, incarnation, options, hub, adapter = never.request
            if self.sends and (options.capture is not None or self.wants[wants][hub].wants.wanted):
                nothing = self.planner.nothing
                tracked = Tracked(
                    key,
                    name,
                    never.prompt_length,
                    nothing,
                    nothing,
                    options.capture,
                    hub=hub,
                    incarnation=incarnation,
                    adapter=adapter,
                )
                self._pending.end(tracked, Ended(never.status, 0))

    # --- the step ---

    def prepare(self, batch: compat_step.RunnerBatch) -> None:
        """Plan the step; called when the runner has prepared its batch."""
        begun, number = self.clock.begin(), self._events.number
        planned = self.planner.plan(self._lineup.of(batch))
        self._planned = self._plan = planned
        self.gated_step = self.margins = None
        if self.marks is not None:
            self.marks.begin(number, planned)
        self.checksums.fold(number, planned)
        if number % limits.CHECKSUM_STEPS == 0:
            self.agreement.compare()
        self._buffer = self._lost = self._rested = None
        if not (idle := planned.idle):
            self._plan = self._with_room(planned)
        self.rests = idle and not planned.gates and not self._events.any
        self.clock.end(begun)

    def _with_room(self, planned: Plan) -> Plan:
        """Find memory for the rows of a step; return what the taps do, which is less without room."""
        plan = planned
        if planned.ships and self.sends:
            self._buffer, self._lost = self._find_room(planned)
        if self._lost is not None:
            plan = planned.unsent()
        elif planned.ships and not self.sends:
            plan = planned.unsent(self._gathered(planned))
        if self.tables.resident and not self.tables.holds(plan):
            for controllers in self.controllers:
                controllers.missed(plan.rows, self.tables.staging.shape[0])
            plan = msgspec.structs.replace(plan, blocks=(), rows=0, ship_rows=0, shaped=())
        if self._buffer is None and self._rows_copied(plan):
            # A copy to memory that is not page-locked waits for the device.
            size, pinned = self._bytes_copied(plan), self.tables.resident
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy()
        return plan

    def _find_room(self, plan: Plan) -> tuple[Any, str | None]:
        """Return a buffer for the plan's rows, or the reason why there is none."""
        assert self.outlets is not None
        if not self.outlets.ever_connected:
            return None, "no_hub"
        if self.tables.resident and not self.tables.holds(plan):
            return None, "staging_full"
        size = self._bytes_copied(plan)
        buffer = self.ring.acquire(size, 0.0)
        if buffer is None:
            wait_s = limits.BLOCK_S_MAX if self.settings.outbound.blocks and self.outlets.patient else 0.0
            buffer = self.ring.acquire(size, wait_s, self._pending.bytes_held)
        return buffer, (None if buffer is not None else self.outlets.give_up())

    def _rows_copied(self, plan: Plan) -> int:
        """Return how many of a plan's rows of class 0 come to the host: scored ones stay on the device."""
        if self.tables.resident and not any(controllers.reads_rows for controllers in self.controllers):
            return plan.ship_rows
        return plan.rows

    def _bytes_copied(self, plan: Plan) -> int:
        """Return the bytes of a plan's rows that come to the host."""
        return self.memory.nbytes(plan, self._rows_copied(plan))

    @contextlib.contextmanager
    def forward(self, tokens: int) -> Iterator[None]:
        """Bracket the model's forward pass over tensors of `tokens` rows."""
        plan, self._plan, self.rests = self._plan, None, False
        if plan is None:  # a dummy run
            yield
            return
        try:
            with self._tapped(plan, tokens):
                yield
        except BaseException:
            self._undo(plan)
            raise

    def rest(self) -> None:
        """Begin a forward pass in which the taps are idle, or one that belongs to no step.

        It must not overwrite the last step's rows.
        """
        self._rested, self._plan, self.rests = self._plan, None, False
        if self.tables.resident:
            self.tables.load(EMPTY_PLAN, 0)

    def interrupt(self) -> None:
        """Note that a step failed in which the taps were idle."""
        if self._rested is not None:
            self._undo(self._rested)

    @staticmethod
    def _undo(plan: Plan) -> None:
        """Note that the forward pass of a step failed: its positions are not computed, and no row is promised."""
        for request, _, start, _ in plan.batch:
            request.computed = min(request.computed, start)

    @contextlib.contextmanager
    def _tapped(self, plan: Plan, tokens: int) -> Iterator[None]:
        """Have the taps follow a plan in a forward pass, and take its rows afterwards."""
        begun = self.clock.begin()
        received, self._received = self._received, None
        carried = self.latches.begin(plan)
        if self.tables.resident:
            if self._copied is not None:
                torch.cuda.current_stream().wait_event(self._copied)
            self.tables.load(plan, tokens, carried, received)
            self.clock.end(begun)
            yield
            begun = self.clock.begin()
            if plan.gates:  # the next step writes the table again
                self._take_margins(plan, carried, self.tables.margins[: plan.gates, : plan.batch.end].clone())
            scored = [self._score(controllers, plan) for controllers in self.controllers]
            joined = self.memory.joined(self._planned, self.tables.stagings[1:])
            wanted = plan.rows or (plan.shaped and self.sends)
            ready, token_ids = self._copy_out(plan, tokens, scored, joined) if wanted else (READY, _NO_TOKENS)
        else:
            out, *shaped = self.memory.host(self._buffer, plan, self._rows_copied(plan))
            parts = self.memory.parts(self._planned, shaped) if self._planned.shaped else []
            gating = Gating(plan, tokens, carried, received) if plan.gates else None
            step_module.current = step = Step(plan, out, self.bank, gating, self._ways, parts)
            self._ways = step.ways or self._ways
            self.clock.end(begun)
            try:
                yield
            finally:
                step_module.current = None
            begun = self.clock.begin()
            if gating is not None:
                self._take_margins(plan, carried, gating.margins[:, : plan.batch.end])
            scored = []
            if plan.rows > plan.ship_rows:
                scored = [self._score(controllers, plan, out) for controllers in self.controllers]
            if self._planned.shaped:
                for rows, target in zip(self.memory.joined(self._planned, parts), shaped, strict=False):
                    if rows is not None and target is not None:
                        target.copy_(rows, non_blocking=True)
            ready, token_ids = READY, _NO_TOKENS
            if plan.ships and self.sends:
                token_ids = self._ids[:tokens].copy()
        self._finish(plan, ready, token_ids, scored)
        self.clock.end(begun)

    def _score(self, controllers: Controllers, plan: Plan, rows: Any = None) -> Scored:
        """Score a step's rows for the controllers of a hub: at once on the CPU, started on a GPU."""
        scorer = controllers.scorer
        if scorer is None or plan.rows == plan.ship_rows:
            return Scored((), None)
        parts, count = scorer.parts(plan)
        if not count:
            return Scored((), None)
        if self.tables.resident:
            return Scored(parts, scorer.launch(parts, count, self.tables.staging))
        return Scored(parts, scorer.score(parts, count, rows))

    @property
    def gates(self) -> bool:
        """Whether the prepared step has gates."""
        return self._planned.gates > 0

    def receive(self, margins: torch.Tensor) -> None:
        """Take the margins that earlier pipeline stages scored in the prepared step, `[gates, tokens]`."""
        self._received = margins

    def _take_margins(self, plan: Plan, carried: torch.Tensor | None, margins: torch.Tensor) -> None:
        """Keep the margins of the step that was just launched, `[gates, tokens]`: nothing writes to them again."""
        self.latches.end(plan, carried, margins)
        self.margins = margins
        wanted = self._reports_gates or (self.sends and plan.ships)
        compared = self._last and self._ranks > 1
        if wanted or compared:
            (host, before), ready = self._to_host((margins, carried))
            if compared:
                self.checksums.add_gates(self._events.number, host, ready)
        if wanted:
            layer_last = max((site.layer for site in self.sites), default=-1)
            if self._reports_gates:
                layer_last = self.info.num_layers
            self.gated_step = GatedStep(self._events.number, plan, host, ready, before, layer_last)
            if self._reports_gates:
                self.firing.add(self.gated_step)
                self.deciding.guarded = self.gated_step if self.gated_step.guards else None
                self.deciding.marking = self.gated_step if self.info.stages > 1 and plan.histories else None

    def _to_host(self, tensors: Sequence[torch.Tensor | None]) -> tuple[list[Any], Callable[[], None]]:
        """Start to copy tensors to the host; return the copies, and a function that waits for them."""
        if not self.tables.resident:
            return [None if each is None else each.numpy() for each in tensors], READY
        copies: list[Any] = []
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            for each in tensors:
                host = None
                if each is not None:
                    host = torch.empty(each.shape, dtype=each.dtype, pin_memory=True)
                    host.copy_(each, non_blocking=True)
                    each.record_stream(self._copy_stream)
                copies.append(None if host is None else host.numpy())
            copied = torch.cuda.Event()
            copied.record()
        return copies, copied.synchronize

    def _finish(self, plan: Plan, ready: Callable[[], None], token_ids: Any, scored: Sequence[Scored] = ()) -> None:
        """Keep the step that was just launched until it is settled."""
        number = self._events.number
        if plan.rows > plan.ship_rows:
            self.deciding.keep(number, plan, self._buffer, self._rows_copied(plan), scored, ready)
        if (self._planned.ships and self.sends) or self._events.any:
            rows = self._buffer if plan.ships else None
            now = time.time_ns()
            lent = self.ring.size_of(rows.nbytes) if rows is not None else 0
            step = Computed(number, now, self._planned, rows, token_ids, ready, self._lost, lent=lent)
            step.shaped_at = self.memory.shaped_at(self._rows_copied(plan))
            step.weights = self._weights
            self._events.move(step)
            step.opened = None if self.gated_step is None else self.gated_step.opened
            step.marks = {} if self.marks is None else dict(self.marks.runs)
            self._pending.add(step)
        self._buffer = None

    def _copy_out(
        self, plan: Plan, tokens: int, scored: list[Scored], joined: Sequence[torch.Tensor | None]
    ) -> tuple[Callable[[], None], Any]:
        """Start to copy the step's rows, scores and token ids to the host; return a function that waits, and the ids.

        The rows are copied on a stream of their own. The ids are copied on the step's stream: they are few, and the
        next step uses the same buffer.

        tokens: the rows of the model's tensors.
        scored: the scores are replaced by the memory that they are copied to.
        joined: the rows that were divided among ranks, by further width class.
        """
        ids = torch.empty(tokens, dtype=torch.int32, pin_memory=True)
        ids.copy_(compat_step.input_ids(self.runner)[:tokens], non_blocking=True)
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            for number, out in enumerate(self.memory.host(self._buffer, plan, self._rows_copied(plan))):
                if out is not None:
                    source = self.tables.stagings[number]
                    if self.widths.classes[number].divided:
                        whole = joined[number - 1]
                        assert whole is not None
                        whole.record_stream(self._copy_stream)
                        source = whole
                    out.copy_(source[: len(out)], non_blocking=True)
            for hub, (parts, there) in enumerate(scored):
                if there is not None:
                    here = torch.empty(there.shape, dtype=torch.float32, pin_memory=True)
                    here.copy_(there, non_blocking=True)
                    there.record_stream(self._copy_stream)
                    scored[hub] = Scored(parts, here.numpy())
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._copied.synchronize, ids.numpy()

    def flush(self) -> None:
        """Wait until the hubs have the rows of the settled steps."""
        if self.outlets is not None:
            self.outlets.flush()

    def close(self) -> None:
        """Send the settled steps and leave the hubs; unsettled steps are dropped: their rows have no certain owner."""
        self.agreement.close()
        if self._texts is not None:
            self._texts.close()
        if self.outlets is not None:
            self.outlets.close()
            self.outlets = None


class CaptureWorker(compat.worker_base()):  # type: ignore[misc]
    """The platform's worker, with capflow."""

    capflow: WorkerCapture | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model and install the taps, before anything is profiled, compiled or captured."""
        compat.require()
        compat.check_config(self.vllm_config)
        if self.use_v2_model_runner:
            compat.need(V2_RUNNER)
        settings = launch.settings_of(self.vllm_config)
        super().load_model(*args, **kwargs)
        self.capflow = WorkerCapture(self, settings)
        tap_runner(self.model_runner, self.capflow, v2=self.use_v2_model_runner)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Take a step's orders, and run the step."""
        assert self.capflow is not None
        self.capflow.begin(Orders.of(scheduler_output), scheduler_output)
        output = super().execute_model(scheduler_output)
        return output if output is None else self.capflow.answer(output)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample the step's tokens; the decisions of ordered controllers go with the output."""
        assert self.capflow is not None
        return self.capflow.answer(super().sample_tokens(*args, **kwargs))

    def execute_dummy_batch(self) -> None:
        """Run a forward pass without requests, beside other replicas that have some."""
        assert self.capflow is not None
        self.capflow.rest()
        super().execute_dummy_batch()

    def flush_capture(self) -> None:
        """Wait until the hubs have the settled rows."""
        if self.capflow is not None:
            self.capflow.flush()

    def end_capture(self) -> None:
        """Send the settled rows and leave the hubs. No step follows."""
        if self.capflow is not None:
            self.capflow.close()
            self.capflow = None

    def shutdown(self) -> None:
        """Send the settled rows, then stop."""
        self.end_capture()
        super().shutdown()
