"""How far a request may read vLLM's prefix cache. The keys of its blocks are in `compat.engine`.

A cached token is not computed, so it has no row. vLLM lets a request read all of its cached prefix or, with
`skip_reading_prefix_cache`, none of it. Here the scheduler's cache manager is subclassed in place: for a request with
captured prompt positions, the manager searches the cache only for the tokens before the first of them. For a request
with a latched gate, it searches only for those before the first position that the gate scores, also when the request
was preempted and has generated tokens: rows of these were delivered, but the latch is worked out again. Verified with
vLLM 0.32.0.
"""

from __future__ import annotations

from typing import Any

from capflow.capture.positions import Positions


class _Prefix:
    """A view of a request for the search of cached blocks, which finds at most its first `num_tokens - 1` tokens."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _LimitedReads:
    """A mixin of vLLM's `KVCacheManager`."""

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> Any:
        """Return the cached blocks that a request may read.

        max_cache_hit_length: the maximum number of tokens; vLLM passes it from 0.33 on.
        """
        view = _readable(request)
        if max_cache_hit_length is None:
            return super().get_computed_blocks(view)  # type: ignore[misc]
        return super().get_computed_blocks(view, min(max_cache_hit_length, view.num_tokens - 1))  # type: ignore[misc]


def limit_reads(scheduler: Any) -> None:
    """Make a scheduler's requests compute the positions that `compute` names, even if they are cached."""
    manager = scheduler.kv_cache_manager
    kind = type(manager)
    manager.__class__ = type(f"Capture{kind.__name__}", (_LimitedReads, kind), {})


def compute(request: Any, wanted: Positions) -> None:
    """Make a request compute the first of these positions and all later ones, even if they are cached.

    The last position of a prompt is always computed.
    """
    request.capflow_wanted = wanted
    if wanted.at(request.num_prompt_tokens).first() == 0:
        request.skip_reading_prefix_cache = True


def compute_from(request: Any, position: int) -> None:
    """Make a request compute a position and all later ones whenever it starts, even if they are cached."""
    request.capflow_computed_from = position
    if position == 0:
        request.skip_reading_prefix_cache = True


def readable(request: Any) -> int | None:
    """Return how many tokens a request may have without computing them; None for all that are cached."""
    view = _readable(request)
    return None if view is request else view.num_tokens - 1


def _readable(request: Any) -> Any:
    if isinstance(request, _Prefix):
        return request
    first = getattr(request, "capflow_computed_from", None)
    if first is not None and first + 1 < request.num_tokens:
        request = _Prefix(request, first + 1)
    wanted = getattr(request, "capflow_wanted", None)
    if wanted is None:
        return request
    first = wanted.at(request.num_prompt_tokens).first()  # not cached: streaming input makes prompts longer
    return request if first >= request.num_prompt_tokens - 1 else _Prefix(request, min(first + 1, request.num_tokens))
