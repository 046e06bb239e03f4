"""Work in a forked child process that returns a result; a child without progress is killed.

A child makes progress when it reports a stage, or when it or a process that it started uses the CPU. So a child on a
machine under load gets the time that it needs, and a child that hangs ends, also if a thread of it looks around now and
then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import psutil

from capflow.errors import CapflowError, UsageError, explain

T = TypeVar("T")

Report = Callable[[str], None]
"""Reports the stage of a child's work, such as `reading layer 3 of 4`."""

STILL_S_MAX = 60.0
_POLL_S = 0.5
# CPU time below this part of a processor is no progress.
_BUSY_PART_MIN = 0.01


class _Stage(NamedTuple):
    name: str


class _Failed(NamedTuple):
    usage: bool
    message: str


def result_of(work: Callable[[Report], T], name: str, *, still_s_max: float = STILL_S_MAX) -> T:
    """Return the result of `work`, which runs in a forked child.

    Raises the child's UsageError or CapflowError, and CapflowError if the child ends without a result or makes no
    progress for `still_s_max` seconds.

    name: the work, for errors.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(sender, work, name), name="capflow-forked")
    child.start()
    sender.close()
    try:
        outcome = _outcome(receiver, child, name, still_s_max)
    finally:
        child.kill()
        child.join()
        receiver.close()
    if isinstance(outcome, _Failed):
        raise (UsageError if outcome.usage else CapflowError)(outcome.message)
    return outcome  # type: ignore[no-any-return]


def _work(sender: Connection, work: Callable[[Report], Any], name: str) -> None:
    outcome: Any
    try:
        outcome = work(lambda stage: sender.send(_Stage(stage)))
    except CapflowError as e:
        outcome = _Failed(isinstance(e, UsageError), str(e))
    except Exception as e:  # noqa: BLE001 - the parent raises it
        outcome = _Failed(usage=False, message=explain(name, got=f"{type(e).__name__}: {e}"))
    sender.send(outcome)


def _outcome(receiver: Connection, child: Any, name: str, still_s_max: float) -> Any:
    stage, used, progress = "starting", 0.0, time.monotonic()
    while True:
        if receiver.poll(_POLL_S):
            try:
                message = receiver.recv()
            except EOFError:
                child.join()
                got = f"exit code {child.exitcode} of its process while {stage}"
                raise CapflowError(explain(name, got=got)) from None
            if not isinstance(message, _Stage):
                return message
            stage, progress = message.name, time.monotonic()
        elif (now := _cpu_s(child.pid)) > used + _BUSY_PART_MIN * still_s_max:
            used, progress = now, time.monotonic()
        elif time.monotonic() - progress > still_s_max:
            got = f"no progress for {still_s_max:g} s while {stage}"
            do = "try again; if it fails again, report it with the model's name"
            raise CapflowError(explain(name, got=got, do=do))


def _cpu_s(pid: int) -> float:
    """Return the CPU time, in seconds, of a process and of its running descendants."""
    used = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                used += times.user + times.system + times.children_user + times.children_system
    return used
