"""A tap's link to the hub that sends it copies of the frames that it takes."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from capflow import limits
from capflow.capture.frame import Frame
from capflow.protocol.message import Hello, Message, Watched, WatchRequest, Welcome
from capflow.protocol.session import State
from capflow.transport.links.link import Link
from capflow.transport.sockets import Dealer


class TapLink(Link):
    """Takes frames as fast as `on_frame` does; the hub sends no more than `limits.TAP_BYTES_MAX` ahead, and leaves the rest out.

    on_frame, on_tapped and on_lost (when the connection is lost) are called on the link's thread.
    """

    message_bytes_max = limits.PAYLOAD_BYTES_MAX

    def __init__(
        self,
        address: str,
        *,
        on_frame: Callable[[Frame], None],
        on_tapped: Callable[[Watched], None],
        on_lost: Callable[[], None],
        key: str | None = None,
    ) -> None:
        super().__init__(address, Hello("client", "", uuid.uuid4().hex), key=key)
        self._on_frame = on_frame
        self._on_tapped = on_tapped
        self._on_lost = on_lost
        # What the hub is to be told of; the thread's.
        self._taken_bytes = 0

    def _fill(self, dealer: Dealer, now: float) -> None:
        if self._taken_bytes and self._session.state is State.OPEN:
            dealer.send(self._session.send(WatchRequest(self._taken_bytes), now))
            self._taken_bytes = 0

    def _received(self, said: Frame | Message) -> None:
        match said:
            case Welcome():
                self._taken_bytes = limits.TAP_BYTES_MAX
            case Watched():
                self._on_tapped(said)
            case Frame():
                self._on_frame(said)
                self._taken_bytes += self._said_bytes

    def _lost(self, why: str) -> None:
        super()._lost(why)
        self._on_lost()
