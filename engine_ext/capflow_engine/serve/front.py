"""The front: what the routes of one API server share, and the way of requests through it.

What always holds: whatever vLLM generates here is steered by the global state, whichever route it came by; a request that is
steered knows by what before it runs, and keeps that.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from vllm import envs

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.capture.result import joined
from capflow.errors import UsageError, explain
from capflow.steering.program import SteeringProgram
from capflow.steering.request import NOTHING
from capflow_engine.compat import engine as compat
from capflow_engine.llm.readers import Readers
from capflow_engine.llm.results import Askers
from capflow_engine.request.beams import BEAMS, Beams
from capflow_engine.request.dynamic import taken
from capflow_engine.request.options import KEY, PackedOptions, RequestOptions
from capflow_engine.request.reach import check_params
from capflow_engine.serve.fields import FIELDS, Asked, Server, check_spelling, resolved
from capflow_engine.serve.serving import Serving
from capflow_engine.settings import Settings
from capflow_engine.steering.applied import NOTHING_KEY, Dynamic, dynamic_key
from capflow_engine.steering.budget import Size
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.store import SteeringStore

SAMPLES_MAX = envs.VLLM_MAX_N_SEQUENCES
"""How many samples vLLM lets a request ask for."""

BROUGHT: ContextVar[Iterator[dict[str, Any]] | None] = ContextVar("capflow_brought", default=None)
"""The options of each prompt of the request that is being answered, of a route whose body becomes another before it makes its parameters."""

_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""How the bodies say how long an answer may be, each what holds first."""


class Front:
    """What the routes of one server share."""

    def __init__(self, vllm_config: Any, serving: Serving) -> None:
        self.settings: Settings = vllm_config.additional_config
        self.info = compat.model_info(vllm_config)
        requests_max = vllm_config.scheduler_config.max_num_seqs
        size = Size.of(self.settings.steering_bank_bytes, self.info.hidden_size, requests_max)
        self.store = SteeringStore(serving.directory, Fit(self.info, size).check)
        self.server = Server(self.info, self.store, size)
        self.keys = serving.keys
        self.length_max: int = vllm_config.model_config.max_model_len
        self.body_bytes_max = serving.body_bytes_max
        self.rpc_address = serving.rpc_address
        self.ending = serving.ending
        self.asker = Askers(self.settings)
        self._told: dict[str | None, Dynamic] = {}  # what may have steered running requests, by id
        self._readers = Readers(self.settings)
        self.running: WeakValueDictionary[str, Asked] = WeakValueDictionary()  # by what their choices are called
        self._over: dict[str, float] = {}  # when the latest captures ended, by the same names, oldest first

    def take(self, request: Any, own: str, prompts: int) -> Asked | None:
        """Return what a request asks for, having told it to its parameters; None when neither it nor anybody else asks.

        own: what its response is called. prompts: how many it has.

        Raises UsageError that begins with the path of the field that is wrong.
        """
        BEAMS.set(None)  # of the request before, where one connection's requests follow each other in one context
        check_spelling(request.model_extra or ())
        xargs = getattr(request, "vllm_xargs", None)
        xargs = xargs.get(KEY) if isinstance(xargs, dict) else None
        said = {name: value for name in FIELDS if (value := getattr(request, name)) is not None}
        known = type(request).model_fields  # a body may have any other field too, which says nothing
        beams = "use_beam_search" in known and request.use_beam_search
        if not said and xargs is None:
            return self._steered_by_others(request, beams=beams, prompts=prompts)
        samples = (request.n if "n" in known else None) or 1
        if not 1 <= samples <= SAMPLES_MAX:
            raise UsageError(explain("n", got=samples, expected=f"1..{SAMPLES_MAX}"))
        tokens = next((n for name in _MAX_TOKENS if name in known and (n := getattr(request, name)) is not None), None)
        asked = Asked.parse(said, xargs, self.server, id=own, prompts=prompts, samples=samples, max_tokens=tokens)
        if beams:
            if asked.awaits:
                raise UsageError(explain("use_beam_search", got=True, expected="false, with capture"))
            return self._with_beams(asked)
        if asked.awaits and getattr(request, "background", False):
            raise UsageError(explain("background", got=True, expected="false, with capture"))
        for name in asked.names:
            if name in self.running:
                raise UsageError(explain("capture_id", got=name, expected="one that no running request has"))
        self.running.update(dict.fromkeys(asked.names, asked))
        request._options = itertools.cycle([options.pack() for options in asked.options])  # noqa: SLF001 - our own field
        return asked

    def _steered_by_others(self, request: Any, *, beams: bool, prompts: int) -> Asked | None:
        """Return what a request comes to that asks for nothing: None when there is no global state."""
        if self.store.global_state == NOTHING:
            return None
        asked = Asked.parse({}, None, self.server, id="", prompts=1, samples=1)
        if asked.program is None:
            return None
        if beams:
            return self._with_beams(asked)
        options = RequestOptions(program=asked.program)
        request._options = itertools.repeat(options.pack())  # noqa: SLF001 - our own field
        return msgspec.structs.replace(asked, options=(options,) * prompts)

    def _with_beams(self, asked: Asked) -> Asked:
        """Have what steers a request steer the beams that are searched for it."""
        BEAMS.set(None if asked.program is None else Beams(asked.program))
        return msgspec.structs.replace(asked, options=tuple(msgspec.structs.replace(o, id=None) for o in asked.options))

    def everyone(self) -> SteeringProgram | None:
        """Return what the global state comes to; None when nobody is steered who does not ask for it."""
        return None if self.store.global_state == NOTHING else resolved(None, self.server)

    async def check_consumers(self, asked: Asked | None) -> None:
        """Raise UsageError when a request's capture names a consumer that its hub, if that answers, does not have."""
        if asked is not None:
            await self._readers.check_async(asked.options)

    @staticmethod
    @contextlib.contextmanager
    def bringing(options: Iterator[dict[str, Any]] | None) -> Iterator[None]:
        """Give a request's options to the prompts that the block has the engine generate for."""
        token = BROUGHT.set(options)
        try:
            yield
        finally:
            BROUGHT.reset(token)

    def leave(self, asked: Asked) -> None:
        """Forget a request that is over."""
        BEAMS.set(None)
        now = time.monotonic()
        for options in asked.options:
            self._told.pop(options.id, None)
        for name in asked.names:
            self.running.pop(name, None)
            if asked.awaits:
                self._over.pop(name, None)
                self._over[name] = now
        keep_newest(self._over, limits.RESULTS_KEPT_MAX)

    def ran(self, name: str) -> bool:
        """Return whether this server runs a request of this name, or did so lately: the hub may not know of it yet."""
        ended = self._over.get(name)
        return name in self.running or (ended is not None and time.monotonic() - ended < limits.CAPTURE_WAIT_S_MAX)

    async def results(self, asked: Asked) -> bytes:
        """Return what the response says: members of its JSON object, behind a comma."""
        return b"," + msgspec.json.encode(await self.said(asked))[1:-1]

    async def said(self, asked: Asked) -> dict[str, Any]:
        """Return what the response says, by the names of its members."""
        said: dict[str, Any] = {}
        if asked.awaits:
            wait_s = self.settings.capture_wait_s if asked.wait else 0.0
            found = await self.asker.ask(asked.names, captures=asked.captures, wait_s=wait_s)
            said["capture_results"] = joined(found)
            if len(found) > 1:
                said["capture_results_by_choice"] = [found[name] for name in asked.names]
        if asked.applied is not None:
            said["steering_applied"] = asked.applied.beside(self._dynamic(asked))
        return said

    def key(self, asked: Asked, *, streams: bool) -> str | None:
        """Return the key that a response has before its body; None where it has none.

        A stream's is of what the request came with, and missing where that is nothing: an action may steer it yet.
        """
        if streams:
            return None if asked.key == NOTHING_KEY else asked.key
        return asked.key if self._dynamic(asked) is None else dynamic_key(asked.key)

    def _dynamic(self, asked: Asked) -> Dynamic | None:
        """Return what may have steered the choices of a request while they ran, as far as is known by now."""
        told = [self._told[options.id] for options in asked.options if options.id in self._told]
        if not told:
            return None
        actions = tuple(change for each in told for change in each.actions)
        return Dynamic(actions, tuple(dict.fromkeys(name for each in told for name in each.controllers)))

    async def _heard(self, outputs: Any, params: Any) -> AsyncIterator[Any]:
        """Yield vLLM's outputs without what they tell capflow."""
        said = (params.extra_args or {}).get(KEY)
        name = said.get("id") if isinstance(said, dict) else None
        asked = name is not None and (name in self.running or f"{name}#0" in self.running)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                dynamic = taken(output)
                if dynamic is not None and asked:
                    self._told[name] = dynamic
                yield output

    def steered(self, params: Any) -> Any:
        """Return sampling parameters with all that steers a request, where no route of capflow's has seen to that.

        Raises UsageError for what a client says in a way that only the server's own routes may.
        """
        said = (params.extra_args or {}).get(KEY)
        brought = BROUGHT.get()
        if brought is not None and not isinstance(said, PackedOptions):
            params = copy.copy(params)
            params.extra_args = {**(params.extra_args or {}), KEY: next(brought)}
            return params
        if isinstance(said, PackedOptions) or (said is None and self.store.global_state == NOTHING):
            return params
        (options,) = Asked.parse({}, said, self.server, id="", prompts=1, samples=params.n).options
        options = msgspec.structs.replace(options, id=options.id or None)
        params = copy.copy(params)
        params.extra_args = {**(params.extra_args or {}), KEY: options.pack()}
        return params

    def steering(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Return an engine's `generate` that steers by the global state what no route of capflow's has seen.

        It raises UsageError for patches of positions that a request never computes, before there is any answer.
        """

        @functools.wraps(generate)
        def steered(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
            beams = BEAMS.get()
            params = beams.steered(prompt, sampling_params) if beams is not None else self.steered(sampling_params)
            length = compat.rendered_length(prompt)
            if length is not None:
                check_params(params, length, self.length_max)
            return self._heard(generate(prompt, params, *args, **kwargs), params)

        return steered
