"""vLLM's server as a child of `capflow serve`: it starts, learns the hub's address, ends, or is killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from capflow import limits
from capflow.capture.site import Site
from capflow.cli.signals import Signals
from capflow.errors import CapflowError, explain

# How long the process may take to end after all steps of the shutdown.
_LEAVE_S = 20.0


class Shape(NamedTuple):
    """The server's model, before its weights are loaded: the number of layers, and the sites that carry a tap."""

    num_layers: int
    sites: tuple[Site, ...]


class ServerProcess:
    """Runs `capflow_engine.serve.server`, from `with` to its end.

    The server and its children have a session of their own: Ctrl-C reaches only this process, which asks the server to
    end. A socket joins the two. The server ends when this side is closed: on a signal, and when this process is gone.
    """

    def __init__(self, arguments: Sequence[str], signals: Signals, *, shutdown_s: float) -> None:
        self._arguments = tuple(arguments)
        self._signals = signals
        self._end_s = shutdown_s + limits.ANSWERS_S + limits.GIVE_UP_S + limits.ENGINE_END_S_MAX + _LEAVE_S
        self._socket, self._its = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        descriptor = self._its.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "capflow_engine.serve.server", *self._arguments, "--command-fd", str(descriptor)],
            pass_fds=(descriptor,),
            start_new_session=True,
        )
        self._its.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()
        if error is not None:
            self._kill()
        self._sweep()

    def shape(self) -> Shape | None:
        """Wait until the server has checked its arguments; return its model, or None when it ended or a signal came."""
        line = b""
        while not line.endswith(b"\n"):
            if self._signals.first.is_set():
                return None
            if not select.select([self._socket], [], [], limits.IDLE_S)[0]:
                continue
            part = self._socket.recv(65536)
            if not part:
                return None
            line += part
        shape = json.loads(line)
        return Shape(shape["num_layers"], tuple(Site(layer, hook) for layer, hook in shape["sites"]))

    def go_on(self, hub: str | None) -> None:
        """Have the server start its engine, with this hub or with those of its arguments."""
        # OSError: the server ended, and `follow` reports how.
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps({"hub": hub}).encode() + b"\n")

    def follow(self) -> int:
        """Wait for the end of the server; return the exit code. The first signal asks for the end, the second kills.

        Raises CapflowError when something else ended it.
        """
        process, signals = self._process, self._signals
        assert process is not None
        asked_at: float | None = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limits.IDLE_S)
                break
            if signals.first.is_set() and asked_at is None:
                asked_at = time.monotonic()
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
            late = asked_at is not None and time.monotonic() - asked_at > self._end_s
            if signals.second.is_set() or late:
                self._kill()
        if signals.second.is_set():
            return signals.exit_code
        if asked_at is not None and (code < 0 or code == 128 + signal.SIGINT):  # before it served
            return signals.exit_code
        if code < 0:
            raise CapflowError(explain("the server was killed", got=signal.Signals(-code).name))
        return code

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _sweep(self) -> None:
        """End the processes that the server left, such as its engine when it was killed."""
        assert self._process is not None
        deadline = time.monotonic() + limits.HANG_S_MAX
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            while time.monotonic() < deadline and not self._signals.second.wait(limits.IDLE_S):
                os.killpg(self._process.pid, 0)
            os.killpg(self._process.pid, signal.SIGKILL)
