"""The front: the state that all routes of one API server share.

It holds the steering modules, the global steering, the running requests, and what their responses report.
`capflow_engine.serve.ask` parses a request; `capflow_engine.serve.generate` sends it to the engine.
Invariant: a change of the global steering or of a module does not change a running request.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.capture.result import joined
from capflow.errors import UsageError, explain
from capflow.serve_options import SAE
from capflow.steering.program import SteeringProgram
from capflow.steering.request import NOTHING
from capflow_engine.compat import engine as compat
from capflow_engine.compat.versions.surface import BEAM_SEARCH
from capflow_engine.llm.readers import Readers
from capflow_engine.llm.results import Askers
from capflow_engine.request.beams import BEAMS, Beams
from capflow_engine.serve.ask import ParsedRequest
from capflow_engine.serve.serving import Serving
from capflow_engine.settings import Settings
from capflow_engine.steering.applied import NOTHING_KEY, Dynamic, dynamic_key
from capflow_engine.steering.budget import Size
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.saes import load_again
from capflow_engine.steering.sharing import Sharing
from capflow_engine.steering.store import SteeringStore


class Front:
    """capflow's state in one API server."""

    def __init__(self, vllm_config: Any, serving: Serving) -> None:
        self.settings: Settings = vllm_config.additional_config
        self.info = compat.model_info(vllm_config)
        requests_max = vllm_config.scheduler_config.max_num_seqs
        size = Size.of(self.settings.steering_bank_bytes, self.info.steered_width, requests_max)
        self.fit = Fit(self.info, size, load_again(serving.saes, self.info, serving.saes_digest, SAE))
        self.store = SteeringStore(serving.directory, self.fit.check, self.fit.resolved)
        self.sharing = Sharing.start(self.settings, self.store)
        self.keys = serving.keys
        self.length_max: int = vllm_config.model_config.max_model_len
        self.body_bytes_max = serving.body_bytes_max
        self.rpc_address = serving.rpc_address
        self.ending = serving.ending
        self.asker = Askers(self.settings)
        self._readers = Readers(self.settings)
        # The running requests, by the name of each of their choices.
        self._running: WeakValueDictionary[str, ParsedRequest] = WeakValueDictionary()
        # The actions and controllers that may have steered running requests, by the id of each prompt's options.
        self._dynamic: dict[str | None, Dynamic] = {}
        # The time when each of the latest captured requests ended, by the names of its choices, oldest first.
        self._over: dict[str, float] = {}

    def everyone(self) -> SteeringProgram | None:
        """Return the program of the global steering; None if nothing is steered globally."""
        return None if self.store.global_state == NOTHING else self.fit.program(None, self.store)

    @contextlib.asynccontextmanager
    async def running(self, ask: ParsedRequest | None) -> AsyncIterator[None]:
        """Keep a request among the running ones while the block runs.

        Raises UsageError if another running request has its id, or if its capture names a consumer that the hub does
        not have. If the hub does not answer, the request runs.

        ask: None for a request that asks capflow for nothing.
        """
        # Requests of one connection may run in one context, one after another.
        BEAMS.set(None)
        if ask is None:
            yield
            return
        self.begin(ask)
        try:
            await self._readers.check_async(ask.options)
            yield
        finally:
            self.end(ask)

    def begin(self, ask: ParsedRequest) -> None:
        """Note that a request runs.

        Raises UsageError if another running request has its id, or if it needs a feature that is off.
        """
        if ask.beams and ask.program is not None:
            compat.need(BEAM_SEARCH)
        for name in ask.names:
            if name in self._running:
                raise UsageError(explain("capture_id", got=name, expected="one that no running request has"))
        self._running.update(dict.fromkeys(ask.names, ask))
        if ask.beams and ask.program is not None:
            BEAMS.set(Beams(ask.program))

    def end(self, ask: ParsedRequest) -> None:
        """Forget a request that ended."""
        BEAMS.set(None)
        now = time.monotonic()
        for options in ask.options:
            self._dynamic.pop(options.id, None)
        for name in ask.names:
            self._running.pop(name, None)
            if ask.awaits:
                self._over.pop(name, None)
                self._over[name] = now
        keep_newest(self._over, limits.RESULTS_KEPT_MAX)

    def ran(self, name: str) -> bool:
        """Return whether this server runs a request of this name, or ran one lately that the hub may not know yet."""
        ended = self._over.get(name)
        return name in self._running or (ended is not None and time.monotonic() - ended < limits.CAPTURE_WAIT_S_MAX)

    def hear(self, name: str, dynamic: Dynamic) -> None:
        """Note the actions and controllers that may have steered a running prompt. name: the id of its options."""
        if name in self._running or f"{name}#0" in self._running:
            self._dynamic[name] = dynamic

    async def members(self, ask: ParsedRequest) -> bytes:
        """Return the report as members of the response's JSON object, with a comma before them."""
        return b"," + msgspec.json.encode(await self.report(ask))[1:-1]

    async def report(self, ask: ParsedRequest) -> dict[str, Any]:
        """Return capflow's members of the response, by name."""
        report: dict[str, Any] = {}
        if ask.awaits:
            wait_s = self.settings.capture_wait_s if ask.wait else 0.0
            reports = [self._dynamic[options.id] for options in ask.options if options.id in self._dynamic]
            placed = {name: hub for report in reports for name, hub in report.hubs.items()}
            results = await self.asker.ask(ask.names, placed, captures=ask.captures, wait_s=wait_s)
            report["capture_results"] = joined(results)
            if len(results) > 1:
                report["capture_results_by_choice"] = [results[name] for name in ask.names]
        if ask.summary is not None:
            report["steering_applied"] = ask.summary.beside(self._dynamic_of(ask))
        return report

    def key(self, ask: ParsedRequest, *, streams: bool) -> str | None:
        """Return the steering key that is sent before the body of a response; None if none is sent.

        The key of a stream is sent before it runs, so it names only the steering that the request came with. A stream
        that came without steering has no key, because an action may still steer it.
        """
        if streams:
            return None if ask.key == NOTHING_KEY else ask.key
        return ask.key if self._dynamic_of(ask) is None else dynamic_key(ask.key)

    def _dynamic_of(self, ask: ParsedRequest) -> Dynamic | None:
        """Return the actions and controllers that may have steered a request so far; None if there are none."""
        reports = (self._dynamic.get(options.id) for options in ask.options)
        each = [dynamic for dynamic in reports if dynamic is not None and dynamic.steers]
        if not each:
            return None
        actions = tuple(change for dynamic in each for change in dynamic.actions)
        return Dynamic(actions, tuple(dict.fromkeys(name for dynamic in each for name in dynamic.controllers)))
