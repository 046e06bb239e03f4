"""A worker that sends frames over a real link and spills, until it is killed: `outbox.py ADDRESS ROOT BOOT COUNT`."""

import sys
from pathlib import Path

from capflow import limits
from capflow.transport.links.worker import WorkerLink
from capflow.transport.outbox import Outbox
from tests.kit.frames import make_frame, make_hello
from tests.kit.waiting import eventually


def main():
    address, root, boot, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    hello = make_hello(boot=boot)
    outbox = Outbox.of(root, hello, limits.SPOOL_BYTES_DEFAULT)
    link = WorkerLink(address, hello, policy="spill", outbox=outbox)
    link.start()
    for step in range(count):
        if step == 3:
            assert link.wait_welcome(20)
            eventually(lambda: link.counters["unacked_frames"] == 0 and link.counters["queued_bytes"] == 0)
            print("go", flush=True)
            eventually(lambda: not link.connected)
        elif step == 0:
            assert link.wait_welcome(20)
        frame = make_frame([("r1", 4, step * 4, 4)], boot=boot, step=step)
        assert link.send(frame.header, frame.payload) is None
    eventually(lambda: outbox._spool.synced_through == count - 3)
    print("spilled", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
