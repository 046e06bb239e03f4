"""The front: what the routes of one API server share, and the way of requests through it.

What always holds: whatever vLLM generates here is steered by the global state, whichever route it came by; a request that is
steered knows by what before it runs, and keeps that.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from fastapi import Request

from capflow.errors import UsageError, explain
from capflow.result import joined
from capflow.steering import NOTHING
from capflow_engine import compat
from capflow_engine.asker import Asker
from capflow_engine.fields import FIELDS, Asked, Server, check_spelling, resolved
from capflow_engine.holdings import Size
from capflow_engine.options import KEY, RequestOptions
from capflow_engine.serving import Serving
from capflow_engine.settings import Settings
from capflow_engine.store import SteeringStore

_CONNECT_S = 1.0  # how long the hub has to answer


class Front:
    """What the routes of one server share."""

    def __init__(self, vllm_config: Any, serving: Serving) -> None:
        self.settings: Settings = vllm_config.additional_config
        self.info = compat.model_info(vllm_config)
        self.store = SteeringStore(serving.directory)
        requests_max = vllm_config.scheduler_config.max_num_seqs
        size = Size.of(self.settings.steering_bank_bytes, self.info.hidden_size, requests_max)
        self.server = Server(self.info, self.store, size)
        self.keys = serving.keys
        self.body_bytes_max = serving.body_bytes_max
        self.asker = Asker(functools.partial(self.settings.client, _CONNECT_S))
        self.running: WeakValueDictionary[str, Asked] = WeakValueDictionary()  # by what their choices are called

    def take(self, request: Any, raw_request: Request, kind: str, prompts: int) -> Asked | None:
        """Return what a request asks for, having told it to its parameters; None when neither it nor anybody else asks.

        Raises UsageError that begins with the path of the field that is wrong.
        """
        check_spelling(request.model_extra or ())
        xargs = (request.vllm_xargs or {}).get(KEY)
        said = {name: value for name in FIELDS if (value := getattr(request, name)) is not None}
        beams = getattr(request, "use_beam_search", False)
        if not said and xargs is None:
            return self._steered_by_others(request, beams=beams, prompts=prompts)
        own = (
            request.request_id
            if kind == ""
            else f"{kind}-{raw_request.headers.get('X-Request-Id') or request.request_id}"
        )
        samples = getattr(request, "n", None) or 1
        asked = Asked.parse(said, xargs, self.server, id=own, prompts=prompts, samples=samples)
        if beams:
            raise UsageError(explain("use_beam_search", got=True, expected="false, with capture and steering"))
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
            if asked.program.prefill != asked.program.decode:
                expected = "false, while the global state differs between prompts and answers"
                raise UsageError(explain("use_beam_search", got=True, expected=expected))
            return msgspec.structs.replace(asked, options=(RequestOptions(),) * prompts)
        options = RequestOptions(program=asked.program)
        request._options = itertools.repeat(options.pack())  # noqa: SLF001 - our own field
        return msgspec.structs.replace(asked, options=(options,) * prompts)

    def leave(self, asked: Asked) -> None:
        """Forget a request that is over."""
        for name in asked.names:
            self.running.pop(name, None)

    async def results(self, asked: Asked) -> bytes:
        """Return what the response says: members of its JSON object, behind a comma."""
        said: dict[str, Any] = {}
        if asked.awaits:
            wait_s = self.settings.capture_wait_s if asked.wait else 0.0
            found = await self.asker.ask(asked.names, captures=asked.captures, wait_s=wait_s)
            said["capture_results"] = joined(found)
            if len(found) > 1:
                said["capture_results_by_choice"] = [found[name] for name in asked.names]
        if asked.applied is not None:
            said["steering_applied"] = asked.applied
        return b"," + msgspec.json.encode(said)[1:-1]

    def steered(self, params: Any) -> Any:
        """Return sampling parameters with the global state, where they know nothing of capflow yet."""
        if KEY in (params.extra_args or {}) or self.store.global_state == NOTHING:
            return params
        program = resolved(None, self.server)
        if program is None:
            return params
        params = copy.copy(params)
        params.extra_args = {**(params.extra_args or {}), KEY: RequestOptions(program=program).pack()}
        return params

    def steering(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Return an engine's `generate` that steers by the global state what no route of capflow's has seen."""

        @functools.wraps(generate)
        def steered(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
            return generate(prompt, self.steered(sampling_params), *args, **kwargs)

        return steered
