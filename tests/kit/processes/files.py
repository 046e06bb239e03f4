"""A filesystem consumer that gets the same requests in every life, and kills itself at a chosen call to the disk.

Run as `files.py ROOT CALL OPTIONS`: OPTIONS is JSON. CALL numbers the calls that change the disk, from 1; 0 is never.
`rename:1` numbers the calls of one name. If the call is a write, it writes only half. Prints each acknowledged request.
"""

import json
import os
import signal
import sys

from tests.kit.frames import make_frame
from tests.kit.stored import SITES, done, opened

REQUESTS = 12


def rows_of(number):
    """Return how many rows a site of a request has."""
    return 3 + number * 7 % 20


def dying(at, only=""):
    """Make the call number `at` of those that change the disk, or of those named `only`, the last."""
    calls = 0

    def wrap(name, half):
        call = getattr(os, name)

        def counted(*args, **more):
            nonlocal calls
            calls += only in ("", name)
            if calls == at and only in ("", name):
                half(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)

        setattr(os, name, counted)

    pwrite = os.pwrite
    wrap("pwritev", lambda fd, parts, offset: pwrite(fd, b"".join(parts)[: sum(map(len, parts)) // 2], offset))
    for name in ("fsync", "fdatasync", "rename", "unlink", "ftruncate", "mkdir"):
        wrap(name, lambda *_: None)


def main():
    root, call, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    only, _, at = call.rpartition(":")
    dying(int(at), only)
    consumer = opened(root, SITES, **{"fsync": True, "on_collision": "suffix", **options})
    for number in range(REQUESTS):
        rows = rows_of(number)
        request = make_frame([(f"r{number}", 2, 0, rows)], SITES, hidden=1024, seq=number + 1, boot="b")
        consumer.on_frame(request)
        result = consumer.on_request_done(done(f"r{number}", 2, rows, rows=3 * rows))
        assert result.status == "ok", result
        print(f"r{number}", flush=True)
    consumer.close()
    print("end", flush=True)


if __name__ == "__main__":
    main()
