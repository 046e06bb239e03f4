"""The scheduler's part: prefix-cache keys, the names of requests, actions, and each step's orders.

`CaptureScheduler` is what vLLM is given as `scheduler_cls`: called with vLLM's arguments, it returns vLLM's own scheduler
(async or not, as configured) with `Captured` mixed in.

What always holds: a request computes every prompt position that is captured of it; cache blocks filled
while a request was steered are keyed by that steering; every worker learns of a change in the same step; a worker is
told which rows of a step belong to nobody before, or with the word that the step is settled.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from capflow.capture.frame import Rank
from capflow.capture.positions import Positions
from capflow.errors import UsageError, explain
from capflow.protocol.message import Act, Hello, Welcome
from capflow.steering.action import Abort, ActionApplied, Rejected, Steer, Unsteer
from capflow.steering.program import SteeringProgram, with_vectors
from capflow.steering.request import Steering, Tier
from capflow_engine.compat import cache as compat_cache
from capflow_engine.compat import engine as compat
from capflow_engine.compat import step as compat_step
from capflow_engine.hubs import HubLinks
from capflow_engine.request.dynamic import Reports
from capflow_engine.request.options import KEY, RequestOptions
from capflow_engine.request.reach import check_patches, length_max
from capflow_engine.scheduler.orders import Ended, Orders, Unscheduled, Wishes
from capflow_engine.scheduler.stops import Stops
from capflow_engine.settings import Settings
from capflow_engine.steering.budget import HOLDS_MORE, Holdings, Need, Size, needs_of

logger = logging.getLogger("vllm.capflow.scheduler")


class UnderWay(NamedTuple):
    """A step whose output the scheduler has not taken in.

    requests: what it computes of each, by vLLM's id. drafts: for each with draft tokens, the position behind the last
    of them and their number.
    """

    requests: Mapping[str, int]
    drafts: Mapping[str, tuple[int, int]]


class Captured:
    """Mixed in before vLLM's scheduler; keeps what it knows in `self.capflow`."""

    def __init__(self, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        super().__init__(*args, vllm_config=vllm_config, **kwargs)  # type: ignore[call-arg]
        compat.let_workers_end()
        compat_cache.limit_reads(self)
        self.capflow = Admission(vllm_config, hash_block_size=kwargs.get("hash_block_size") or kwargs["block_size"])

    def add_request(self, request: Any) -> None:
        """Admit a request; vLLM's scheduler takes it from here."""
        new = request.request_id not in self.requests  # type: ignore[attr-defined]
        taken = self.capflow.admit(request) if new else True
        if not new and compat_step.ends_input(request):
            self.capflow.input_over.add(request.request_id)
        super().add_request(request)  # type: ignore[misc]
        if not taken and compat.abort(self, request.request_id):
            self.capflow.aborted.append(request)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Return whether a waiting request may be scheduled: not before the steering bank has room for it."""
        ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        return ready and self.capflow.has_room(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step and put its orders on it."""
        self.capflow.take_actions(self)
        self.capflow.holding_back = False
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.capflow.order(output, self.requests)  # type: ignore[attr-defined]
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take a step's output; requests that actions aborted are reported with it."""
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self.capflow.settle(scheduler_output, model_runner_output)
        if self.capflow.aborted:
            compat.add_finished_outputs(outputs, self.capflow.aborted)
            self.capflow.aborted.clear()
        self.capflow.reports.attach(outputs, self.capflow.stops.limits)
        return outputs

    def _update_request_with_output(self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        taken = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)  # type: ignore[misc]
        self.capflow.stops.take(request, taken[0])
        return taken

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        if compat_step.drops_steps_under_way(request):
            self.capflow.cut(request.request_id, request.num_tokens)

    def _handle_stopped_request(self, request: Any) -> bool:
        over: bool = super()._handle_stopped_request(request)  # type: ignore[misc]
        if not over:  # it goes on with more input, in the place of the token that it stopped at
            self.capflow.cut(request.request_id, request.num_computed_tokens)
        return over

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        computed = session.num_computed_tokens
        super()._update_request_as_session(session, update)  # type: ignore[misc]
        self.capflow.go_on(session, computed)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.capflow.end(request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Stop; the hub is told that this engine is leaving."""
        self.capflow.close()
        super().shutdown()  # type: ignore[misc]


class Admission:
    """What the scheduler process knows of the requests that run, and its sessions with the hubs."""

    def __init__(self, vllm_config: Any, *, hash_block_size: int) -> None:
        compat.require()
        compat.check_config(vllm_config)
        self.settings: Settings = vllm_config.additional_config
        self.info = compat.model_info(vllm_config)
        self.hash_block_size = hash_block_size
        self._model_length_max: int = vllm_config.model_config.max_model_len
        self.aborted: list[Any] = []  # requests that an action ended, until a step's outputs tell of them
        self.input_over: set[str] = set()  # requests that run, whose streaming input is complete
        self._boot = uuid.uuid4().hex
        self._step = 0
        self._keys: dict[str, str] = {}  # outside id → vLLM's id, of requests that run
        self._names: dict[str, str] = {}  # the other way round
        self._incarnations: dict[str, str] = {}  # of requests that run, by what they are called outside; links read it
        self._admitted = itertools.count(1)
        requests = vllm_config.scheduler_config.max_num_seqs
        self._held = Holdings(Size.of(self.settings.steering_bank_bytes, self.info.hidden_size, requests))
        self._programs: dict[str, SteeringProgram] = {}  # what requests came with, by vLLM's id
        self._generated: dict[str, int] = {}  # how many of their prompts' last tokens are steered as generated, if any
        self._waiting: dict[str, tuple[Need, ...]] = {}  # by vLLM's id, of requests that hold nothing of the bank yet
        self.holding_back = False  # a request waits for room in the bank, so that those behind it do too
        self._numbers = itertools.count()
        self._acted: dict[
            str, dict[tuple[Need, ...], str]
        ] = {}  # by vLLM's id, what actions hold, with the name of each
        self._unscheduled: dict[str, tuple[str, int, str]] = {}  # for `Orders.admitted`, until its first step
        self._ended: dict[str, Ended] = {}  # until the next step's orders are made
        self._never: dict[str, Unscheduled] = {}  # likewise
        self._actions: list[tuple[str, str, Steer | Unsteer]] = []  # by id and vLLM's id, for the next step's orders
        self._aborts: list[str] = []  # ids of aborts, which hold from the next step on
        self._under_way: dict[int, UnderWay] = {}  # steps by number, until their output is taken in
        self._cuts: dict[str, int] = {}  # for the next step's orders
        self.reports = Reports()
        self.stops = Stops(lambda: compat.load_tokenizer(vllm_config))
        self._welcomes: tuple[Welcome | None, ...] = (None,) * len(self.settings.hubs)
        self._wishes = (Wishes(),) * len(self.settings.hubs)  # what requests of each hub are admitted under now
        self._wishes_number = 0
        self._new_wishes = {0: self._wishes}  # not yet told to the workers
        replica = compat.replica_of(vllm_config)
        hello = Hello("scheduler", self.settings.engine, self._boot, Rank(0, replica, 0), self.info)
        self.links = HubLinks(self.settings.hubs, hello, self._incarnations.get)
        if self.settings.hub_wait_s is not None:
            self.links.wait_welcomes(self.settings.hub_wait_s)
        self._take_welcomes()

    def admit(self, request: Any) -> bool:
        """Name a new request, and key its cache by what it asks for.

        Returns False for a request that cannot be run as it asks; it is never run otherwise.
        """
        self._take_welcomes()
        key = request.request_id
        params = request.sampling_params
        taken = True
        try:
            options = RequestOptions.unpack(params.extra_args if params is not None else None)
            options.check(self.info)
            options = options.resolved(self.info)
            prompt = request.num_prompt_tokens - (options.generated or 0)
            needs = self._held.size.check(options.program, prompt)
            check_patches(options.program, prompt, None if options.generated is not None else self._length_max(request))
        except UsageError as e:
            # The front ends of capflow refuse these before they come here; vLLM's own do not know them.
            logger.error("request %s: %s; it is aborted", key, e)
            params.extra_args = {k: v for k, v in params.extra_args.items() if k != KEY}
            options, needs, taken = RequestOptions(), (), False
        names = options.names
        number = 0 if len(names) == 1 else compat_step.sample_number(key)
        name = names[number] if number < len(names) else key
        if name in self._keys:
            name = f"{name}~{key}"
        self._keys[name], self._names[key] = key, name
        self._incarnations[name] = f"{self._boot[:12]}-{next(self._admitted)}"
        self._unscheduled[key] = name, self._wishes_number, self._incarnations[name]
        wishes = self._wishes[self.settings.hub_of(name)]
        together = key if len(names) < 2 else compat_step.parent_of(key)
        self.reports.admit(key, together, name, [spec.label for spec in wishes.controllers])
        if wanted := _wanted(options, wishes):
            compat_cache.compute(request, wanted)
        if wanted or options.program is not None or wishes.controllers:
            self.stops.watch(request)
        if options.program is not None:
            self._programs[key] = options.program
            if options.generated:
                self._generated[key] = options.generated
            self._waiting[key] = needs
            self._key_cache(request, options.program)
        if wishes.controllers:  # they may steer it at any step, unseen from here
            compat.fork_cache_from(request, request.num_prompt_tokens, f"{self._boot}:{key}", self.hash_block_size)
        return taken

    def go_on(self, request: Any, position: int) -> None:
        """Key what a request computes from a position on, where more input became part of its prompt.

        It is steered as a prompt there, behind tokens that were steered as generated ones: so is nobody else's.
        """
        program = self._programs.get(request.request_id)
        if program is not None and program.prefill != program.decode:
            self._fork_for_itself(request, position)

    def _key_cache(self, request: Any, program: SteeringProgram) -> None:
        """Key a request's cache blocks by what steers the positions in them.

        What steers generated positions alone leaves the prompt's blocks to everyone. Equal steering has equal keys.
        """
        prompt = self._steered_from(request)
        prefill = program.key(program.prefill)
        decode = prefill if program.decode == program.prefill else program.key(program.decode)
        patched = f"patched:{program.patched_key(prompt)}" if program.patched else ""
        behind = f"decode:{prompt}:{decode}" if decode != prefill else ""  # where the prompt ends is part of it
        if program.prefill:
            compat.fork_cache_from(request, 0, f"prompt:{prefill}", self.hash_block_size)
        first = program.first_patched(prompt)
        for position, fork in sorted([(prompt, behind), (prompt if first is None else first, patched)]):
            if fork:
                compat.fork_cache_from(request, position, fork, self.hash_block_size)

    def _length_max(self, request: Any) -> int | None:
        """Return how many positions of a request are computed at most; None when more input may come."""
        if request.resumable:
            return None
        return length_max(request.num_prompt_tokens, request.max_tokens, self._model_length_max)

    def _steered_from(self, request: Any) -> int:
        """Return the first position of a request that is steered as generated ones are."""
        prompt: int = request.num_prompt_tokens
        return prompt - self._generated.get(request.request_id, 0)

    def _fork_for_itself(self, request: Any, position: int) -> None:
        """Let nobody else read the request's cache blocks from a position on."""
        salt = f"{self._boot}:{request.request_id}:{time.monotonic_ns()}"
        compat.fork_cache_from(request, position, salt, self.hash_block_size)

    def has_room(self, request: Any) -> bool:
        """Return whether the steering bank has room for a request, and take it; requests wait for it in their order."""
        needs = self._waiting.get(request.request_id)
        if needs is None:
            return True
        if self.holding_back or not self._held.hold(request.request_id, needs):
            self.holding_back = True
            return False
        del self._waiting[request.request_id]
        return True

    def take_actions(self, scheduler: Any) -> None:
        """Take what the hub sent since the last step; what can be applied goes into the next orders."""
        for act in self.links.actions(self._is_ready):
            reason = self._apply(act, scheduler)
            if reason is not None:
                self.links.outcome(Rejected(act.id, reason))

    def order(self, scheduler_output: Any, requests: Mapping[str, Any]) -> None:
        """Put the orders of the step just scheduled on its output. requests: those of the scheduler, by vLLM's id."""
        if self._ended:  # a step of requests that are all over may never be taken in, when nothing else runs
            for number in [n for n, step in self._under_way.items() if self._names.keys().isdisjoint(step.requests)]:
                del self._under_way[number]
        self._step += 1
        orders = Orders(self._step, settled=min(self._under_way, default=self._step) - 1)
        for key, limit in self.stops.limits.items():  # it computes tokens behind its end until the front end aborts it
            self.cut(key, limit)
        orders.cuts, self._cuts = self._cuts, {}
        step = UnderWay(*compat_step.scheduled_tokens(scheduler_output, requests))
        if step.requests:
            self._under_way[self._step] = step
        if self._unscheduled:
            for key, _, _ in compat_step.new_requests(scheduler_output):
                if (admitted := self._unscheduled.pop(key, None)) is not None:
                    orders.admitted[key] = admitted
        orders.ended, self._ended = self._ended, {}
        orders.unscheduled, self._never = self._never, {}
        ready, self._actions = self._actions, []
        orders.actions = [(key, action) for _, key, action in ready]
        orders.wishes, self._new_wishes = self._new_wishes, {}
        orders.attach(scheduler_output)
        for action_id in (*self._aborts, *(action_id for action_id, _, _ in ready)):
            self.links.outcome(ActionApplied(action_id, self._step))
        self._aborts.clear()

    def settle(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """Note that a step's output was taken in; drafts that were rejected in it are cut off."""
        orders = Orders.of(scheduler_output)
        step = self._under_way.pop(orders.step, None) if orders is not None else None
        if step is not None:
            for key, (end, drafts) in step.drafts.items():
                accepted = max(compat_step.sampled_tokens(model_runner_output, key) - 1, 0)
                if accepted < drafts:
                    self.cut(key, end - drafts + accepted)

    def cut(self, key: str, limit: int) -> None:
        """Have every worker drop a request's rows at position `limit` and behind it from steps under way."""
        self._cuts[key] = min(limit, self._cuts.get(key, limit))

    def end(self, request: Any) -> None:
        """Note that a request is over."""
        key = request.request_id
        self._waiting.pop(key, None)
        self._programs.pop(key, None)
        self._generated.pop(key, None)
        self._held.release(key)
        for held in self._acted.pop(key, {}).values():
            self._held.release(held)
        name = self._names.pop(key, None)
        self.reports.end(key)
        if name is not None:
            del self._keys[name], self._incarnations[name]
        for action_id in [action_id for action_id, its, _ in self._actions if its == key]:
            self.links.outcome(Rejected(action_id, explain("request", got=name, expected="one that is running")))
        self._actions = [action for action in self._actions if action[1] != key]
        status = compat.finished_status(request)
        if status == "abort" and key in self.input_over:  # how vLLM ends a request that waited for input in vain
            status = "stop"
        self.input_over.discard(key)
        limit = compat.computed_limit(request)
        if (stop := self.stops.end(key)) is not None:
            status, limit = "stop", min(stop, limit)
        admitted = self._unscheduled.pop(key, None)
        if admitted is None:
            self._ended[key] = Ended(status, limit)
        else:
            capture = RequestOptions.unpack(request.sampling_params.extra_args).capture
            self._never[key] = Unscheduled(*admitted, request.num_prompt_tokens, capture, status)

    def close(self) -> None:
        """Leave the hubs."""
        self.links.close()

    def _take_welcomes(self) -> None:
        welcomes = self.links.welcomes
        if any(new is not known for new, known in zip(welcomes, self._welcomes, strict=True)):
            self._welcomes = welcomes
            wishes = tuple(Wishes() if w is None else Wishes(w.captures, w.controllers, w.actions) for w in welcomes)
            if wishes != self._wishes:
                self._wishes = wishes
                self._wishes_number += 1
                self._new_wishes[self._wishes_number] = wishes

    def _is_ready(self, act: Act) -> bool:
        """Return whether an action may be taken: steering waits for the first step of its request, and expires meanwhile."""
        return isinstance(act.action, Abort) or self._keys.get(act.action.request, "") not in self._unscheduled

    def _apply(self, act: Act, scheduler: Any) -> str | None:
        """Prepare an action for the next step; return why not, if it cannot be."""
        action = act.action
        key = self._keys.get(action.request)
        if key is None or self._incarnations[action.request] != action.incarnation:
            return explain("request", got=action.request, expected="one that is running")
        request = scheduler.requests[key]
        if isinstance(action, Abort):
            if not compat.abort(scheduler, key):
                return explain("request", got=action.request, expected="one that is running")
            self.aborted.append(request)
            self._aborts.append(act.id)
            return None
        if isinstance(action, Steer):
            try:
                Steering(base=Tier(action.vectors)).check(self.info)
                program = with_vectors(self._programs.get(key), self.info.hidden_size, action.vectors)
            except UsageError as e:
                return str(e)
            lacking = self._hold_action(key, program, request)
            if lacking is not None:
                do = f"try again when requests have ended, or start the engine with {HOLDS_MORE[lacking]}"
                return explain(
                    "steering bank", got=f"no room for more {lacking} beside what the running requests hold", do=do
                )
            self._fork_for_itself(request, max(request.num_computed_tokens, request.num_prompt_tokens))
        # A preempted request has computed nothing, and the action holds from where it had been.
        computed = max(request.num_computed_tokens, request.num_tokens - 1)
        self.reports.act(key, action, max(computed, request.num_prompt_tokens))
        self._actions.append((act.id, key, action))
        return None

    def _hold_action(self, key: str, program: SteeringProgram | None, request: Any) -> str | None:
        """Take what an action needs of the bank, until the request is over; return what has no room for it.

        What earlier actions took stays theirs: a preempted request computes again what they steered.
        """
        needs = needs_of(program, self._steered_from(request)) if program is not None else ()
        acted = self._acted.setdefault(key, {})
        if not needs or needs in acted:
            return None
        name = f"{key} {next(self._numbers)}"
        if not self._held.hold(name, needs):
            return self._held.lacking(needs)
        acted[needs] = name
        return None


def _wanted(options: RequestOptions, wishes: Wishes) -> Positions:
    """Return the positions that are wanted of a request, whatever the site."""
    asked = options.capture.specs if options.capture is not None else ()
    seen = (controller.capture for controller in wishes.controllers)
    every = (spec.set_of_positions() for spec in (*asked, *wishes.captures, *seen) if spec is not None)
    return functools.reduce(operator.or_, every, Positions.NONE)


_classes: dict[type[Any], type[Any]] = {}


def CaptureScheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> Any:  # noqa: N802 - stands where vLLM wants a class
    """Return vLLM's scheduler for this configuration, with capflow's part mixed in."""
    base = compat.scheduler_base(vllm_config)
    cls = _classes.setdefault(base, type(f"Capture{base.__name__}", (Captured, base), {}))
    return cls(*args, vllm_config=vllm_config, **kwargs)
