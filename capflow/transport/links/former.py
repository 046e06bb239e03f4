"""The link of a worker that is gone, for what it left on disk."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import msgspec

from capflow import limits
from capflow.capture.frame import Finished, Frame
from capflow.transport.links.link import Link
from capflow.transport.links.worker import empty_header
from capflow.transport.outbox import Outbox, Spilled
from capflow.transport.sockets import Dealer

logger = logging.getLogger("capflow.link")

_SEQ_MAX = 1 << 62  # not below any number of a frame


class FormerLink(Link):
    """Sends what a worker that is gone left on disk, in its name, and ends when the hub has all of it.

    What the worker had in memory went with it. Of that the ends of its requests are sent, by its promises, each with the number of its
    rows: a hub counts those that never came as missing. A request that had no end ends with status `error`, in frames behind all others.

    outbox: opened; its thread closes it at the end.
    """

    def __init__(self, address: str, outbox: Outbox, *, key: str | None = None) -> None:
        hello = msgspec.structs.replace(outbox.hello, former=True)
        super().__init__(address, hello, key=key, seq=_SEQ_MAX)
        self.outbox = outbox
        # The last number that the session was given; from the first one on they are without a gap.
        self._given = 0
        # The last of those that the hub had and may lose; 0 before the first and behind the last.
        self._held = 0
        # Ends of requests that are not sent, by the numbers of their frames; the thread's, as is the next.
        self._ends = deque(outbox.broken.ends)
        lost = [running.lost() for running in outbox.broken.running]
        count = limits.FINISHED_PER_FRAME_MAX
        batches = [tuple(lost[at : at + count]) for at in range(0, len(lost), count)]
        self._ends.extend(enumerate(batches, outbox.broken.seq + 1))
        # Taken from the outbox, and not sent.
        self._spilled: Spilled | None = None
        self._is_outbox_open = True
        # In the outbox, as it was closed.
        self._frames_left = False

    def _fill(self, dealer: Dealer, now: float) -> None:
        session, outbox = self._session, self.outbox
        outbox.acknowledge(session.acked)
        super()._fill(dealer, now)
        if self._drained():
            outbox.acknowledge(_SEQ_MAX)
            outbox.keep_promises()
            self._close_outbox()
            logger.info("what engine %s left on disk was delivered", session.hello.engine)
            self._closing.set()

    def _push(self) -> bool:
        session, outbox = self._session, self.outbox
        assert session.welcome is not None
        while True:
            spilled = self._spilled = self._spilled or outbox.take()
            if spilled is not None and (not self._ends or spilled.seq <= self._ends[0][0]):
                seq, self._spilled = spilled.seq, None
            elif self._ends:
                seq, finished = self._ends.popleft()
                spilled = Spilled(seq, self._ending(seq, finished))
            else:
                return False
            if not self._given:
                session.seq = session.welcome.last_seq or seq - 1
            if seq <= self._given:  # an end that was spilled, and promised
                continue
            self._given = seq
            if seq > session.seq:
                self._hold_through(session.seq)
                self._held = 0
                while session.seq < seq - 1:
                    session.push(empty_header(session.hello), b"")
                session.push_sealed(*spilled)
                return True
            if seq > session.acked:  # the hub had it from the worker itself; it may go with that hub
                self._hold_through(seq - 1)
                session.push_had(*spilled)
                self._held = seq

    def _hold_through(self, last: int) -> None:
        """Have the session hold what is between the frames that it holds, without rows: another hub would refuse a gap."""
        if self._held:
            for seq in range(self._held + 1, last + 1):
                self._session.push_had(seq, self._ending(seq, ()))

    def _ending(self, seq: int, finished: Sequence[Finished]) -> list[object]:
        header = msgspec.structs.replace(empty_header(self._session.hello), seq=seq, finished=tuple(finished))
        return Frame.seal(header, b"").encode()

    def _run(self) -> None:
        super()._run()
        self._close_outbox()

    def _leaves_nothing(self) -> bool:
        return not (self._is_outbox_open or self._frames_left)

    def _close_outbox(self) -> None:
        if self._is_outbox_open:
            self._is_outbox_open = False
            self._frames_left = not self.outbox.close()

    def _drained(self) -> bool:
        return not (self.outbox.waiting or self._spilled or self._ends or self._session.unacked)
