"""Stop strings: where an answer ends that a stop string ends.

vLLM searches for stop strings in the front end and then aborts the request in the engine. Until then the engine
computes tokens that the answer does not have. It knows neither that the request stopped nor where. So the scheduler
searches as well: vLLM's own detokenizer reads the same tokens in the same portions and finds the same end.
Invariant: the scheduler only notes the end. The front end ends the request, as without capflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capflow_engine.compat import step as compat_step


class Stops:
    """The requests that have stop strings and are captured or steered.

    load_tokenizer: returns the model's tokenizer, or None. Called when a tokenizer is first needed.
    watched: what searches each answer, by vLLM's id.
    limits: the position after the last row of each request that stopped and has not ended, by vLLM's id.
    """

    def __init__(self, load_tokenizer: Callable[[], Any]) -> None:
        self._load_tokenizer = load_tokenizer
        # By vLLM's id; from `watch` to `end`, or to the stop.
        self.watched: dict[str, Any] = {}
        # By vLLM's id; from the stop to `end`.
        self.limits: dict[str, int] = {}

    def watch(self, request: Any) -> None:
        """Search the answer of a new request from now on, if it has stop strings and they apply.

        A request with streaming input is not searched: a stop string ends one of its answers, not the request.
        """
        params = request.sampling_params
        if params is None or not params.stop or not params.detokenize or not compat_step.ends_input(request):
            return
        tokenizer = self._load_tokenizer()
        if tokenizer is not None:
            self.watched[request.request_id] = compat_step.detokenizer(tokenizer, request)

    def take(self, request: Any, tokens: list[int]) -> None:
        """Search the tokens that a step generated; the request already holds them."""
        detokenizer = self.watched.get(request.request_id)
        if detokenizer is None or not tokens:
            return
        before = detokenizer.num_output_tokens()
        if detokenizer.update(tokens, compat_step.stopped_by_token(request)):
            dropped = before + len(tokens) - detokenizer.num_output_tokens()
            self.limits[request.request_id] = request.num_tokens - dropped - 1
            del self.watched[request.request_id]

    def end(self, key: str) -> int | None:
        """Forget a request that ended. Returns the position after its last row if a stop string ended it."""
        self.watched.pop(key, None)
        return self.limits.pop(key, None)
