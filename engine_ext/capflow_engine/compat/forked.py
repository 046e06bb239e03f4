"""Work in a forked child process whose result comes back; a child in which nothing moves is given up.

A child moves when it says what it is at, and when it or a process that it started uses the CPU. So a machine under load gives it
the time that it needs, and one that waits for nothing ends.
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

Say = Callable[[str], None]
"""Says what a child is at."""

STILL_S_MAX = 60.0
_LOOK_S = 0.5


class _Stage(NamedTuple):
    what: str


class _Failed(NamedTuple):
    usage: bool
    message: str


def result_of(work: Callable[[Say], T], name: str, *, still_s_max: float = STILL_S_MAX) -> T:
    """Return what `work` returns in a forked child.

    name: what it does, for errors.
    still_s_max: seconds.

    Raises UsageError and CapflowError as the child does, and CapflowError when it ends without a result, or when nothing moves
    in it for `still_s_max`.
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


def _work(sender: Connection, work: Callable[[Say], Any], name: str) -> None:
    outcome: Any
    try:
        outcome = work(lambda what: sender.send(_Stage(what)))
    except CapflowError as e:
        outcome = _Failed(isinstance(e, UsageError), str(e))
    except Exception as e:  # noqa: BLE001 - the parent tells of it
        outcome = _Failed(usage=False, message=explain(name, got=f"{type(e).__name__}: {e}"))
    sender.send(outcome)


def _outcome(receiver: Connection, child: Any, name: str, still_s_max: float) -> Any:
    stage, used, moved = "starting", 0.0, time.monotonic()
    while True:
        if receiver.poll(_LOOK_S):
            try:
                said = receiver.recv()
            except EOFError:
                child.join()
                got = f"its process ended with exit code {child.exitcode} while {stage}"
                raise CapflowError(explain(name, got=got)) from None
            if not isinstance(said, _Stage):
                return said
            stage, moved = said.what, time.monotonic()
        elif (now := _cpu_s(child.pid)) > used:
            used, moved = now, time.monotonic()
        elif time.monotonic() - moved > still_s_max:
            got = f"nothing moved for {still_s_max:g} s while {stage}"
            raise CapflowError(explain(name, got=got, do="try again; if it stays, report it with the model's name"))


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of those that it started and that run, in seconds."""
    used = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                used += times.user + times.system + times.children_user + times.children_system
    return used
