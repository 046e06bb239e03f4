"""The worker's part: taps installed in the model, a plan for each step, rows handed to the sender.

`CaptureWorker` is what vLLM is given as `worker_cls`: the platform's own worker with its runner subclassed in place. All of
capflow's state is in one object, `worker.capflow`.

Order of a step: `begin` takes the orders and closes the step before; `prepare` plans, once the runner knows its
batch; `forward` brackets the model; the step then waits, with its rows, for the next `begin`.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import capflow_engine.step as step_module
from capflow import limits
from capflow.action import Steer, Unsteer
from capflow.errors import CapflowError
from capflow.frame import Rank
from capflow.message import Hello
from capflow.spec import CaptureSpec, join
from capflow.transport import WorkerLink
from capflow.vector import SteeringVector
from capflow_engine import compat
from capflow_engine.bank import Bank
from capflow_engine.control import Controllers
from capflow_engine.options import RequestOptions
from capflow_engine.orders import Ended, Orders, Wishes
from capflow_engine.plan import VIEW, Plan, Planner, Program, Scheduled, Tracked
from capflow_engine.ring import Ring
from capflow_engine.sender import Computed, Sender
from capflow_engine.settings import Settings
from capflow_engine.step import Step
from capflow_engine.tables import Tables
from capflow_engine.tap import Tap, post_block_hook

logger = logging.getLogger("vllm.capflow.worker")

_EMPTY_PLAN = Plan((), (), 0, 0, {}, 0)
_NOTHING_READY: Callable[[], None] = lambda: None  # noqa: E731


class WorkerCapture:
    """Everything capflow holds in one worker, from the loading of the model to the worker's end."""

    def __init__(self, worker: Any) -> None:
        compat.require()
        compat.check_config(worker.vllm_config)
        self.settings: Settings = worker.vllm_config.additional_config
        self.info = compat.model_info(worker.vllm_config)
        self.runner = worker.model_runner
        self.device: torch.device = worker.device
        self.rank = Rank(*compat.rank_of(worker))
        self.dtype: torch.dtype = worker.model_config.dtype
        owned = list(compat.owned_sites(self.runner.get_model(), self.info))
        self.sites = tuple(site for site, _ in owned)
        self.index = {site: n for n, site in enumerate(self.sites)}
        self.planner = Planner(len(self.sites))
        self.row_bytes = self.info.hidden_size * self.dtype.itemsize
        self.tables = self._make_tables(worker.scheduler_config.max_num_batched_tokens)
        self.bank = Bank(self.tables.bank if self.tables.resident else self._host_bank())
        for n, (_, layer) in enumerate(owned):
            layer.capflow_post_block = Tap(n, compat.stream_is_split(layer), self.tables, self.device)
            layer.register_forward_hook(post_block_hook)
        self.sends = self.rank.tp == 0 and bool(self.sites)
        self.ring = Ring(self.settings.outbound_bytes_max, pinned=self.tables.resident)
        self.wishes: dict[int, Wishes] = {}
        self.controllers = Controllers((), self.info, self.sites)
        self.requests: dict[str, Tracked] = {}  # by vLLM's id
        self._static: dict[str, tuple[SteeringVector, ...]] = {}  # what requests came with, by vLLM's id
        self._pending: Computed | None = None  # the step before, until the next one begins
        self._view: Any = None  # the buffer with its rows for controllers, likewise
        self._viewed = _EMPTY_PLAN  # the plan that lays out `_view`
        self._step = 0
        # Of the step between `prepare` and the end of `forward`:
        self._planned = _EMPTY_PLAN  # all that was wanted of it
        self._plan: Plan | None = None  # what is done, which is less when there is no room; None in a dummy run
        self._buffer: Any = None  # where its rows go
        self._lost: str | None = None  # why its rows for consumers are not taken
        self._copy_stream: Any = torch.cuda.Stream() if self.tables.resident else None
        self._copied: Any = None  # event: the copy of the step before has left the staging buffer
        self.link: WorkerLink | None = None
        self.sender: Sender | None = None
        if self.sends:
            self._connect(worker.vllm_config)
        logger.info("capflow: %d taps, rows go to %s", len(self.sites), self.settings.hub)

    def _connect(self, vllm_config: Any) -> None:
        boot = uuid.uuid4().hex
        hello = Hello("worker", self.settings.engine, boot, self.rank, self.info)
        self.link = WorkerLink(
            self.settings.hub,
            hello,
            outbound_bytes_max=self.settings.outbound_bytes_max,
            policy=self.settings.policy,
            block_s_max=limits.BLOCK_S_MAX,
        )
        self.link.start()
        tokenizer = compat.load_tokenizer(vllm_config)
        self.sender = Sender(
            self.link,
            engine=self.settings.engine,
            boot=boot,
            rank=self.rank,
            info=self.info,
            sites=self.sites,
            text_of=None if tokenizer is None else lambda token: str(tokenizer.decode([token])),
        )
        self.sender.start()

    def _make_tables(self, tokens: int) -> Tables:
        rows = min(tokens * 2 * len(self.sites), self.settings.staging_bytes_max // self.row_bytes)
        return Tables(
            sites=max(len(self.sites), 1),
            tokens=tokens,
            rows=rows,
            bank_rows=self.settings.bank_rows_max,
            hidden=self.info.hidden_size,
            dtype=self.dtype,
            device=self.device,
            resident=self.device.type != "cpu",
        )

    def _host_bank(self) -> torch.Tensor:
        return torch.empty((self.settings.bank_rows_max, self.info.hidden_size), dtype=self.dtype)

    # --- between steps ---

    def begin(self, orders: Orders | None, scheduler_output: Any) -> None:
        """Close the step before and take the orders of the one that starts."""
        orders = orders or Orders(self._step)
        actions = self._run_controllers()
        self._close_step(orders.ended)
        self._step = orders.step
        self.wishes.update(orders.wishes)
        for key, prompt_length, extra_args in compat.new_requests(scheduler_output):
            if key in orders.admitted and key not in self.requests:
                self._admit(key, prompt_length, extra_args, *orders.admitted[key])
        keys = {tracked.id: key for key, tracked in self.requests.items()} if actions else {}
        for action in actions:
            if action.request in keys:
                self._act(keys[action.request], action)
        for key, action in orders.actions:
            if key in self.requests:
                self._act(key, action)

    def _admit(self, key: str, prompt_length: int, extra_args: Any, name: str, wishes_number: int) -> None:
        wishes = self.wishes[wishes_number]
        if wishes.controllers != self.controllers.specs:
            self.controllers = Controllers(wishes.controllers, self.info, self.sites)
        options = RequestOptions.unpack(extra_args)
        tracked = Tracked(
            key,
            name,
            prompt_length,
            ship=self._program([options.capture, *wishes.captures]) if self.sends else self.planner.nothing,
            view=self._program(self.controllers.captures()),
            capture=options.capture,
        )
        self.requests[key] = tracked
        static = tuple(v for v in options.steering if v.scale != 0.0 and v.site in self.index)
        if static:
            self._static[key] = static
            tracked.prefill_steer = self._acquire(static)
            tracked.decode_steer = self._acquire(static)

    def _program(self, specs: list[CaptureSpec | None]) -> Program:
        info = self.info
        wanted = join(s.resolve(info.sites, num_layers=info.num_layers) for s in specs if s is not None)
        return self.planner.program({self.index[site]: w.positions for site, w in wanted.items() if site in self.index})

    def _acquire(self, vectors: tuple[SteeringVector, ...]) -> dict[int, int]:
        """Put the sum of the vectors at each site into the bank; return the bank row by site index."""
        sums: dict[int, Any] = {}
        for vector in vectors:
            if vector.site in self.index and vector.scale != 0.0:
                site = self.index[vector.site]
                sums[site] = sums[site] + vector.array() if site in sums else vector.array()
        held: dict[int, int] = {}
        try:
            for site, total in sums.items():
                held[site] = self.bank.acquire(total)
        except CapflowError:
            for row in held.values():
                self.bank.release(row)
            raise
        return held

    def _act(self, key: str, action: Steer | Unsteer) -> None:
        """Change what is added to a request's generated positions, from this step on."""
        tracked = self.requests[key]
        more = action.vectors if isinstance(action, Steer) else ()
        try:
            after = self._acquire((*self._static.get(key, ()), *more))
        except CapflowError as e:  # only a controller can ask for more than the scheduler admitted
            logger.error("request %s stays as it is: %s", tracked.id, e)
            return
        before, tracked.decode_steer = tracked.decode_steer, after
        for row in before.values():
            self.bank.release(row)

    def _run_controllers(self) -> list[Steer | Unsteer]:
        if self._view is None or self._pending is None:
            return []
        self._pending.ready()
        view, self._view = self._view, None
        return self.controllers.run(self._pending.number, self._viewed, view)

    def _close_step(self, ended: dict[str, Ended]) -> None:
        """Give the step before to the sender, with the requests that are over, and forget those."""
        pending, self._pending = self._pending, None
        over = []
        for key, end in ended.items():
            tracked = self.requests.pop(key, None)
            if tracked is None:
                continue
            self._static.pop(key, None)
            for row in (*tracked.prefill_steer.values(), *tracked.decode_steer.values()):
                self.bank.release(row)
            self.controllers.forget(tracked.id)
            if tracked.ship.any:
                over.append((tracked, end))
        if self.sender is None:
            return
        if pending is None and over:
            pending = Computed(self._step, time.time_ns(), _EMPTY_PLAN, None, np.empty(0), _NOTHING_READY)
        if pending is not None:
            pending.ended = over
            self.sender.put(pending)

    # --- the step ---

    def prepare(self, num_scheduled_tokens: Any) -> None:
        """Plan the step, now that the runner knows the order of its batch."""
        batch = []
        row = 0
        for key, start, length in compat.scheduled_batch(self.runner, num_scheduled_tokens):
            tracked = self.requests.get(key)
            if tracked is not None:
                batch.append(Scheduled(tracked, row, start, length))
            row += length
        planned = self.planner.plan(batch)
        self._planned = self._plan = planned
        self._buffer = self._lost = None
        if planned.ship_rows:
            self._buffer, self._lost = self._find_room(planned)
        if self._lost is not None:
            self._plan = _only_viewed(planned)
        if self._buffer is None and self._plan.rows:
            self._buffer = np.empty(self._plan.rows * self.row_bytes, np.uint8)

    def _find_room(self, plan: Plan) -> tuple[Any, str | None]:
        """Return a buffer for the plan's rows, or why there is none."""
        assert self.link is not None
        if not self.link.ever_connected:
            return None, "no_hub"
        if self.tables.resident and plan.rows > self.tables.staging.shape[0]:
            return None, "staging_full"
        wait_s = limits.BLOCK_S_MAX if self.settings.policy == "block" else 0.0
        buffer = self.ring.acquire(plan.rows * self.row_bytes, wait_s)
        return buffer, (None if buffer is not None else "queue_full")

    @contextlib.contextmanager
    def forward(self, tokens: int) -> Iterator[None]:
        """Bracket the model's forward pass over tensors of `tokens` rows."""
        plan, self._plan = self._plan, None
        if plan is None:  # a dummy run
            yield
            return
        if self.tables.resident:
            if self._copied is not None:
                torch.cuda.current_stream().wait_event(self._copied)
            self.tables.load(plan, tokens)
            yield
            ready, token_ids = self._copy_out(plan)
        else:
            out = None if self._buffer is None else torch.from_numpy(self._buffer).view(self.dtype).view(plan.rows, -1)
            step_module.current = Step(plan, out, self.bank.rows)
            try:
                yield
            finally:
                step_module.current = None
            ready, token_ids = _NOTHING_READY, compat.step_token_ids(self.runner, plan.tokens).numpy().copy()
        self._finish(plan, ready, token_ids)

    def _finish(self, plan: Plan, ready: Callable[[], None], token_ids: Any) -> None:
        """Keep the step, just launched, until the next one begins."""
        if plan.rows > plan.ship_rows:
            self._view, self._viewed = self._buffer, plan
        if self._view is not None or self._planned.ship_rows:
            rows = self._buffer[: plan.ship_rows * self.row_bytes] if plan.ship_rows else None
            self._pending = Computed(self._step, time.time_ns(), self._planned, rows, token_ids, ready, self._lost)
        self._buffer = None

    def _copy_out(self, plan: Plan) -> tuple[Callable[[], None], Any]:
        """Copy the step's rows and token ids to the host beside the step; return how to wait for them."""
        ids = torch.empty(plan.tokens, dtype=torch.int32, pin_memory=True)
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            ids.copy_(compat.step_token_ids(self.runner, plan.tokens), non_blocking=True)
            if plan.rows:
                out = torch.from_numpy(self._buffer).view(self.dtype).view(plan.rows, -1)
                out.copy_(self.tables.staging[: plan.rows], non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._copied.synchronize, ids.numpy()

    def close(self) -> None:
        """Send what is left and leave the hub."""
        self._close_step({})
        if self.sender is not None:
            there = self.link is not None and self.link.connected
            self.sender.close(limits.DRAIN_S_MAX if there else limits.LINGER_S)  # nobody takes what waits for a hub
            self.sender = None


def _only_viewed(plan: Plan) -> Plan:
    """Return the plan without the rows for consumers."""
    groups = tuple(g._replace(base=g.base - plan.ship_rows) for g in plan.groups if g.channel == VIEW)
    return replace(plan, groups=groups, rows=plan.rows - plan.ship_rows, ship_rows=0)


class StepRunner:
    """Mixed into the platform's V1 model runner, in place; `capflow` is the worker's."""

    capflow: WorkerCapture

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        self.capflow.prepare(num_scheduled_tokens)
        return prepared

    def _model_forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        with self.capflow.forward(compat.forward_tokens(input_ids, kwargs)):
            return super()._model_forward(input_ids, *args, **kwargs)  # type: ignore[misc]


class CaptureWorker(compat.worker_base()):  # type: ignore[misc]
    """The platform's worker, with capflow."""

    capflow: WorkerCapture | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model and install the taps, before anything is profiled, compiled or captured."""
        super().load_model(*args, **kwargs)
        self.capflow = WorkerCapture(self)
        runner = self.model_runner
        runner.capflow = self.capflow
        runner.__class__ = type(f"Capture{type(runner).__name__}", (StepRunner, type(runner)), {})

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step, with its orders taken first."""
        assert self.capflow is not None
        self.capflow.begin(Orders.of(scheduler_output), scheduler_output)
        return super().execute_model(scheduler_output)

    def shutdown(self) -> None:
        """Send what is left, then stop."""
        if self.capflow is not None:
            self.capflow.close()
            self.capflow = None
        super().shutdown()
