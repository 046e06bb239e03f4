"""A process that fills and empties a spool, prints its promises, and kills itself at a named point.

Run as `spool.py DIRECTORY POINT AFTER SEED`. Its lines: `append NUMBER TOKEN` before a record is appended, `durable
NUMBER` and `done NUMBER` once that was promised.
"""

import os
import random
import signal
import sys

from capflow.buffers.spool import Files, FullError, Record, Spool

POINTS = ("after-write", "before-fsync", "before-cursor", "before-unlink", "during-rotation")


def body_of(token):
    return random.Random(token).randbytes(1 + int(token, 16) % 20_000)


class Killed(Files):
    """Kills the process when it has passed a point so many times."""

    def __init__(self, point, after):
        self.point, self.after = point, after
        # The descriptor of the cursor.
        self.cursor = None

    def reach(self, point):
        if point == self.point:
            self.after -= 1
            if self.after < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def change(self, path):
        fd = super().change(path)
        if path.name == "cursor":
            self.cursor = fd
        return fd

    def create(self, path):
        fd = super().create(path)
        self.reach("during-rotation")
        return fd

    def write(self, fd, parts, offset):
        if fd == self.cursor:
            self.reach("before-cursor")
        super().write(fd, parts, offset)
        if fd != self.cursor:
            self.reach("after-write")

    def fdatasync(self, fd):
        if fd != self.cursor:
            self.reach("before-fsync")
        super().fdatasync(fd)

    def unlink(self, path):
        self.reach("before-unlink")
        super().unlink(path)


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main():
    directory, point, after, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    choose = random.Random(seed)
    spool = Spool(
        directory,
        bytes_max=600_000,
        segment_bytes=60_000,
        unsynced_bytes_max=100_000,
        on_synced=lambda number: say("durable", number),
        files=Killed(point, after),
    )
    spool.open()
    done = 0
    while True:
        token = f"{choose.getrandbits(64):016x}"
        say("append", spool.last + 1, token)
        try:
            spool.append(token.encode(), body_of(token))
        except FullError:
            spool.wait_acknowledged(spool.acknowledged_through + 1, 0.05)
        if len(spool) > choose.randrange(5, 40):
            for _ in range(choose.randrange(10)):
                record = spool.read()
                if record is None:
                    break
                assert isinstance(record, Record), record
                spool.acknowledge(record.id)
        if spool.acknowledged_through > done:
            done = spool.acknowledged_through
            say("done", done)


if __name__ == "__main__":
    main()
