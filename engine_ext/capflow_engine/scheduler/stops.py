"""Stop strings: where an answer ends that ends by text.

vLLM searches for stop strings in the front end, and aborts the request in the engine afterwards. Meanwhile the engine has computed
tokens that the answer does not have, and it knows neither that the request stopped nor where. So the scheduler searches as well,
with vLLM's own detokenizer, over the same tokens in the same portions, and finds the same end. It only takes note of it: the
front end ends the request, as without capflow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from capflow_engine.compat import step as compat_step


class Stops:
    """The requests with stop strings whose end matters to someone.

    load_tokenizer: returns the model's tokenizer, or None; called when it is first needed.
    """

    def __init__(self, load_tokenizer: Callable[[], Any]) -> None:
        self._load_tokenizer = load_tokenizer
        # By vLLM's id; from `watch` to `end`, or to the stop.
        self._watched: dict[str, Any] = {}
        # By vLLM's id; from the stop to `end`.
        self._limits: dict[str, int] = {}

    @property
    def limits(self) -> Mapping[str, int]:
        """By vLLM's id, the position behind the last row of each request that stopped and is not over."""
        return self._limits

    def watch(self, request: Any) -> None:
        """Search the answer of a new request, if it has stop strings and they apply.

        A request with streaming input is left out: a stop string ends one of its answers, not the request.
        """
        params = request.sampling_params
        if params is None or not params.stop or not params.detokenize or not compat_step.ends_input(request):
            return
        tokenizer = self._load_tokenizer()
        if tokenizer is not None:
            self._watched[request.request_id] = compat_step.detokenizer(tokenizer, request)

    def take(self, request: Any, tokens: list[int]) -> None:
        """Search the tokens that a step gave a request, which already holds them."""
        detokenizer = self._watched.get(request.request_id)
        if detokenizer is None or not tokens:
            return
        before = detokenizer.num_output_tokens()
        if detokenizer.update(tokens, compat_step.stopped_by_token(request)):
            dropped = before + len(tokens) - detokenizer.num_output_tokens()
            self._limits[request.request_id] = request.num_tokens - dropped - 1
            del self._watched[request.request_id]

    def end(self, key: str) -> int | None:
        """Forget a request that is over; return the position behind its last row if a stop string ended it."""
        self._watched.pop(key, None)
        return self._limits.pop(key, None)
