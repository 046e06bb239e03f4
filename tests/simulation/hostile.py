"""Peers whose messages are well-formed but break the protocol: too many, too large, contradictory or out of turn."""

from __future__ import annotations

import numpy as np

from capflow import limits
from capflow.capture.frame import Block, Dropped, Finished, Frame, FrameHeader, Gap, Rank, RequestRows, Span
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.protocol import message
from capflow.protocol.message import Ack, Await, Beat, Bye, Hello, Status, WatchRequest
from capflow.protocol.session import decode
from capflow.transport.sockets import Event
from tests.simulation.engine import ADDRESS, model_of
from tests.simulation.network import Dealer

WAYS = (
    "many_requests",
    "hoard",
    "overlapping",
    "other_width",
    "unfit_capture",
    "hellos",
    "awaits",
    "gaps",
    "numbers",
    "overdraft",
    "garbage",
    "tap",
    "unfinished",
)


class Hostile:
    """One peer, which has one way. It reads what it is sent, or does not."""

    def __init__(self, world, network, oracle, process, number, way):
        self.world, self.network, self.oracle, self.process = world, network, oracle, process
        self.name, self.way = f"x{number}", way
        self.boot = f"x{world.choose.getrandbits(32):08x}"
        self.model = model_of(2, 8, 1)
        self.seq = 0
        self.acked = 0
        self.dealer = None
        self.ended = False

    def main(self):
        """Say what it has to say, a few times, on one connection after another."""
        choose = self.world.choose
        for _ in range(choose.randrange(1, 4)):
            self.dealer = Dealer(self.network, ADDRESS)
            self.dealer.reads = choose.random() < 0.5
            if self._await_connection():
                getattr(self, self.way)()
                if choose.random() < 0.3:
                    self._say(Bye())
            self.world.sleep(choose.choice([0.01, 1.0, 11.0]))
            self.dealer.close()
        self.ended = True

    def _await_connection(self):
        until = self.world.now + 5.0
        while self.world.now < until:
            self.dealer.poll(1.0)
            if Event.CONNECTED in self.dealer.events():
                return True
        return False

    # Sending.

    def _say(self, content):
        self.dealer.send([message.encode(content)])
        self._read()

    def _read(self):
        while self.dealer.reads and (parts := self.dealer.receive()) is not None:
            content = decode(parts, message.decode_from_hub)
            if isinstance(content, Ack):
                self.acked = content.seq

    def _hello(self, role="worker", name=None):
        self._say(Hello(role, name or self.name, self.boot, Rank(0, 0, 0), None if role == "client" else self.model))
        self.world.sleep(0.01)
        self._read()

    def _frame(self, requests=(), blocks=(), *, finished=(), hidden=8, seq=None, rows=None):
        self.seq = self.seq + 1 if seq is None else seq
        if rows is None:
            rows = sum(len(block.sites) * block.rows for block in blocks)
        header = FrameHeader(
            engine=self.name,
            boot=self.boot,
            rank=Rank(0, 0, 0),
            seq=self.seq,
            step=self.seq,
            time_ns=0,
            dtype="float32",
            hidden_size=hidden,
            requests=tuple(requests),
            blocks=tuple(blocks),
            finished=tuple(finished),
        )
        self.dealer.send(Frame.seal(header, np.zeros(rows * hidden * 4, np.uint8)).encode())
        self._read()
        self.world.sleep(self.world.choose.choice([0.0, 0.01]))

    def _request(self, name, length, capture=None):
        return RequestRows(f"{self.boot}-{name}", length, 0, (0,) * length, capture=capture)

    def _rows(self, count=1, name="r", **options):
        site = Site(0, "post_block")
        self._frame([self._request(name, count)], [Block((site,), count, (Span(0, 0, count, 0),))], **options)

    # The ways.

    def many_requests(self):
        """Open as many requests as a hub bears, or more, and keep them."""
        self._hello()
        site = Site(0, "post_block")
        for turn in range(self.world.choose.choice([1, 4, 14])):
            named = [self._request(f"{turn}.{number}", 1) for number in range(100)]
            spans = tuple(Span(number, 0, 1, number) for number in range(100))
            self._frame(named, [Block((site,), 100, spans)])
        for _ in range(3):
            self._say(Beat())
            self.world.sleep(1.0)

    def hoard(self):
        """Fill the hub's memory within its credit: one of two stages ends requests with gaps, then opens more."""
        self.model, self.dealer.reads = model_of(2, 8, 2), True
        self._hello()
        until = self.world.now + 30.0
        for number, count in enumerate([limits.GAPS_MAX] * 8 + [limits.GAPS_MAX // 8] * 8):
            gaps = tuple(Gap(("post_block:0",), at, at + 1) for at in range(0, 2 * count, 2))
            dropped = tuple(Dropped(count, f"reason {reason}", gaps) for reason in range(2))
            self._frame(finished=[Finished(f"{self.boot}-{self.seq}.{number}", "stop", 4, 4, 0, dropped)])
            self._await_ack(until)
        site, named = Site(0, "post_block"), [self._request(f"{self.seq}.{number}", 1) for number in range(100)]
        self._frame(named, [Block((site,), 100, tuple(Span(number, 0, 1, number) for number in range(100)))])
        for _ in range(self.world.choose.choice([3, 30])):
            self._say(Beat())
            self.world.sleep(1.0)

    def _await_ack(self, until):
        """Wait until the hub has handled everything."""
        while self.acked < self.seq and self.dealer.router is not None and self.world.now < until:
            self.dealer.events()
            self.dealer.poll(1.0)
            self._read()

    def overlapping(self):
        """Say that every span is the same rows."""
        self._hello()
        times = self.world.choose.choice([2, 200])
        self._frame([self._request("r", 8)], [Block(self.model.sites, 8, (Span(0, 0, 8, 0),) * times)])

    def other_width(self):
        """Send rows of another width than the model's."""
        self._hello()
        self._rows(4)
        self._rows(4, name="s", hidden=self.world.choose.choice([4, 16, 24]))

    def unfit_capture(self):
        """Bring specs of sites that the model does not have."""
        for _ in range(self.world.choose.randrange(1, 5)):
            self._hello()
            capture = CaptureSpec({"post_block": [900]})
            site = Site(0, "post_block")
            self._frame([self._request("r", 4, capture)], [Block((site,), 4, (Span(0, 0, 4, 0),))])

    def hellos(self):
        """Be many engines, one after another."""
        for number in range(self.world.choose.randrange(1, 40)):
            self._hello(name=f"{self.name}-{number}")

    def awaits(self):
        """Wait for more requests than there will ever be, and for those of others."""
        self._hello("client")
        others = [sent.id for sent in self.oracle.sent.values()]
        for turn in range(self.world.choose.randrange(1, 6)):
            self._say(Await((*(f"none-{turn}.{number}" for number in range(300)), *others)))
            self._say(Status())

    def gaps(self):
        """Tell of losses without end."""
        self._hello()
        self._rows(4)
        gaps = tuple(Gap(("post_block:0",), at, at + 1) for at in range(0, 2 * limits.GAPS_MAX, 2))
        dropped = tuple(Dropped(2**40, f"reason {number}", gaps) for number in range(2))
        self._frame(finished=[Finished(f"{self.boot}-r", "stop", 4, 4, 2**40, dropped)])

    def numbers(self):
        """Number frames as it likes."""
        self._hello()
        for _ in range(5):
            self._rows(2, seq=self.world.choose.choice([0, 1, self.seq, self.seq + 1, self.seq + 5, 2**39]))

    def overdraft(self):
        """Send without credit."""
        self._hello()
        for _ in range(6):
            self._rows(self.world.choose.choice([1, 200]))

    def garbage(self):
        """Say nothing."""
        for _ in range(self.world.choose.choice([1, 3, limits.OFFENCES_MAX + 1])):
            self.dealer.send([self.world.choose.randbytes(self.world.choose.randrange(1, 40)) for _ in range(2)])

    def tap(self):
        """Ask for every frame, and read none."""
        self._hello("client")
        self._say(WatchRequest(2**40))
        self.world.sleep(1.0)

    def unfinished(self):
        """Open a request, beat for a while and leave it."""
        self._hello()
        self._rows(4)
        for _ in range(5):
            self._say(Beat())
            self.world.sleep(1.0)
