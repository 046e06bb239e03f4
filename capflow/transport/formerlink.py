"""The link of a worker that is gone, for what it left on disk."""

from __future__ import annotations

import logging

import msgspec

from capflow.transport.link import Link
from capflow.transport.outbox import Outbox
from capflow.transport.sockets import Dealer
from capflow.transport.workerlink import empty_header

logger = logging.getLogger("capflow.link")

_SEQ_MAX = 1 << 62  # not below any number of a frame


class FormerLink(Link):
    """Sends what a worker that is gone left on disk, in its name, and ends when the hub has all of it.

    What the worker had in memory went with it; the hub counts it as missing. outbox: opened; its thread closes it at the end.
    """

    def __init__(self, address: str, outbox: Outbox, *, key: str | None = None) -> None:
        hello = msgspec.structs.replace(outbox.hello, former=True)
        super().__init__(address, hello, key=key, seq=_SEQ_MAX)
        self.outbox = outbox
        self._begun = False  # set with the first frame, from which on numbers are without a gap

    def _fill(self, dealer: Dealer, now: float) -> None:
        session, outbox = self._session, self.outbox
        outbox.acknowledge(session.acked)
        super()._fill(dealer, now)
        if not outbox.waiting and not session.unacked:
            outbox.acknowledge(_SEQ_MAX)
            logger.info("what engine %s left on disk was delivered", session.hello.engine)
            self._closing.set()

    def _push(self) -> bool:
        session, outbox = self._session, self.outbox
        assert session.welcome is not None
        while (spilled := outbox.take()) is not None:
            if not self._begun:
                session.seq = session.welcome.last_seq or spilled.seq - 1
                self._begun = True
            if spilled.seq > session.seq:
                while session.seq < spilled.seq - 1:
                    session.push(empty_header(session.hello), b"")
                session.push_sealed(*spilled)
                return True
            outbox.acknowledge(spilled.seq)  # the hub had it from the worker itself
        return False

    def _run(self) -> None:
        super()._run()
        self.outbox.close()

    def _drained(self) -> bool:
        return not self.outbox.waiting and not self._session.unacked
