"""The reaction of an engine to ranks that steer differently: it freezes, or ends the requests.

The rank that returns the outputs says that ranks differ, once in the life of an engine. With `warn` it says nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from capflow.errors import explain
from capflow.protocol.message import Act
from capflow.steering.action import Freeze
from capflow_engine.compat import engine as compat
from capflow_engine.scheduler.orders import Decided, Divergence

logger = logging.getLogger("vllm.capflow.scheduler")

_ACT = "divergence"
_RANKS_NAMED_MAX = 8


def reason_of(diverged: Divergence) -> str:
    """Return why the engine reacts: the stop reason of requests, and the label of events."""
    return f"capflow:divergence:step {diverged.step}:{','.join(diverged.ranks[:_RANKS_NAMED_MAX])}"


def overtaken(diverged: Divergence) -> str:
    """Return why an unfreeze is rejected that came before this freeze and was not applied yet."""
    got = f"one from before the engine froze, for ranks steer differently since step {diverged.step}"
    return explain("unfreeze", got=got, do="send it again if steering shall go on all the same")


def freeze(diverged: Divergence) -> Act:
    """Return the action that freezes the engine."""
    logger.error("ranks steer differently since step %d; the engine is frozen", diverged.step)
    return Act(_ACT, Freeze(label=reason_of(diverged)))


def abort(
    diverged: Divergence,
    scheduler: Any,
    steered: Iterable[str],
    hub_of: Callable[[str], int],
    ends: Callable[[Decided], None],
) -> list[Any]:
    """Abort the requests that differ, or all steered ones if none is named; return them.

    steered: the running requests that something steers or may steer, by vLLM's id.
    hub_of: returns the number of a request's hub.
    ends: notes by what a request ends.
    """
    named = [key for key in diverged.requests if key in scheduler.requests]
    aborted, reason = [], reason_of(diverged)
    for key in named if diverged.requests else list(steered):
        request = scheduler.requests[key]
        ends(Decided(key, hub_of(key), -1, None, request.num_tokens, label=reason))
        if compat.abort(scheduler, key, "abort", reason):
            aborted.append(request)
    logger.error("ranks steer differently since step %d; %d requests are aborted", diverged.step, len(aborted))
    return aborted
