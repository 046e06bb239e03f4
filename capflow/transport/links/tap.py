"""The link of a process that watches a hub: it receives copies of the hub's frames."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from capflow import limits
from capflow.capture.frame import Frame
from capflow.protocol.message import Hello, Message, Watched, WatchedEvent, WatchRequest, Welcome
from capflow.protocol.session import State
from capflow.steering.action import Answered
from capflow.transport.links.link import Link
from capflow.transport.sockets import Dealer


class TapLink(Link):
    """Receives frames as fast as `on_frame` handles them.

    The hub sends at most `limits.TAP_BYTES_MAX` ahead and skips the other frames. The callbacks run on the link's
    thread.

    on_frame: called with each frame.
    on_tapped: called with each `Watched` message.
    on_event: called with the answer to each action.
    on_lost: called when the connection is lost.
    """

    message_bytes_max = limits.PAYLOAD_BYTES_MAX

    def __init__(
        self,
        address: str,
        *,
        on_frame: Callable[[Frame], None],
        on_tapped: Callable[[Watched], None],
        on_event: Callable[[Answered], None],
        on_lost: Callable[[], None],
        key: str | None = None,
    ) -> None:
        super().__init__(address, Hello("client", "", uuid.uuid4().hex), key=key)
        self._on_frame = on_frame
        self._on_tapped = on_tapped
        self._on_event = on_event
        self._on_lost = on_lost
        # Handled bytes that the hub does not know of yet; used by the thread alone.
        self._taken_bytes = 0

    def _fill(self, dealer: Dealer, now: float) -> None:
        if self._taken_bytes and self._session.state is State.OPEN:
            dealer.send(self._session.send(WatchRequest(self._taken_bytes, events=True), now))
            self._taken_bytes = 0

    def _received(self, message: Frame | Message) -> None:
        match message:
            case Welcome():
                self._taken_bytes = limits.TAP_BYTES_MAX
            case Watched():
                self._on_tapped(message)
            case Frame():
                self._on_frame(message)
                self._taken_bytes += self._message_bytes
            case WatchedEvent(answered):
                self._on_event(answered)
                self._taken_bytes += self._message_bytes

    def _lost(self, why: str) -> None:
        super()._lost(why)
        self._on_lost()
