"""How far a request may read vLLM's prefix cache; `compat` has the keys of its blocks.

A cached token is not computed, so it has no row. vLLM lets a request read all of its cached prefix or, through
`skip_reading_prefix_cache`, nothing. Here the scheduler's cache manager is subclassed in place: for a request of which prompt
positions are captured it is shown the request as it is up to the first of them. Verified with vLLM 0.32.0.
"""

from __future__ import annotations

from typing import Any

from capflow.capture.positions import Positions


class _Prefix:
    """A request as the search for cached blocks sees it, when only its first `num_tokens - 1` tokens may be found."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _LimitedReads:
    """Mixed in before vLLM's `KVCacheManager`."""

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> Any:
        """Return the cached blocks that a request may read.

        max_cache_hit_length: how many tokens at most, from vLLM 0.33 on.
        """
        shown = _readable(request)
        if max_cache_hit_length is None:
            return super().get_computed_blocks(shown)  # type: ignore[misc]
        return super().get_computed_blocks(shown, min(max_cache_hit_length, shown.num_tokens - 1))  # type: ignore[misc]


def limit_reads(scheduler: Any) -> None:
    """Let a scheduler keep requests from reading cached blocks that `compute` says they must compute."""
    manager = scheduler.kv_cache_manager
    kind = type(manager)
    manager.__class__ = type(f"Capture{kind.__name__}", (_LimitedReads, kind), {})


def compute(request: Any, wanted: Positions) -> None:
    """Have a request compute these positions, and those behind the first of them, also where they are cached.

    The last position of a prompt is computed anyway.
    """
    request.capflow_wanted = wanted
    if wanted.at(request.num_prompt_tokens).first() == 0:
        request.skip_reading_prefix_cache = True


def _readable(request: Any) -> Any:
    wanted = getattr(request, "capflow_wanted", None)
    if wanted is None or isinstance(request, _Prefix):
        return request
    first = wanted.at(request.num_prompt_tokens).first()  # streaming input makes prompts longer, so it is not kept
    return request if first >= request.num_prompt_tokens - 1 else _Prefix(request, min(first + 1, request.num_tokens))
