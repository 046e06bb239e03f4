"""The engine side of `tests.chaos`: a worker that sends frames over a real link, and logs each frame before sending it.

Run as `engine.py ADDRESS SPOOL LOG ENGINE RATE SEED HIDDEN LENGTH_MAX`; SIGTERM ends it cleanly. It sends RATE frames a
second, and none while `WAITING_MAX` frames wait on disk or the file LOG.hold exists. So on a machine that cannot keep
up with the rate, it sends as fast as the machine can. Its lines in the log, each written whole:

    send ENGINE SEQ TIME ID:PROMPT:START:LENGTH,… ID:COMPUTED:STATUS,…   a frame is about to be sent: its rows and ends
    refused ENGINE SEQ REASON         the frame was refused; the next frame gets its number
    acked ENGINE SEQ TIME             the hub acknowledged every frame up to this one
    spilled ENGINE SEQ                a frame that a former worker left on disk
    left ENGINE SEQ TIME              the hub acknowledged every such frame up to this one
    ended ENGINE TIME                 the worker ended cleanly, and all its frames are acknowledged
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import numpy as np

from capflow import limits
from capflow.capture.frame import Block, Dropped, Finished, FrameHeader, Rank, RequestRows, Span
from capflow.protocol.message import Hello
from capflow.transport.links.former import FormerLink
from capflow.transport.links.worker import WorkerLink
from capflow.transport.outbox import Outbox, left_behind
from tests.chaos.rows import SITES, hashes, model_of, seed_of, token_of, write_rows

OPEN = 16  # requests that run at the same time
POSITIONS = 2  # positions in a frame: with both sites 64 KiB
WAITING_MAX = 2000  # frames, 125 MiB
ACKED_S = 0.005  # the interval at which acknowledgements are read
RANK = Rank(0, 0, 0)


class Log:
    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(self, *words: object) -> None:
        os.write(self.fd, (" ".join(map(str, words)) + "\n").encode())


class Request:
    def __init__(self, name: str, choose: random.Random, length_max: int) -> None:
        self.id = name
        self.seed = seed_of(name)
        self.prompt_length = choose.randrange(2, 17)
        self.length = self.prompt_length + choose.randrange(1, length_max)
        self.hashes = [hashes(self.seed, site, 0, self.length) for site in range(len(SITES))]
        self.next = 0
        # The rows sent.
        self.rows = 0
        self.dropped: Counter[str] = Counter()

    def part(self, start: int, length: int) -> RequestRows:
        tokens = tuple(token_of(self.seed, position) for position in range(start, start + length))
        return RequestRows(self.id, self.prompt_length, start, tokens)

    def finished(self, status: str, more: int = 0) -> Finished:
        dropped = tuple(Dropped(rows, reason) for reason, rows in self.dropped.items())
        return Finished(self.id, status, self.prompt_length, self.next, self.rows + more, dropped)


class Engine:
    """Makes frames of requests that overlap, and sends them as a worker does."""

    def __init__(self, link: WorkerLink, log: Log, hello: Hello, choose: random.Random, length_max: int) -> None:
        self.link, self.log, self.hello, self.choose = link, log, hello, choose
        self.length_max = length_max
        self.made = 0
        self.seq = 0
        self.step = 0
        self.running = [self.request() for _ in range(OPEN)]

    def request(self) -> Request:
        self.made += 1
        return Request(f"{self.hello.engine}-{self.made}", self.choose, self.length_max)

    def turn(self) -> None:
        """Send a step: two tokens of one request, or one each of two; a request at its length ends in it or later."""
        if self.choose.random() < 0.5:
            picked = [(self.choose.choice(self.running), POSITIONS)]
        else:
            picked = [(request, 1) for request in self.choose.sample(self.running, POSITIONS)]
        parts = [(request, request.next, min(length, request.length - request.next)) for request, length in picked]
        for request, start, length in parts:
            request.next = start + length
        over = [request for request, _, _ in parts if request.next == request.length]
        late = over if self.choose.random() < 0.3 else []
        self.send(parts, [] if late else over, "stop")
        if late:
            self.send([], late, "length")
        for request in over:
            self.running[self.running.index(request)] = self.request()

    def send(self, parts: list[tuple[Request, int, int]], over: list[Request], status: str) -> None:
        self.step += 1
        total = sum(length for _, _, length in parts)
        model = self.hello.model
        assert model is not None
        rows = np.empty((len(SITES), total, model.hidden_size), np.float32)
        spans, row = [], 0
        for index, (request, start, length) in enumerate(parts):
            for site in range(len(SITES)):
                write_rows(rows[site, row : row + length], request.hashes[site][start : start + length])
            spans.append(Span(index, start, length, row))
            row += length
        counts = {request: len(SITES) * length for request, _, length in parts}
        ends = tuple(request.finished(status, counts.get(request, 0)) for request in over)
        header = FrameHeader(
            engine=self.hello.engine,
            boot=self.hello.boot,
            rank=RANK,
            seq=0,
            step=self.step,
            time_ns=time.time_ns(),
            dtype=model.dtype,
            hidden_size=model.hidden_size,
            requests=tuple(request.part(start, length) for request, start, length in parts),
            blocks=(Block(SITES, total, tuple(spans)),) if parts else (),
            finished=ends,
            step_tokens=total,
            step_requests=len(parts),
        )
        sent = ",".join(f"{r.id}:{r.prompt_length}:{start}:{length}" for r, start, length in parts)
        ended = ",".join(f"{end.id}:{end.computed_length}:{end.status}" for end in ends)
        engine, seq = self.hello.engine, self.seq + 1
        self.log.say("send", engine, seq, f"{time.monotonic():.6f}", sent or "-", ended or "-")
        reason = self.link.send(header, rows.reshape(-1).view(np.uint8) if parts else b"")
        if reason is None:
            self.seq = seq
            for request, n in counts.items():
                request.rows += n
            return
        self.log.say("refused", engine, seq, reason)
        for request, n in counts.items():
            request.dropped[reason] += n
        if over and parts:
            self.send([], over, status)


def watch(log: Log, link: WorkerLink, former: list[FormerLink], ended: threading.Event) -> None:
    """Log acknowledgements as they arrive."""
    logged: dict[object, int] = {}
    last = False
    while not last:
        last = ended.wait(ACKED_S)
        for event, each in [("acked", link), *(("left", each) for each in former)]:
            acked = each._session.acked
            if acked > logged.get(each, 0):
                logged[each] = acked
                log.say(event, each._session.hello.engine, acked, f"{time.monotonic():.6f}")


def noted(outbox: Outbox, log: Log) -> Outbox:
    """Make the outbox of a former worker log its frames."""
    take = outbox.take

    def taking():
        spilled = take()
        if spilled is not None:
            log.say("spilled", outbox.hello.engine, spilled.seq)
        return spilled

    outbox.take = taking
    return outbox


def main() -> None:
    address, spool, path, engine, rate, seed, hidden, length_max = sys.argv[1:9]
    log, root, hold = Log(path), Path(spool), Path(f"{path}.hold")
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    # As a worker does: what earlier ones left first, then its own link.
    former = [FormerLink(address, noted(outbox, log)) for outbox in left_behind(root)]
    for one in former:
        one.start()
    hello = Hello("worker", engine, uuid.uuid4().hex, RANK, model_of(int(hidden)))
    outbox = Outbox.of(root, hello, limits.SPOOL_BYTES_DEFAULT)
    link = WorkerLink(address, hello, policy="spill", outbox=outbox)
    link.start()
    ended = threading.Event()
    watcher = threading.Thread(target=watch, args=(log, link, former, ended))
    watcher.start()
    while not link.ever_connected and not stopped.wait(0.005):
        pass
    sender = Engine(link, log, hello, random.Random(seed), int(length_max))
    begun, sent = time.monotonic(), 0
    while not stopped.is_set():
        due = int((time.monotonic() - begun) * float(rate))
        if hold.exists() or due - sent > float(rate):  # held up: it does not run after what it missed
            sent = due
        while sent < due and outbox.waiting < WAITING_MAX and not stopped.is_set():
            sender.turn()
            sent += 1
        stopped.wait(0.001)
    for request in sender.running:
        sender.send([], [request], "abort")
    link.close(60)
    for one in former:
        one._thread.join(60)
    ended.set()
    watcher.join()
    left = link.counters["unacked_frames"] + len(link._queue) + outbox.unacknowledged
    assert not left, f"{left} frames were not acknowledged"
    log.say("ended", engine, f"{time.monotonic():.6f}")


if __name__ == "__main__":
    main()
