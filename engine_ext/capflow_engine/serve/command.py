"""The command that started a server, at the other end of a socket: it is told of the model, names its hub, and its end is the server's."""

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
    """One JSON object a line each way. descriptor: of the socket; None for a server that no command started.

    When the command ends or closes its side, the main thread gets a SIGTERM, again and again until the end has begun: vLLM may
    lose one while the engine starts.
    """

    def __init__(self, descriptor: int | None, ending: Ending) -> None:
        self._ending = ending
        self._socket = None if descriptor is None else socket.socket(fileno=descriptor)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        if self._socket is not None:
            self._socket.set_inheritable(False)
            threading.Thread(target=self._read, args=(self._socket,), name="capflow-command", daemon=True).start()

    def checked(self, tapped: Tapped) -> str | None:
        """Tell that the arguments are right, and wait for the hub that the command starts; return its address, None for none."""
        if self._socket is None:
            return None
        sites = [[site.layer, site.hook] for site in tapped.sites]
        with contextlib.suppress(OSError):  # the command ended: so does this process
            self._socket.sendall(json.dumps({"num_layers": tapped.num_layers, "sites": sites}).encode() + b"\n")
        hub: str | None = json.loads(self._lines.get())["hub"]
        return hub

    def _read(self, its: socket.socket) -> None:
        for line in its.makefile("rb"):
            self._lines.put(line)
        main = threading.main_thread().ident
        while main is not None and not self._ending.begun:
            signal.pthread_kill(main, signal.SIGTERM)
            time.sleep(_AGAIN_S)
