"""The link that sends the frames that an ended worker left on disk."""

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

_SEQ_MAX = 1 << 62  # above the number of every frame


class FormerLink(Link):
    """Sends the frames that an ended worker left on disk, in the worker's name, and ends when the hub has all of them.

    The frames in the worker's memory are lost. From the worker's promises this link sends the ends of their requests,
    each with its number of rows: the hub counts the rows that never came as missing. A request without an end ends with
    status `error`, in frames after all others.

    outbox: an open outbox; the link's thread closes it.
    """

    def __init__(self, address: str, outbox: Outbox, *, key: str | None = None) -> None:
        hello = msgspec.structs.replace(outbox.hello, former=True)
        super().__init__(address, hello, key=key, seq=_SEQ_MAX)
        self.outbox = outbox
        # The last number given to the session; there are no gaps after the first.
        self._given = 0
        # The last frame that the hub has and may still lose; 0 if there is none.
        self._held = 0
        # Ends of requests to be sent, by the numbers of their frames. Used by the thread alone.
        self._ends = deque(outbox.broken.ends)
        lost = [running.lost() for running in outbox.broken.running]
        count = limits.FINISHED_PER_FRAME_MAX
        batches = [tuple(lost[at : at + count]) for at in range(0, len(lost), count)]
        self._ends.extend(enumerate(batches, outbox.broken.seq + 1))
        # Taken from the outbox and not sent. Used by the thread alone.
        self._spilled: Spilled | None = None
        self._is_outbox_open = True
        # Whether frames were left in the outbox when it was closed.
        self._frames_left = False

    def _fill(self, dealer: Dealer, now: float) -> None:
        session, outbox = self._session, self.outbox
        outbox.acknowledge(session.acked)
        super()._fill(dealer, now)
        if self._drained():
            outbox.acknowledge(_SEQ_MAX)
            outbox.keep_promises()
            self._close_outbox()
            logger.info("the frames that engine %s left on disk are delivered", session.hello.engine)
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
            if seq <= self._given:  # an end that was both spilled and promised
                continue
            self._given = seq
            if seq > session.seq:
                self._hold_through(session.seq)
                self._held = 0
                while session.seq < seq - 1:
                    session.push(empty_header(session.hello), b"")
                session.push_sealed(*spilled)
                return True
            if seq > session.acked:  # the hub has it from the worker itself, and may lose it
                self._hold_through(seq - 1)
                session.push_had(*spilled)
                self._held = seq

    def _hold_through(self, last: int) -> None:
        """Fill the gaps between held frames with frames without rows: another hub would refuse a gap."""
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
            self._frames_left = not self.outbox.close(self._session.acked)

    def _drained(self) -> bool:
        return not (self.outbox.waiting or self._spilled or self._ends or self._session.unacked)
