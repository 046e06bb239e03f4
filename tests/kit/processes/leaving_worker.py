"""A worker that spills a request, and is killed while it leaves: `leaving_worker.py ADDRESS ROOT POINT`.

POINT is `close` or `bye`: killed before it closes its outbox, with no acknowledgement on the disk, or before it sends
Bye.
"""

import os
import signal
import sys
from pathlib import Path

from capflow import limits
from capflow.protocol.message import Bye
from capflow.protocol.session import PeerSession
from capflow.transport.links.worker import WorkerLink
from capflow.transport.outbox import Outbox
from tests.kit.frames import make_finished, make_frame, make_hello


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    address, root, point = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    hello = make_hello(boot="boot-9")
    outbox = Outbox.of(root, hello, limits.SPOOL_BYTES_DEFAULT)
    if point == "close":
        outbox.close = die
        outbox._spool._persist = lambda: None
    else:
        send = PeerSession.send
        PeerSession.send = lambda self, sent, now: die() if isinstance(sent, Bye) else send(self, sent, now)
    link = WorkerLink(address, hello, policy="spill", outbox=outbox, outbound_bytes_max=1000)
    link.start()
    assert link.wait_welcome(20)
    for step in range(10):
        finished = [make_finished("r1", 4, 40)] if step == 9 else []
        frame = make_frame([("r1", 4, step * 4, 4)], boot="boot-9", step=step, finished=finished)
        assert link.send(frame.header, frame.payload) is None
    assert outbox.frames
    link.close(20)


if __name__ == "__main__":
    main()
