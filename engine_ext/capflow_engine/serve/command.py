"""The command that started a server, at the other end of a socket.

The server sends it the model's sites; the command names the hub. If the command ends, the server ends.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import threading
import time

from capflow_engine.serve.ending import Ending
from capflow_engine.settings import Tapped

_AGAIN_S = 3.0


class Command:
    """Exchanges JSON objects, one a line, with the command.

    descriptor: of the socket; None for a server that no command started.

    If the command ends or closes its side, the main thread gets a signal, again and again until the server begins to
    end: vLLM may lose one while the engine starts. It is SIGTERM, but SIGINT where Ray took that over and would exit.
    """

    def __init__(self, descriptor: int | None, ending: Ending) -> None:
        self._ending = ending
        self._socket = None if descriptor is None else socket.socket(fileno=descriptor)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        if self._socket is not None:
            self._socket.set_inheritable(False)
            threading.Thread(target=self._read, args=(self._socket,), name="capflow-command", daemon=True).start()

    def checked(self, tapped: Tapped) -> str | None:
        """Report that the arguments are right, and wait for the command's hub. Returns its address; None for no hub."""
        if self._socket is None:
            return None
        sites = [[site.layer, site.hook] for site in tapped.sites]
        with contextlib.suppress(OSError):  # the command ended, so this process ends too
            self._socket.sendall(json.dumps({"num_layers": tapped.num_layers, "sites": sites}).encode() + b"\n")
        hub: str | None = json.loads(self._lines.get())["hub"]
        return hub

    def _read(self, its: socket.socket) -> None:
        for line in its.makefile("rb"):
            self._lines.put(line)
        if self._ending.before is not None:
            self._ending.before()
        main = threading.main_thread().ident
        while main is not None and not self._ending.begun:
            rays = getattr(signal.getsignal(signal.SIGTERM), "__module__", "").startswith("ray.")
            signal.pthread_kill(main, signal.SIGINT if rays else signal.SIGTERM)
            time.sleep(_AGAIN_S)
