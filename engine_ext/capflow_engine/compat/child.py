"""Work in a child process that returns a result; a child without progress is killed.

The child is a fork, which has everything that its parent imported and registered. Where a library in use may not
survive a fork, and the fork fails, the child is a new interpreter, which imports what the work names: seconds.

A child makes progress when it reports a stage, or when it or a process that it started uses the CPU. So a child on a
machine under load gets the time that it needs, and a child that hangs ends, also if a thread of it looks around now and
then.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from capflow.errors import CapflowError, UsageError, explain

T = TypeVar("T")

Report = Callable[[str], None]
"""Reports the stage of a child's work, such as `reading layer 3 of 4`."""

STILL_S_MAX = 60.0
TRIED_S_MAX = 30.0
_POLL_S = 0.5
# CPU time below this part of a processor is no progress.
_BUSY_PART_MIN = 0.01

# The names that gRPC gives its threads.
_GRPC_THREADS = ("event_engine", "grpc_")
_FRESH = "import sys\nfrom capflow_engine.compat import child\nchild.serve(int(sys.argv[1]))"


class _Child(NamedTuple):
    """A child that works.

    receiver: what it sends.
    code: waits until it has ended, and returns its exit code.
    """

    receiver: Connection
    pid: int
    kill: Callable[[], None]
    code: Callable[[], int]


class _LostError(CapflowError):
    """The child ended without a result, or made no progress."""


class _Stage(NamedTuple):
    name: str


class _Failed(NamedTuple):
    usage: bool
    message: str


def result_of(work: Callable[[Report], T], name: str, *, still_s_max: float = STILL_S_MAX) -> T:
    """Return the result of `work`, which runs in a child process.

    Raises the child's UsageError or CapflowError, and CapflowError if the child ends without a result or makes no
    progress for `still_s_max` seconds. Where the fork is only a try, the work may begin a second time.

    work: a function of a module, or a `functools.partial` of one, for a new interpreter is sent its name.
    name: the work, for errors.
    """
    way = fork()
    if way is Fork.TRIED:
        with contextlib.suppress(_LostError):
            return _result(_forked(work, name), name, TRIED_S_MAX, stages_only=True)  # type: ignore[no-any-return]
    start = _forked if way is Fork.SAFE else _fresh
    return _result(start(work, name), name, still_s_max)  # type: ignore[no-any-return]


def wait_while_busy(process: subprocess.Popen[bytes], still_s_max: float = STILL_S_MAX) -> bool:
    """Wait for the end of a process for as long as it uses the CPU; return whether it ended.

    still_s_max: how many seconds it may use none.
    """
    used, progress = 0.0, time.monotonic()
    while process.poll() is None:
        if (now := _cpu_s(process.pid)) > used + _BUSY_PART_MIN * still_s_max:
            used, progress = now, time.monotonic()
        elif time.monotonic() - progress > still_s_max:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
    return True


class Fork(enum.Enum):
    """What a fork of this process is worth.

    TRIED: it works, crashes, or hangs with a thread that spins.
    """

    SAFE = enum.auto()
    TRIED = enum.auto()
    IMPOSSIBLE = enum.auto()


def fork() -> Fork:
    """Return what a fork of this process is worth.

    A fork does not have CUDA once that is initialized. gRPC does not support one while it is called
    (https://github.com/grpc/grpc/blob/master/doc/fork_support.md).
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return Fork.IMPOSSIBLE
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((thread / "comm").read_text())
    return Fork.TRIED if any(name.startswith(_GRPC_THREADS) for name in names) else Fork.SAFE


def _result(child: _Child, name: str, still_s_max: float, *, stages_only: bool = False) -> Any:
    try:
        outcome = _outcome(child, name, still_s_max, stages_only=stages_only)
    finally:
        child.kill()
        child.code()
        child.receiver.close()
    if isinstance(outcome, _Failed):
        raise (UsageError if outcome.usage else CapflowError)(outcome.message)
    return outcome


def _forked(work: Callable[[Report], Any], name: str) -> _Child:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_forked_work, args=(sender, work, name), name="capflow-forked")
    process.start()
    sender.close()

    def code() -> int:
        process.join()
        return int(process.exitcode or 0)

    assert process.pid is not None
    return _Child(receiver, process.pid, process.kill, code)


def _forked_work(sender: Connection, work: Callable[[Report], Any], name: str) -> None:
    gc.freeze()  # what the parent holds is the parent's to end, such as sockets that both have
    _work(sender, work, name)


def _fresh(work: Callable[[Report], Any], name: str) -> _Child:
    here, there = multiprocessing.Pipe()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _FRESH, str(there.fileno())]
    popen = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, env=environment)
    there.close()
    try:
        here.send((work, name))
    except OSError:  # it has ended already, which is seen by who waits for it
        pass
    except Exception as e:  # pickle raises anything
        popen.kill()
        popen.wait()
        here.close()
        got = f"something that cannot be sent to a process: {type(e).__name__}: {e}"
        raise CapflowError(explain(name, got=got, do="do it before the process uses CUDA or gRPC")) from e
    return _Child(here, popen.pid, popen.kill, popen.wait)


def serve(descriptor: int) -> None:
    """Do the work that a parent sends: what a new interpreter runs."""
    logging.disable(logging.WARNING)  # the parent has logged what its imports say
    connection = Connection(descriptor)
    _work(connection, *connection.recv())


def _work(sender: Connection, work: Callable[[Report], Any], name: str) -> None:
    outcome: Any
    try:
        outcome = work(lambda stage: sender.send(_Stage(stage)))
    except CapflowError as e:
        outcome = _Failed(isinstance(e, UsageError), str(e))
    except Exception as e:  # noqa: BLE001 - the parent raises it
        outcome = _Failed(usage=False, message=explain(name, got=f"{type(e).__name__}: {e}"))
    sender.send(outcome)


def _outcome(child: _Child, name: str, still_s_max: float, *, stages_only: bool) -> Any:
    """Return what a child sends at its end; raise _LostError if it sends nothing.

    stages_only: whether the use of the CPU is no progress.
    """
    stage, used, progress = "starting", 0.0, time.monotonic()
    while True:
        if child.receiver.poll(_POLL_S):
            try:
                message = child.receiver.recv()
            except EOFError:
                got = f"exit code {child.code()} of its process while {stage}"
                raise _LostError(explain(name, got=got)) from None
            if not isinstance(message, _Stage):
                return message
            stage, progress = message.name, time.monotonic()
        elif not stages_only and (now := _cpu_s(child.pid)) > used + _BUSY_PART_MIN * still_s_max:
            used, progress = now, time.monotonic()
        elif time.monotonic() - progress > still_s_max:
            got = f"no progress for {still_s_max:g} s while {stage}"
            do = "try again; if it fails again, report it with the model's name"
            raise _LostError(explain(name, got=got, do=do))


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
