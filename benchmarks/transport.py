"""The cost of sessions over ZMQ: frames through a worker's link, a hub and an idle consumer, against a bare pyzmq loop.

    PYTHONPATH=. python3 benchmarks/transport.py

Both send the same buffers from this process to a child process over ipc, as two parts; the second is the payload, which
is not copied on either side (DEALER to ROUTER). At most 256 MiB are under way. The clock runs from the first message
until this process knows that the last has arrived: by an acknowledgement with capflow, by one message back in the bare
loop. The two take turns; each line has the medians of their rates.

Then the latency of 1,000 frames of 64 KiB a second is measured, from `WorkerLink.send` to the consumer's `on_frame`.

Predicted: a bare message of 64 KiB takes 20 µs, and a frame costs the link and the hub some 80 µs of Python beside
    that, in two processes: 0.3 at 64 KiB. At 1 MiB a message takes 300 µs and the two checksums 60 to 140: 0.6. At 16
    MiB the copies of the kernel decide: 0.8. Goal: 0.7. Latency: p50 0.5 ms, p99 5 ms; goal 10 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import zmq

from capflow import limits
from capflow.capture.frame import Block, Frame, FrameHeader, Rank, RequestRows, Span
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.cli.hub.running import rare_collections
from capflow.hub.hub import Hub
from capflow.plugins.configure import ConfiguredConsumer
from capflow.plugins.consumer import Consumer
from capflow.protocol.message import Hello
from capflow.system import heap
from capflow.transport.links.worker import WorkerLink

SIZES = (64 * limits.KIB, limits.MIB, 16 * limits.MIB)
HIDDEN = 4096
SITE = Site(0, "post_block")
MODEL = ModelInfo("null", 1, HIDDEN, "float32", (SITE,))
RANK = Rank(0, 0, 0)
# Buffers that are sent in turn.
BUFFERS = 8
GOAL, GOAL_MS = 0.7, 10.0


class Null(Consumer):
    """Notes the age of each frame, and drops it."""

    name = "null"

    def __init__(self) -> None:
        super().__init__(None)
        self.ages_ns: list[int] = []

    def spec(self) -> CaptureSpec:
        """Ask for everything."""
        return CaptureSpec({"post_block": "all"})

    def on_frame(self, frame: Frame) -> None:
        """Note its age."""
        self.ages_ns.append(time.time_ns() - frame.header.time_ns)


def be_hub(address: str) -> None:
    """Run a hub; for each line read, print the ages of the frames since the line before."""
    consumer = Null()
    with rare_collections(), heap.trimmed(), Hub(address, [ConfiguredConsumer.of(consumer)]):
        print("ready", flush=True)
        for _ in sys.stdin:
            ages, consumer.ages_ns = consumer.ages_ns, []
            print(json.dumps(ages), flush=True)


def be_bare(address: str) -> None:
    """Receive messages; one without a payload says how many follow, and is answered after them."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as receiver:
        receiver.set(zmq.RCVHWM, limits.MESSAGES_UNREAD_MAX)
        receiver.bind(address)
        print("ready", flush=True)
        while True:
            peer, count = receiver.recv_multipart()
            for _ in range(int(count)):
                receiver.recv_multipart(copy=False)
            receiver.send_multipart([peer, b"done"])


@contextlib.contextmanager
def child(kind: str, address: str) -> Iterator[subprocess.Popen[str]]:
    """Run this script as one of the receivers."""
    command = [sys.executable, __file__, "--child", kind, "--address", address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def header_of(nbytes: int, number: int) -> FrameHeader:
    """Return the header of a frame with the rows of one request at one site."""
    rows = nbytes // (HIDDEN * 4)
    request = RequestRows("request-1", rows, 0, tuple(range(rows)))
    return FrameHeader(
        engine="bench",
        boot="boot",
        rank=RANK,
        seq=0,
        step=number,
        time_ns=time.time_ns(),
        dtype="float32",
        hidden_size=HIDDEN,
        requests=(request,),
        blocks=(Block((SITE,), rows, (Span(0, 0, rows, 0),)),),
        step_tokens=rows,
        step_requests=1,
    )


def acknowledged(link: WorkerLink) -> bool:
    counters = link.counters
    return not counters["unacked_frames"] and not counters["queued_bytes"]


def through_capflow(link: WorkerLink, buffers: list[Any], count: int) -> float:
    nbytes = len(buffers[0])
    begun = time.perf_counter()
    for number in range(count):
        reason = link.send(header_of(nbytes, number), buffers[number % BUFFERS])
        assert reason is None, reason
    while not acknowledged(link):
        time.sleep(0.001)
    return time.perf_counter() - begun


def through_bare(context: zmq.Context[Any], address: str, buffers: list[Any], count: int) -> float:
    """Return the seconds of one turn on a connection of its own.

    libzmq may never resume a connection whose high-water mark was lowered while it was in use.
    """
    head = bytes(300)  # as long as a frame's header
    with context.socket(zmq.DEALER) as sender:
        sender.set(zmq.SNDHWM, max(2, limits.CREDIT_BYTES_DEFAULT // len(buffers[0])))
        sender.connect(address)
        # The answer shows that the connection is made.
        sender.send(b"0")
        assert sender.recv() == b"done"
        begun = time.perf_counter()
        sender.send(b"%d" % count)
        for number in range(count):
            sender.send(head, zmq.SNDMORE)
            sender.send(buffers[number % BUFFERS], copy=False)
        assert sender.recv() == b"done"
        return time.perf_counter() - begun


def throughput(link: WorkerLink, context: zmq.Context[Any], address: str, rounds: int, mib: int) -> None:
    print("| message | bare MB/s | capflow MB/s | ratio | goal | spread of the ratio |")
    print("|---|---|---|---|---|---|")
    for size in SIZES:
        buffers = [np.full(size, number, np.uint8) for number in range(BUFFERS)]
        count = mib * limits.MIB // size
        took: dict[str, list[float]] = {"bare": [], "capflow": []}
        for turn in range(rounds + 1):  # the first warms up
            bare, capflow = through_bare(context, address, buffers, count), through_capflow(link, buffers, count)
            seconds = {"bare": bare, "capflow": capflow}
            for name in took if turn else ():
                took[name].append(seconds[name])
        rates = {name: count * size / 1e6 / statistics.median(seconds) for name, seconds in took.items()}
        ratios = sorted(bare / capflow for bare, capflow in zip(took["bare"], took["capflow"], strict=True))
        print(
            f"| {size // limits.KIB} KiB | {rates['bare']:.0f} | {rates['capflow']:.0f} | "
            f"{rates['capflow'] / rates['bare']:.2f} | {GOAL} | {ratios[0]:.2f}-{ratios[-1]:.2f} |",
            flush=True,
        )


def latency(link: WorkerLink, hub: subprocess.Popen[str], seconds: float, rate: int) -> None:
    assert hub.stdin is not None
    assert hub.stdout is not None
    buffer = np.zeros(SIZES[0], np.uint8)

    def ages() -> list[int]:
        assert hub.stdin is not None
        assert hub.stdout is not None
        hub.stdin.write("\n")
        hub.stdin.flush()
        return list(json.loads(hub.stdout.readline()))

    ages()
    begun = time.perf_counter()
    for number in range(int(seconds * rate)):
        time.sleep(max(0.0, begun + number / rate - time.perf_counter()))
        assert link.send(header_of(SIZES[0], number), buffer) is None
    while not acknowledged(link):
        time.sleep(0.001)
    sorted_ages = sorted(ages())
    p50, p99 = (sorted_ages[int(len(sorted_ages) * part)] / 1e6 for part in (0.5, 0.99))
    print(
        f"\nlatency at {rate} frames of 64 KiB a second, {len(sorted_ages)} frames: p50 {p50:.2f} ms, p99 {p99:.2f} ms "
        f"(goal {GOAL_MS:g}), largest {sorted_ages[-1] / 1e6:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What sessions cost over a bare ZMQ loop.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (default: 9)")
    parser.add_argument("--mib", type=int, default=512, help="MiB sent in each turn (default: 512)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring latency (default: 20)")
    arguments = parser.parse_args()
    if arguments.child:
        {"hub": be_hub, "bare": be_bare}[arguments.child](arguments.address)
        return
    with (
        tempfile.TemporaryDirectory(prefix="cf") as directory,
        child("hub", f"ipc://{directory}/hub") as hub,
        child("bare", f"ipc://{directory}/bare"),
        zmq.Context() as context,
        contextlib.closing(WorkerLink(f"ipc://{directory}/hub", Hello("worker", "bench", "boot", RANK, MODEL))) as link,
    ):
        link.start()
        assert link.wait_welcome(20), link.refusal
        throughput(link, context, f"ipc://{directory}/bare", arguments.rounds, arguments.mib)
        latency(link, hub, arguments.seconds, 1000)


if __name__ == "__main__":
    main()
