"""What a hub remembers of what peers say: at most `limits.STATE_PER_BYTE_MAX` bytes for each byte on the wire, whatever
the message.

Each kind of message is sent many times, with as much that differs as it can hold.
"""

from __future__ import annotations

import gc
import itertools
import logging
import tracemalloc

import msgspec
import pytest

from capflow import limits
from capflow.capture.frame import Block, Dropped, Finished, Frame, FrameHeader, Gap, Rank, RequestRows, Span
from capflow.capture.model import ModelInfo
from capflow.capture.site import STREAM_HOOKS, Site
from capflow.capture.spec import CaptureByConsumer, CaptureSpec
from capflow.protocol import message
from capflow.protocol.message import Act, Await, Beat, Bye, Hello, Refused, WorkerCounts
from capflow.steering.action import Abort
from tests.kit.exchanges import Desk
from tests.kit.frames import make_hello, make_model
from tests.kit.hubs import Recorder

FIXED_BYTES = 96 * limits.KIB  # that any state may take besides
NAMES = [f"{number:x}" for number in range(10_000)]
EVERY = CaptureSpec({"post_block": "all"})
FIRST_SITE = (Site(0, "mlp_in"),)
DEEP = make_model(limits.LAYERS_MAX, hidden=1)


def batched(things, count):
    things = iter(things)
    while batch := tuple(itertools.islice(things, count)):
        yield batch


def rows(name, **fields):
    return RequestRows(name, 1, 0, (1,), **fields)


def end(name, **fields):
    return Finished(name, "", 0, 0, 9, **fields)


def framed(batches, *, ends=False):
    """Yield a frame for each batch of requests, or of their ends."""
    for number, batch in enumerate(batches, 1):
        yield frame(number, **{"finished" if ends else "requests": batch})


def frame(number, *, requests=(), finished=(), sites=FIRST_SITE):
    """Return a frame of a worker; of each request one row at each site."""
    spans = tuple(Span(index, 0, 1, index) for index in range(len(requests)))
    blocks = (Block(sites, len(spans), spans),) if spans else ()
    payload = bytes(4 * len(sites) * len(spans))
    header = FrameHeader(
        engine="e",
        boot="b",
        rank=Rank(0, 0, 0),
        seq=number,
        step=number,
        time_ns=0,
        dtype="float32",
        hidden_size=1,
        requests=requests,
        finished=finished,
        blocks=blocks,
    )
    return b"w", Frame.seal(header, payload)


def open_requests():
    return framed(batched(map(rows, NAMES), 500))


def bare_open_requests():
    """Yield frames of requests with nothing that may be left out."""
    for number, names in enumerate(batched(NAMES, 500), 1):
        whole, payload = frame(number, requests=tuple(map(rows, names)))[1].encode()
        header = msgspec.msgpack.decode(whole)
        header["requests"] = [{"id": name, "prompt_length": 1, "start": 0, "token_ids": [1]} for name in names]
        yield b"w", [msgspec.msgpack.encode(header), payload]


def ended_requests():
    return framed(
        batched((end(name, capture=EVERY) for name in NAMES[:3000]), limits.FINISHED_PER_FRAME_MAX), ends=True
    )


def spec_of_many_layers():
    specs = (CaptureSpec({"post_block": ["0-1023:1"]}, max_rows=number) for number in range(1, 500))
    return framed(batched((rows(name, capture=spec) for name, spec in zip(NAMES, specs, strict=False)), 100))


def spec_of_all_hooks():
    specs = (CaptureSpec(dict.fromkeys(STREAM_HOOKS, "all"), max_rows=number) for number in range(1, 500))
    return framed(batched((rows(name, capture=spec) for name, spec in zip(NAMES, specs, strict=False)), 100))


def spec_of_many_positions():
    specs = (CaptureSpec({"mlp_in": [0]}, [*range(number % 2, 2046, 2), 3000 + number]) for number in range(100))
    return framed(batched((rows(name, capture=spec) for name, spec in zip(NAMES, specs, strict=False)), 10))


def spec_of_many_windows():
    windows = [{"last": count} for count in range(1, 1000)]
    specs = (CaptureSpec({"mlp_in": [0]}, [*windows, {"last": 2000 + number}]) for number in range(100))
    return framed(batched((rows(name, capture=spec) for name, spec in zip(NAMES, specs, strict=False)), 10))


def spec_by_consumer():
    each = dict.fromkeys(NAMES[: limits.CONSUMERS_NAMED_MAX], EVERY)
    return framed(batched((rows(name, capture=CaptureByConsumer(each)) for name in NAMES[:400]), 20))


def gaps():
    gaps = tuple(Gap((f"mlp_in:{layer}",), layer, layer + 1) for layer in range(limits.GAPS_MAX))
    dropped = tuple(Dropped(9, f"r{number}", gaps) for number in range(limits.DROPPED_REASONS_MAX))
    return framed(batched((end(name, capture=EVERY, dropped=dropped) for name in NAMES[:2]), 1), ends=True)


def gaps_of_many_sites():
    wide = [tuple(f"mlp_in:{layer}" for layer in range(first, 1000)) for first in range(10)]
    dropped = tuple(Dropped(9, f"r{n}", tuple(Gap(sites, n, n + 1) for sites in wide)) for n in range(4))
    return framed(batched((end(name, capture=EVERY, dropped=dropped) for name in NAMES[:6]), 2), ends=True)


def blocks_of_many_shapes():
    request = RequestRows("r", 1, 0, (1,), capture=EVERY)
    for number in range(100):
        sites = tuple(Site(layer, "post_block") for layer in range(number, 1000))
        yield frame(number + 1, requests=(request,), sites=sites)


def awaits():
    return ((b"c", Await(batch)) for batch in batched(NAMES, 5000))


def actions():
    yield b"s", make_hello("e", "s", role="scheduler", model=DEEP)
    yield from ((b"c", Act("", Abort(""))) for _ in range(2000))


def beats():
    troubles = tuple(f"{name}" * 100 for name in NAMES[:60])
    yield from ((b"w", Beat(WorkerCounts(dropped_rows={name: 1}), troubles)) for name in NAMES[:100])


def hellos(role):
    model = None if role == "client" else ModelInfo("", 1, 1, "float32", (Site(0, "post_block"),))
    return [(b"%d" % number, Hello(role, NAMES[number], "b", model=model)) for number in range(1000)]


def hellos_of_refused():
    model = ModelInfo("x" * 200, 1, 1, "float64", ())
    return [
        (b"%d" % number, Hello("worker", name + "x" * 400, "b" * 400, model=model))
        for number, name in enumerate(NAMES[:2000])
    ]


KINDS = {
    "hello of a worker": lambda: hellos("worker"),
    "hello of a scheduler": lambda: hellos("scheduler"),
    "hello of a client": lambda: hellos("client"),
    "hello of one that is refused": hellos_of_refused,
    "open requests": open_requests,
    "open requests of few fields": bare_open_requests,
    "ends of requests": ended_requests,
    "specs of many layers": spec_of_many_layers,
    "specs of all hooks": spec_of_all_hooks,
    "specs of many positions": spec_of_many_positions,
    "specs of many windows": spec_of_many_windows,
    "specs by consumer": spec_by_consumer,
    "gaps": gaps,
    "gaps of many sites": gaps_of_many_sites,
    "blocks of many shapes": blocks_of_many_shapes,
    "awaits": awaits,
    "actions": actions,
    "beats": beats,
}


LARGE = ("gaps of many sites", "specs of many windows", "blocks of many shapes")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind in LARGE else ()) for kind in KINDS]
)
def test_is_at_most_so_much_for_each_byte_on_the_wire(kind, caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(limits, "OFFENCES_MAX", 10**9)
    desk = Desk(Quiet("reader", None, reads_requests=True))
    desk.sent = Nobody()
    if not kind.startswith("hello"):
        desk.say(b"w", make_hello("e", "b", model=DEEP))
        desk.say(b"c", Hello("client", "", "c"))
    text = [(peer, parts_of(item)) for peer, item in KINDS[kind]()]
    wire = sum(len(part) for _, parts in text for part in parts)
    gc.collect()
    tracemalloc.start()
    try:
        for peer, parts in text:
            desk.dispatch.receive(peer, parts)
            desk.turn()
            desk.handle_all()
        gc.collect()
        state = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    print(f"{kind}: {wire} bytes on the wire, {state} in memory: {state / wire:.1f} each")
    assert bool(desk.sent.refusal) == (kind == "hello of one that is refused"), desk.sent.refusal
    assert state <= limits.STATE_PER_BYTE_MAX * wire + FIXED_BYTES


def parts_of(text):
    if isinstance(text, list):
        return text
    return text.encode() if isinstance(text, Frame) else [message.encode(text)]


class Quiet(Recorder):
    """Takes everything and keeps nothing."""

    def on_session(self, engine, model):
        pass

    def on_frame(self, frame):
        pass

    def on_request_done(self, done):
        pass


class Nobody(dict):
    """Where messages to peers go that nobody reads; of refusals it keeps the first reason."""

    refusal = ""

    def __missing__(self, peer):
        return self

    def append(self, text):
        if isinstance(text, Refused):
            self.refusal = self.refusal or text.reason


@pytest.mark.long
def test_is_flat_while_engines_clients_and_requests_of_ever_new_names_come_and_go(caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(limits, "RESULTS_KEPT_MAX", 100)
    monkeypatch.setattr(limits, "NOTES_BYTES_MAX", 256 * limits.KIB)
    desk = Desk(Quiet("reader", None, reads_requests=True))
    desk.sent = Nobody()
    model = make_model(8, hidden=1)

    def visit(number):
        """Have an engine come and leave, by Bye or without a word, and a client with it."""
        engine, boot, peer = f"engine {number}", f"boot {number}", b"w%d" % number
        desk.say(peer, make_hello(engine, boot, model=model))
        for seq, ends in ((1, False), (2, True)):
            names = [f"{number}-{each}" for each in range(20)]
            parts = [end(name, capture=EVERY) if ends else rows(name, capture=EVERY) for name in names[ends:]]
            made = frame(seq, **{"finished" if ends else "requests": tuple(parts)})[1]
            header = msgspec.structs.replace(made.header, engine=engine, boot=boot)
            desk.say(peer, Frame(header, made.payload))
        desk.say(b"c%d" % number, Hello("client", "", f"c{number}"))
        desk.say(b"c%d" % number, Await((f"unknown {number}",)))
        for left in (peer, b"c%d" % number):
            desk.say(left, Bye())
        desk.handle_all()

    for number in range(150):
        visit(number)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(150, 450):
            visit(number)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(450, 750):
            visit(number)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    print(f"{grown} bytes more after 300 visits")
    assert not desk.sent.refusal
    assert desk.exchange.budget.state.used == 0
    assert len(desk.exchange.index.kept) <= 100
    assert not desk.exchange.roster.peers
    assert not desk.exchange.roster.engines
    assert grown < 192 * limits.KIB
