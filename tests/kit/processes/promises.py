"""A worker that sends requests over a real link until it is killed: `promises_child.py ADDRESS ROOT COUNT POLICY`.

It writes a line `REQUEST ROWS` for each frame that the link took, before the next one.
"""

import sys
from pathlib import Path

from capflow import limits
from capflow.transport.links.worker import WorkerLink
from capflow.transport.outbox import Outbox
from tests.kit.frames import make_finished, make_frame, make_hello, make_model

SITE = (0, "post_block")
STEPS = 5  # of a request
HIDDEN = 64


def main():
    address, root, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    hello = make_hello(boot="killed", model=make_model(1, HIDDEN))
    link = WorkerLink(
        address, hello, policy=sys.argv[4], outbox=Outbox.of(root, hello, limits.SPOOL_BYTES_DEFAULT, address)
    )
    link.start()
    assert link.wait_welcome(20)
    for number in range(count):
        for step in range(STEPS):
            ends = [make_finished(f"r{number}", 4, 4 * STEPS, rows=4 * STEPS)] if step == STEPS - 1 else []
            if ends and number % 7 == 6:
                ends = []  # it goes on
            parts = [(f"r{number}", 4, 4 * step, 4)]
            frame = make_frame(parts, [SITE], hidden=HIDDEN, boot="killed", step=number, finished=ends)
            assert link.send(frame.header, frame.payload) is None
            print(f"r{number} 4", flush=True)
        if number == 3:  # these the hub has
            while link.counters["unacked_frames"] or link.counters["queued_frames"]:
                pass
            print("go", flush=True)
            sys.stdin.readline()
    print("sent", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
