"""Calls of the front ends to the scheduler of their engine: actions on the whole engine, and what holds for it.

They need no hub. The process of the scheduler answers a call between two steps, in the order in which calls come.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from capflow.errors import CapflowError, UsageError
from capflow.limits import Name, Text
from capflow.protocol.message import Act
from capflow.steering.action import Freeze, Gain, Unfreeze
from capflow_engine.compat import engine as compat

OWNER = "client"
"""The owner of actions that come through a front end."""


class EngineCall(msgspec.Struct, frozen=True):
    """An action, or None to read the state alone."""

    action: Gain | Freeze | Unfreeze | None = None


class EngineState(msgspec.Struct, frozen=True):
    """What holds for all requests of an engine, after the call.

    step: the step from which on the action holds; the next one.
    gains: the scale of each owner that has one other than 1.
    reason: why the action was not taken; else empty.
    """

    step: int
    frozen: bool
    gains: dict[Name, float]
    reason: Text = ""


def answer(scheduler: Any, data: str) -> str:
    """Return the answer to a call. scheduler: vLLM's, with capflow's part."""
    call = msgspec.json.decode(data, type=EngineCall)
    admission = scheduler.capflow
    actions, running = admission.actions, functools.partial(admission.running, scheduler)
    actions.catch_up(running)
    reason = None
    if call.action is not None:
        reason = actions.apply_to_all(Act("", call.action, owner=OWNER), running, answered=True)
    state = EngineState(admission.step + 1, actions.frozen, dict(actions.gains), reason or "")
    return msgspec.json.encode(state).decode()


async def ask(engine_client: Any, action: Gain | Freeze | Unfreeze | None = None) -> EngineState:
    """Return the answer of an engine to a call. All its schedulers have to take the action.

    Raises UsageError if one rejects the action, CapflowError if the engine does not answer.
    """
    data = msgspec.json.encode(EngineCall(action)).decode()
    try:
        answers = await compat.call_schedulers(engine_client, data)
    except Exception as e:
        raise CapflowError(f"engine: it does not answer: {type(e).__name__}: {e}") from e
    states = [msgspec.json.decode(each, type=EngineState) for each in answers]
    for state in states:
        if state.reason:
            raise UsageError(state.reason)
    return states[0]
