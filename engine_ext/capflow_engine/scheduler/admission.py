"""Admission: the running requests of an engine, in the process of its scheduler, and the orders of each step.

It gives each request its name, and compiles steering that no front end of capflow has compiled. It keys the prefix
cache by the steering, takes the actions of the hubs, and makes the orders that the workers get with each step.

Invariants:

* A request computes every prompt position that is captured of it. It never reads such a position from the cache.
* A request computes every position that a latched gate scores, also again after it was preempted.
* Cache blocks that were filled while a request was steered are keyed by that steering.
* A request reads no cache block that was filled under weights that had changed when it was admitted.
* Every worker applies a change in the same step.
* A worker knows which rows of a step belong to no request when that step is settled, or earlier.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import operator
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from capflow import limits
from capflow.capture.frame import Rank
from capflow.capture.positions import Positions
from capflow.capture.spec import Wanted, join
from capflow.errors import UsageError
from capflow.protocol.message import Act, ControllerSpec, Hello, Welcome
from capflow.protocol.routing import hub_among
from capflow.steering.action import (
    Abort,
    ActionApplied,
    Outcome,
    Rejected,
    SetGate,
    Steer,
    Unfreeze,
    Unsteer,
    not_meant,
    not_running,
)
from capflow.steering.program import SteeringProgram
from capflow_engine.compat import cache as compat_cache
from capflow_engine.compat import engine as compat
from capflow_engine.compat import step as compat_step
from capflow_engine.compat import weights as compat_weights
from capflow_engine.hubs import HubLinks
from capflow_engine.request.dynamic import Reports
from capflow_engine.request.options import KEY, RequestOptions
from capflow_engine.request.reach import check_patches, first_latching, length_max
from capflow_engine.scheduler import divergence
from capflow_engine.scheduler.actions import EngineActions, RunningRequest, Taken, frozen_needs
from capflow_engine.scheduler.answers import CertainAnswers, UnderWay
from capflow_engine.scheduler.brought import HubSteering
from capflow_engine.scheduler.decisions import Decisions
from capflow_engine.scheduler.drafting import Drafting
from capflow_engine.scheduler.orders import Admitted, Ended, News, Orders, Rejection, Unscheduled, Wants
from capflow_engine.scheduler.stops import Stops
from capflow_engine.scheduler.weights import WeightsNow
from capflow_engine.settings import Settings
from capflow_engine.steering.budget import Holdings, Need, Size, needs_of
from capflow_engine.steering.fit import Fit

logger = logging.getLogger("vllm.capflow.scheduler")


class Admission:
    """The running requests of one engine, and the scheduler's sessions with the hubs.

    The keys of all tables are vLLM's ids of requests, unless a comment says otherwise.
    """

    def __init__(self, vllm_config: Any, *, hash_block_size: int) -> None:
        compat.require()
        compat.check_config(vllm_config)
        self.settings: Settings = vllm_config.additional_config
        self.info = compat.model_info(vllm_config)
        self.hash_block_size = hash_block_size
        self._model_length_max: int = vllm_config.model_config.max_model_len
        # Requests that an action aborted, until the outputs of a step report them.
        self.aborted: list[Any] = []
        # Running requests whose streaming input is complete.
        self.input_over: set[str] = set()
        self._boot = uuid.uuid4().hex
        # The number of the last step.
        self.step = 0
        # The key of each running request, which is vLLM's id, by its name, which users and consumers see.
        self._keys: dict[str, str] = {}
        # The name of each running request.
        self._names: dict[str, str] = {}
        # How many positions a request had computed that was preempted, with those of steps under way.
        self._preempted_at: dict[str, int] = {}
        # The incarnation of each running request, by its name. The threads of the links read it.
        self._incarnations: dict[str, str] = {}
        # The number of the hub of each running request, by its key.
        self._hubs: dict[str, int] = {}
        # How many requests of each hub run or wait. The threads of the links read it.
        self._held_of = [0] * len(self.settings.hubs)
        self._numbers_admitted = itertools.count(1)
        # The options of each running request, with its steering compiled.
        self._options: dict[str, RequestOptions] = {}
        requests = vllm_config.scheduler_config.max_num_seqs
        self._fit = Fit(self.info, Size.of(self.settings.steering_bank_bytes, self.info.steered_width, requests))
        self._held = Holdings(self._fit.size)
        # The needs of each request that waits for room in the steering bank.
        self._waiting: dict[str, tuple[Need, ...]] = {}
        # Whether a request waits for room in the bank in this step. Then all later requests wait, too.
        self.holding_back = False
        # The entry in `Orders.admitted` of each request that was not scheduled yet.
        self._unscheduled: dict[str, Admitted] = {}
        # Requests that ended, for the next step's orders.
        self._ended: dict[str, Ended] = {}
        # Requests that ended before they were scheduled, for the next step's orders.
        self._never: dict[str, Unscheduled] = {}
        self.weights = WeightsNow()
        self.reports = Reports()
        self.decisions = Decisions(self._fork_for_itself)
        # The aborts that are answered with the next step: their ids, and the positions after the requests' ends.
        self._aborts: list[tuple[str, int]] = []
        # The steps whose output is not here yet, by their number.
        self._under_way: dict[int, UnderWay] = {}
        # For the next step's orders: the first position whose rows are dropped.
        self._cuts: dict[str, int] = {}
        # For the next step's orders.
        self._rejected: list[Rejection] = []
        self.drafting = Drafting(*ahead) if (ahead := compat.drafts_ahead(vllm_config)) else None
        self.stops = Stops(lambda: compat.load_tokenizer(vllm_config))
        self._welcomes: tuple[Welcome | None, ...] = (None,) * len(self.settings.hubs)
        # What each hub wants of requests that are admitted now. The number counts the changes.
        self._wants = (Wants(),) * len(self.settings.hubs)
        self._wants_number = 0
        # The wants for the next step's orders, by number.
        self._new_wants = {0: self._wants}
        replica = compat.replica_of(vllm_config)
        rank = Rank(0, replica, 0)
        hello = Hello("scheduler", self.settings.engine, self._boot, rank, self.info, off=compat.features_off())
        self.links = HubLinks(
            *(self.settings.hubs, hello, self._incarnations.get, self._at_once),
            holds=lambda hub: bool(self._held_of[hub]),
        )
        self._answers = CertainAnswers(self.links.outcome)
        self.actions = EngineActions(
            self.info,
            self._held,
            self._waiting,
            fork=self._fork_for_itself,
            note=self.reports.act,
            answer=self.links.outcome,
            certain=self._without_drafts,
            controllers=lambda: [f"controller {spec.label}" for wants in self._wants for spec in wants.controllers],
        )
        hubs = range(len(self.settings.hubs))
        self._brought = [HubSteering(self._fit, functools.partial(self.links.report, hub)) for hub in hubs]
        if self.settings.hub_wait_s is not None:
            self.links.wait_welcomes(self.settings.hub_wait_s, self.settings.spares)
        self._take_welcomes()

    def admit(self, request: Any) -> bool:
        """Name a new request, compile its steering, and key its cache blocks by it.

        Returns False if the request cannot run as it asks. The caller then aborts it.
        """
        self._take_welcomes()
        key = request.request_id
        options, needs, refusal = self._take_options(request)
        if refusal is not None:
            # capflow's front ends have checked their requests already; vLLM's own front ends check nothing.
            logger.error("request %s: %s; it is aborted", key, refusal)
        number = 0 if len(names := options.names) == 1 else compat_step.sample_number(key)
        name = names[number] if number < len(names) else key
        if name in self._keys:
            name = f"{name}~{key}"
        self._keys[name], self._names[key] = key, name
        self._incarnations[name] = f"{self._boot[:12]}-{next(self._numbers_admitted)}"
        hub = self._share_out(key, name)
        wants = self._wants[hub]
        together = key if len(names) < 2 else compat_step.parent_of(key)
        controllers = [spec for spec in wants.controllers if spec.sees(name)]
        labels = [spec.label for spec in controllers]
        self.reports.admit(key, together, name, labels, hub=None if hub == self.settings.hub_of(name) else hub)
        if controllers and refusal is None:
            split = request.num_prompt_tokens - (options.generated or 0)
            program, needs = self._brought[hub].compose(options.program, needs, controllers, name, split)
            options = msgspec.structs.replace(options, program=program)
        self._options[key] = options
        adapter = compat_weights.adapter_of(request)[: limits.REQUEST_ID_LENGTH_MAX]
        incarnation = self._incarnations[name]
        self._unscheduled[key] = Admitted(name, self._wants_number, incarnation, options, hub, adapter)
        if self.weights.now.version:
            salt = f"weights:{self._boot}:{self.weights.now.version}"
            compat.fork_cache_from(request, 0, salt, self.hash_block_size)
        controllers = [spec for spec in controllers if spec.runs]
        sets = _position_sets(options, controllers, wants.wanted)
        if self.drafting is not None and not controllers:
            self.drafting.admit(request, sets, options.program)
        if positions := functools.reduce(operator.or_, sets, Positions.NONE):
            compat_cache.compute(request, positions)
        if positions or options.program is not None or controllers:
            self.stops.watch(request)
        if options.program is not None:
            program = self.actions.admit(key, options.program)
            if program is not options.program:
                needs = needs_of(program, self._steered_from(request)) if program is not None else ()
            beside = (*needs, *frozen_needs(options.program, self._steered_from(request)))
            self._waiting[key] = beside if self._fit.size.holds(beside) else needs
            if program is not None:
                self._key_cache(request, program)
            first = first_latching(options.program, self._steered_from(request))
            if first is not None:
                compat_cache.compute_from(request, first)
        if not all(spec.ordered for spec in controllers):  # they may steer it in any step without the scheduler
            compat.fork_cache_from(request, request.num_prompt_tokens, f"{self._boot}:{key}", self.hash_block_size)
        return refusal is None

    def _share_out(self, key: str, name: str) -> int:
        """Give a new request to a hub; return its number."""
        hub = self._hubs[key] = hub_among(name, self.links.in_service(self.settings.regular))
        self._held_of[hub] += 1
        return hub

    def _take_options(self, request: Any) -> tuple[RequestOptions, tuple[Need, ...], UsageError | None]:
        """Remove a new request's options from its parameters, because workers get them with the orders.

        Returns the compiled options and what they need of the bank. If they are invalid, returns empty options and the
        error.
        """
        params = request.sampling_params
        try:
            options = RequestOptions.unpack(params.extra_args if params is not None else None)
            if options.steering is not None:
                options = options.compiled(self._fit)
            else:
                options.check(self.info)
            prompt = request.num_prompt_tokens - (options.generated or 0)
            needs = self._fit.size.check(options.program, prompt)
            check_patches(options.program, prompt, None if options.generated is not None else self._length_max(request))
        except UsageError as e:
            return RequestOptions(), (), e
        finally:
            _drop_options(request)
        return options, needs, None

    def extend_prompt(self, request: Any, position: int) -> None:
        """Note that more streaming input became part of a request's prompt, from a position on.

        If prompt and generated tokens are steered differently, the cache blocks from there on follow a mixture that no
        other request has, so the request keeps them to itself. It also does if it patches a position that is counted
        from the prompt's end, because that end moves.
        """
        _drop_options(request)  # each part of a streamed input brings the request's parameters again
        program = self._options[request.request_id].program
        if program is None:
            return
        if not program.alike or any(written < 0 for written, _ in program.patched):
            self._fork_for_itself(request, position)

    def _key_cache(self, request: Any, program: SteeringProgram) -> None:
        """Key a request's cache blocks by the steering of the positions in them. Equal steering has equal keys.

        If only generated positions are steered, the blocks of the prompt stay shared with unsteered requests. The
        parameters of a gate are part of the key from the first position on at which it can act.
        """
        prompt = self._steered_from(request)
        prefill, decode = program.phase_effects
        patched = program.patched_effects(prompt)
        if prefill:
            compat.fork_cache_from(request, 0, f"prompt:{prefill}", self.hash_block_size)
        forks = []
        if decode != prefill:
            # The end of the prompt is part of the key.
            forks.append((prompt, f"decode:{prompt}:{decode}"))
        if patched:
            forks.append((min(patched), f"patched:{sorted(patched.items())}"))
        for position, fork in sorted(forks):
            compat.fork_cache_from(request, position, fork, self.hash_block_size)

    def _length_max(self, request: Any) -> int | None:
        """Return the largest number of positions that a request computes; None when more input may come."""
        if request.resumable:
            return None
        return length_max(request.num_prompt_tokens, request.max_tokens, self._model_length_max)

    def _steered_from(self, request: Any) -> int:
        """Return the first position of a request that is steered like a generated one."""
        prompt: int = request.num_prompt_tokens
        return prompt - (self._options[request.request_id].generated or 0)

    def _fork_for_itself(self, request: Any, position: int) -> None:
        """Give the request's cache blocks from a position on a key that no other request has."""
        salt = f"{self._boot}:{request.request_id}:{time.monotonic_ns()}"
        compat.fork_cache_from(request, position, salt, self.hash_block_size)

    @property
    def needed(self) -> bool:
        """Whether any waiting request needs room in the steering bank."""
        return bool(self._waiting)

    def has_room(self, request: Any) -> bool:
        """Take the room in the steering bank that a request needs; return False if there is none.

        Requests get room in the order in which they wait.
        """
        needs = self._waiting.get(request.request_id)
        if needs is None:
            return True
        if self.holding_back or not self._held.hold(request.request_id, needs):
            self.holding_back = True
            return False
        del self._waiting[request.request_id]
        return True

    def take_actions(self, scheduler: Any) -> None:
        """Take the actions that the hubs sent since the last step. Those that can hold go into the next orders."""
        running = functools.partial(self.running, scheduler)
        self.actions.begin(running)
        for act in self.links.actions(self._is_ready):
            if act.action.request or isinstance(act.action, Steer | Unsteer | Abort | SetGate):
                reason = self._apply(act, scheduler)
            else:
                reason = self.actions.apply_to_all(act, running)
            if reason is not None:
                self.links.outcome(Rejected(act.id, reason))

    def _without_drafts(self, request: Any) -> None:
        """Let a request have no drafts from the next step on. Steps under way keep theirs."""
        if self.drafting is not None:
            self.drafting.end(request.request_id)
            request.spec_token_ids = []

    def _at_once(self, act: Act) -> Outcome | None:
        """Answer an action on the whole engine while it is idle; called on the threads of the links."""
        if self._under_way or self.actions is None:
            return None
        return self.actions.at_once(act, self.step, idle=not self._names)

    def running(self, scheduler: Any) -> Iterator[tuple[str, RunningRequest]]:
        """Yield the running requests with vLLM's ids."""
        for key in list(self._names):
            if key in scheduler.requests:
                yield key, self._as_running(key, scheduler.requests[key])

    def _as_running(self, key: str, request: Any) -> RunningRequest:
        name = self._names[key]
        controllers = tuple(spec.label for spec in self._wants[self._hubs[key]].controllers)
        program, preempted_at = self._options[key].program, self._preempted_at.get(key, 0)
        return RunningRequest(request, name, program, self._steered_from(request), controllers, preempted_at)

    def react(self, scheduler: Any) -> list[Any]:
        """React to what the processed output says of ranks that steer differently; return the aborted requests."""
        diverged = self.decisions.take_diverged()
        if diverged is None:
            return []
        if self.settings.on_divergence == "freeze":
            # Who sent one of these did not know of it.
            self.links.reject(lambda act: isinstance(act.action, Unfreeze), divergence.overtaken(diverged))
            self.actions.at_once(divergence.freeze(diverged), self.step, idle=False)
            return []
        steered = [key for key in self._names if key in scheduler.requests and self._may_steer(key)]
        return divergence.abort(diverged, scheduler, steered, self._hubs.__getitem__, self.decisions.ends)

    def _may_steer(self, key: str) -> bool:
        """Return whether something steers a request, or may steer it without the scheduler."""
        controllers = self._wants[self._hubs[key]].controllers
        watched = any(spec.runs and spec.sees(self._names[key]) for spec in controllers)
        return watched or self._options[key].program is not None or self.actions.reaches(key)

    def order(self, scheduler_output: Any, requests: Mapping[str, Any]) -> None:
        """Attach the orders of the step that was just scheduled to the scheduler's output.

        requests: the requests of the scheduler, by vLLM's id.
        """
        if self._ended:
            # vLLM may never return the output of a step whose requests have all ended, if nothing else runs.
            for number in [n for n, step in self._under_way.items() if self._names.keys().isdisjoint(step.requests)]:
                del self._under_way[number]
        number = self.step = self.step + 1
        orders = Orders(number, settled=min(self._under_way, default=number) - 1)
        step = UnderWay(*compat_step.scheduled_tokens(scheduler_output, requests))
        if step.requests:
            self._under_way[number] = step
            if self.weights.next is not None:
                self.weights.take()
        orders.weights = self.weights.last
        # A request that a stop string ended computes further tokens until the front end aborts it.
        for key, limit in self.stops.limits.items():
            self.cut(key, limit)
        decisions = self.decisions
        ready: Sequence[Taken] = ()
        changed = self._unscheduled or self._ended or self._never or self._cuts or self._rejected or self._new_wants
        if changed or self.actions.any or decisions.ready or decisions.marked:
            ready = self._put_news(orders, scheduler_output)
        self.actions.taking = False
        orders.attach(scheduler_output)
        for action_id, position in self._aborts:
            self.links.outcome(ActionApplied(action_id, number, position))
        self._aborts.clear()
        for taken in ready:
            self._answers.apply(taken.key, ActionApplied(taken.action_id, number, taken.position))
        if self._answers.waiting:
            self._answers.settle(self._under_way)

    def _put_news(self, orders: Orders, scheduler_output: Any) -> Sequence[Taken]:
        """Put into a step's orders what came, ended or changed; return the actions that are to be answered."""
        orders.news = news = News()
        if self._unscheduled:
            for key, _ in compat_step.new_requests(scheduler_output):
                if (admitted := self._unscheduled.pop(key, None)) is not None:
                    news.admitted[key] = admitted
        news.cuts, self._cuts = self._cuts, {}
        news.rejected, self._rejected = self._rejected, []
        news.ended, self._ended = self._ended, {}
        news.unscheduled, self._never = self._never, {}
        news.wants, self._new_wants = self._new_wants, {}
        self.decisions.take(news)
        return self.actions.take(news)

    def read(self, model_runner_output: Any, requests: Mapping[str, Any]) -> bool:
        """Take the decisions on a step's output; return whether the tokens of its requests are to be looked at."""
        self.decisions.read(model_runner_output, requests, frozen=self.actions.frozen)
        return bool(self.decisions.aborts or self.stops.watched)

    def settle(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """Note that the scheduler has the output of a step. Rows of draft tokens that it rejects are dropped."""
        orders = Orders.of(scheduler_output)
        if orders is not None and (step := self._under_way.pop(orders.step, None)) is not None:
            for key, (end, drafts) in step.drafts.items():
                accepted = max(compat_step.sampled_tokens(model_runner_output, key) - 1, 0)
                if accepted < drafts and key in self._names:
                    self._reject(key, orders.step, end - drafts + accepted, drafts - accepted)
            if self._answers.waiting:
                self._answers.settle(self._under_way)

    def _reject(self, key: str, step: int, limit: int, count: int) -> None:
        """Note that `count` drafts of a request were rejected in a step, the first of them at position `limit`."""
        later = [each for each in self._under_way.values() if key in each.requests]
        if not later:
            self.cut(key, limit)
        if self.step == step:
            return
        # Actions may hold from later steps on, also where the request has no part in these, as it was preempted.
        self._rejected.append(Rejection(key, step, limit, count))
        self.reports.shift(key, limit + count, count)
        self.actions.shift(key, limit + count, count)
        self._answers.shift(key, limit + count, count)
        if self._preempted_at.get(key, 0) >= limit + count:
            self._preempted_at[key] -= count
        for each in later:
            if key in each.drafts:
                end, drafts = each.drafts[key]
                each.drafts[key] = end - count, drafts

    def keep_reached(self, request: Any, computed: int) -> None:
        """Note how many positions a preempted request had computed, with those of steps under way.

        The output of these steps is delivered, so an action holds behind their positions.
        """
        key = request.request_id
        self._preempted_at[key] = max(computed, self._preempted_at.get(key, 0))

    def drop_under_way(self, request: Any, computed: int) -> None:
        """Note that the output of a preempted request's steps under way is dropped.

        computed: how many positions it had computed, with those of these steps.
        """
        key = request.request_id
        self.cut(key, request.num_tokens)
        self.keep_reached(request, min(computed, request.num_tokens))
        for step in self._under_way.values():
            step.drafts.pop(key, None)

    def cut(self, key: str, limit: int) -> None:
        """Have every worker drop a request's rows from position `limit` on, in the steps that are under way."""
        self._cuts[key] = min(limit, self._cuts.get(key, limit))
        if key in self._preempted_at:
            self._preempted_at[key] = min(limit, self._preempted_at[key])

    def end(self, request: Any) -> None:
        """Note that a request ended."""
        key = request.request_id
        self._waiting.pop(key, None)
        if self.drafting is not None:
            self.drafting.end(key)
        self._options.pop(key, None)
        self._held.release(key)
        self._preempted_at.pop(key, None)
        if (hub := self._hubs.pop(key, None)) is not None:
            self._held_of[hub] -= 1
        name = self._names.pop(key, None)
        self.reports.end(key)
        self._answers.end(key)
        if name is not None:
            del self._keys[name], self._incarnations[name]
        self.actions.end(key, name)
        status, decided = compat.finished_status(request), self.decisions.end(key)
        # vLLM aborts a request that waits for input when there is no more.
        if status == "abort" and key in self.input_over:
            status = "stop"
        self.input_over.discard(key)
        limit = compat.computed_limit(request)
        if (stop := self.stops.end(key)) is not None:
            status, limit = "stop", min(stop, limit)
        if decided is not None:
            limit = min(decided.row + 1, limit)
        admitted = self._unscheduled.pop(key, None)
        if admitted is None:
            self._ended[key] = Ended(status, limit, decided)
        else:
            unsteered = admitted._replace(options=msgspec.structs.replace(admitted.options, program=None))
            self._never[key] = Unscheduled(unsteered, request.num_prompt_tokens, status)

    def close(self) -> None:
        """End the sessions with the hubs."""
        self.links.close()

    def _take_welcomes(self) -> None:
        """Resolve what the hubs' consumers want, if a hub sent a new Welcome."""
        welcomes = self.links.welcomes
        if any(new is not last for new, last in zip(welcomes, self._welcomes, strict=True)):
            self._welcomes = welcomes
            wants = tuple(Wants() if welcome is None else self._wants_of(welcome) for welcome in welcomes)
            if wants != self._wants:
                self._wants = wants
                self._wants_number += 1
                self._new_wants[self._wants_number] = wants
                for brought, each in zip(self._brought, wants, strict=True):
                    brought.take(each.controllers)

    def _wants_of(self, welcome: Welcome) -> Wants:
        info = self.info
        specs = (spec.resolve(info.sites, num_layers=info.num_layers) for spec in welcome.captures)
        return Wants(join(specs), welcome.controllers, welcome.actions)

    def _is_ready(self, act: Act) -> bool:
        """Return whether an action may be taken now. Steering waits for the first step of its request, or expires."""
        request = act.action.request
        return not request or isinstance(act.action, Abort) or self._keys.get(request, "") not in self._unscheduled

    def _apply(self, act: Act, scheduler: Any) -> str | None:
        """Prepare an action on a request for the next step; return the reason if it cannot be applied, else None."""
        action = act.action
        key = self._keys.get(action.request)
        if key is None:
            return not_running(action.request)
        if (incarnation := self._incarnations[action.request]) != action.incarnation:
            return not_meant(action, incarnation)
        running = self._as_running(key, scheduler.requests[key])
        if not isinstance(action, Abort):
            return self.actions.apply(act, key, running)
        if not compat.abort(scheduler, key, action.as_, action.reason):
            return not_running(action.request)
        self.aborted.append(running.request)
        # Of a step under way with drafts, only the first row is certain.
        self._aborts.append((act.id, min(running.reached, running.request.num_tokens)))
        return None


def _drop_options(request: Any) -> None:
    """Remove the options from a request's parameters: workers get them with the orders.

    The parameters are copied, because vLLM gives several samples the same ones in one process.
    """
    params = request.sampling_params
    if params is not None and params.extra_args and KEY in params.extra_args:
        request.sampling_params = params = copy.copy(params)
        params.extra_args = {name: value for name, value in params.extra_args.items() if name != KEY} or None


def _position_sets(options: RequestOptions, controllers: Sequence[ControllerSpec], wants: Wanted) -> list[Positions]:
    """Return the sets of positions of a request that are wanted, each at some site, also by the controllers."""
    asked = options.capture.specs if options.capture is not None else ()
    seen = (capture for controller in controllers for capture in controller.captures)
    every = (spec.set_of_positions() for spec in (*asked, *seen) if spec is not None)
    return list(dict.fromkeys((*every, *(want.positions for want in wants.values()))))
