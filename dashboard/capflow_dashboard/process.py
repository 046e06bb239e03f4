"""The consumer's side of the page's process: starts it, sends to it, and ends it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from capflow.errors import CapflowError, FatalError, UsageError, explain
from capflow.steering.action import Action
from capflow_dashboard import limits
from capflow_dashboard.access import KEY_VARIABLE, TOKEN_VARIABLE
from capflow_dashboard.channel import (
    ActionWanted,
    Channel,
    Counted,
    HealthWanted,
    Listening,
    LogWanted,
    PageSetup,
    StartFailed,
    ToPages,
)

logger = logging.getLogger("capflow.consumer.dashboard")


class PageProcess:
    """A process that serves the page, from `start` to `stop`.

    on_count: called with the name of a counter and what to add.
    on_action: called with an action of a page.

    Both are called on a thread of this object.
    """

    def __init__(
        self, setup: PageSetup, on_count: Callable[[str, int], None], on_action: Callable[[Action], None]
    ) -> None:
        self._setup = setup
        self._on_count = on_count
        self._on_action = on_action
        # The port in use, once started.
        self.port = setup.port
        # Whether a page shows the hub's counters; written by the thread.
        self.health_wanted = False
        # Set by `start`.
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._read, name="capflow-dashboard", daemon=True)

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process and wait until it listens.

        Raises UsageError when the port or a probe cannot be used, CapflowError for any other failure.
        """
        own, other = socket.socketpair()
        # It has a session of its own, so that a Ctrl-C for this process does not end it first.
        command = [sys.executable, "-P", "-m", "capflow_dashboard.serving", str(other.fileno())]
        with other:
            self._process = subprocess.Popen(
                command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env=_environment()
            )
        self._channel = Channel(own, limits.START_S_MAX)
        try:
            self._channel.send(self._setup)
            answer, _ = self._channel.receive()
        except (OSError, EOFError) as e:
            self.stop()
            raise CapflowError(explain("the dashboard's process", got="no answer", expected="that it listens")) from e
        if isinstance(answer, StartFailed):
            self.stop()
            raise (UsageError if answer.usage else CapflowError)(answer.reason)
        assert isinstance(answer, Listening)
        self.port = answer.port
        self._thread.start()

    def send(self, message: ToPages, rows: Sequence[Any] = ()) -> None:
        """Send a message. Raises FatalError if the process is gone or does not read."""
        assert self._channel is not None
        try:
            self._channel.send(message, rows)
        except OSError as e:
            raise FatalError(f"the dashboard's process does not read: {e}") from e

    def stop(self) -> None:
        """Close the pages' connections and end the process."""
        if self._process is None or self._channel is None:
            return
        self._channel.close()
        try:
            self._process.wait(limits.OPEN_S_MAX)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._thread.ident is not None:
            self._thread.join()
        self._process = None

    def _read(self) -> None:
        assert self._channel is not None
        while True:
            try:
                message, _ = self._channel.receive()
            except EOFError:
                return
            match message:
                case Counted(name, amount):
                    self._on_count(name, amount)
                case ActionWanted(action):
                    self._on_action(action)
                case HealthWanted(wanted):
                    self.health_wanted = wanted
                case LogWanted(text, event, level):
                    logger.log(level, "%s", text, extra=event)


def _environment() -> dict[str, str]:
    """Return the environment without the token and the server's key."""
    return {name: value for name, value in os.environ.items() if name not in (TOKEN_VARIABLE, KEY_VARIABLE)}
