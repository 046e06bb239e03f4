"""A hub in a child process."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from capflow import limits
from capflow.errors import CapflowError, HubUnreachableError, UsageError, explain
from capflow.transport.address import private_address
from capflow.transport.client import Client

_EXIT_USAGE = 2


class HubProcess:
    """Runs `capflow run` with some consumers between `start`, or `begin`, and `stop`.

    The child has a session of its own, so that a Ctrl-C for its parent does not end it first. It drains and ends when
    this process ends, however it ends.

    consumers: each as in `--consumer`.
    address: the address of the hub; by default a private one.
    """

    def __init__(self, consumers: Sequence[str], *, address: str | None = None) -> None:
        self.consumers = tuple(consumers)
        self.address = address or private_address("hub")
        self._process: subprocess.Popen[bytes] | None = None
        # The output of the child, in an unnamed file, until `stop`.
        self._log: IO[bytes] | None = None

    def start(self, timeout_s: float) -> None:
        """Start the hub and wait until it answers; raises as `wait` does."""
        self.begin()
        self.wait(timeout_s)

    def begin(self) -> None:
        """Start the hub, which takes a while; `wait` returns when it answers."""
        self._log = log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `_forget`
        command = [sys.executable, "-m", "capflow", "run", "--address", self.address, "--until-eof"]
        for consumer in self.consumers:
            command += ["--consumer", consumer]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)

    def wait(self, timeout_s: float) -> None:
        """Wait until the hub answers.

        Raises UsageError if a consumer cannot be used, CapflowError if the hub does not start in time. It is stopped
        then.
        """
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while True:
            code = self._process.poll()
            if code is not None:
                message = self._last_line().removeprefix("capflow: ")
                self._forget()
                raise (UsageError if code == _EXIT_USAGE else CapflowError)(message)
            with contextlib.suppress(HubUnreachableError), Client(self.address, timeout=0.5):
                return
            if time.monotonic() > deadline:
                self.stop()
                raise CapflowError(
                    explain("the hub did not start", got=f"no answer at {self.address} in {timeout_s:g} s")
                )

    def stop(self) -> int:
        """Let the hub drain and end; return its exit code."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(limits.DRAIN_S_MAX + limits.SILENCE_S_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        code = self._process.returncode
        self._forget()
        return code

    def _last_line(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the hub ended without a message"

    def _forget(self) -> None:
        self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None
