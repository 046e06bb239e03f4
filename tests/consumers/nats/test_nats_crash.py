"""The nats consumer in a hub that is killed, as the server is: neither loses nor repeats anything."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.kit.crashing_hub import HIDDEN, Worker
from tests.kit.frames import make_finished, make_frame, make_hello, make_model, row_of
from tests.kit.hubs import address, worker_link
from tests.kit.natsd import natsd
from tests.kit.streams import SITE, kinds, probe_file, vectors_of
from tests.kit.waiting import eventually

__all__ = ["address"]


class HubProcess:
    """`capflow run` with the nats consumer, on an inbox that the next one finds."""

    def __init__(self, address, server, directory, drain_s, *options):
        settings = [f"servers={server.url}", f"spool_dir={directory / 'spool'}", "create=true", *options]
        command = [sys.executable, "-m", "capflow", "run", "--address", address, "--drain-s", str(drain_s)]
        self.process = subprocess.Popen([*command, "--consumer", f"nats:{','.join(settings)}"])

    def kill(self):
        self.process.kill()
        self.process.wait(60)

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(120)


@contextlib.contextmanager
def linked(address, model):
    """Yield a worker's link to a hub that is about to start."""
    eventually(Path(address.removeprefix("ipc://")).exists, 120)
    with worker_link(address, make_hello(model=model), wait=False) as link:
        eventually(lambda: link.connected, 60)
        yield link


def taken(link):
    """Return whether the hub has all that was sent."""
    return link.counters["unacked_frames"] + link.counters["queued_frames"] == 0


@pytest.mark.long
def test_a_hub_stops_though_the_server_is_away_and_the_next_one_goes_on(tmp_path, address):
    with natsd(tmp_path) as server, contextlib.ExitStack() as stack:

        def start():
            hub = HubProcess(address, server, tmp_path, 1, "stream=CF", "sites=post_block:0")
            stack.callback(hub.kill)
            return hub

        hub = start()
        with linked(address, make_model()) as link:
            server.kill()
            frame = make_frame([("r1", 4, 0, 4)], [SITE], finished=[make_finished("r1", 4, 4)])
            assert link.send(frame.header, frame.payload) is None
            eventually(lambda: taken(link))
            begun = time.monotonic()
            hub.stop()
            assert time.monotonic() - begun < 60
            server.start()
            hub = start()
            eventually(lambda: link.connected, 120)
            eventually(lambda: kinds(server.messages("CF"))["done"], 60)
            assert hub.stop() == 0
        counts = kinds(server.messages("CF"))
        # The first hub may have been killed before it sent one.
        assert counts.pop("sessions") in (1, 2)
        assert counts == {"opened": 2, "rows": 1, "done": 1}


def ended(server, stream):
    """Return how many requests a stream has the end of."""

    async def look(js):
        return (await js.stream_info(stream, subjects_filter="capflow.done.>")).state.subjects or {}

    return len(server.js(look))


def kill_often(address, directory, *, hub_kills, server_kills, seed):
    """Kill hub and server at random moments under load; hold the stream against what was sent."""
    choose = random.Random(seed)
    probe, path = probe_file(directory, HIDDEN)
    kills = ["hub"] * hub_kills + ["server"] * server_kills
    choose.shuffle(kills)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(natsd(directory))
        options = ("stream=CHAOS", "vectors=true", f"probes={path}")

        def start_hub():
            hub = HubProcess(address, server, directory, 60, *options)
            stack.callback(hub.kill)
            return hub

        hub = start_hub()
        link = stack.enter_context(linked(address, make_model(1, HIDDEN)))
        worker = Worker(link, choose)

        def work():
            worker.turn()
            # About the pace at which the server writes through. Frames beyond it wait in the inbox.
            time.sleep(0.005)

        for which in kills:
            until = time.monotonic() + choose.uniform(0.1, 1.5)
            while time.monotonic() < until:
                work()
            if which == "hub":
                hub.kill()
                hub = start_hub()
                eventually(lambda: link.connected, 120)
            else:
                server.kill()
                until = time.monotonic() + choose.uniform(0, 0.7)
                while time.monotonic() < until:
                    work()
                server.start()
        worker.end()
        eventually(lambda: taken(link), 120)
        eventually(lambda: ended(server, "CHAOS") >= len(worker.lengths), 240)
        assert hub.stop() == 0
        messages = server.messages("CHAOS")
    check_stream(messages, worker.lengths, probe)
    return len(worker.lengths), len(messages)


def check_stream(messages, lengths, probe):
    """Each row of each request is there once, in order, with its scores and its vector; each end is there once."""
    scored, vectors, ends = {}, {}, Counter()
    for message in messages:
        kind = message.subject.split(".")[1]
        if kind == "done":
            end = json.loads(message.data)
            assert end["capture_status"] == "ok", end
            assert end["computed_length"] == lengths[end["request"]]
            ends[end["request"]] += 1
        elif kind == "rows":
            for chunk in json.loads(message.data)["chunks"]:
                values = np.array([chunk["scores"]["glad"], chunk["scores"]["sad"]], np.float32).T
                scored.setdefault(chunk["request"], []).extend(enumerate(values, chunk["start"]))
        elif kind == "vectors":
            for chunk, rows in vectors_of(message):
                vectors.setdefault(chunk["request"], []).extend(enumerate(rows[0], chunk["start"]))
    assert ends == Counter(lengths.keys())
    for name, length in lengths.items():
        expected = np.stack([row_of(name, SITE, position, HIDDEN) for position in range(length)]) if length else []
        for kept, values in ((scored, probe.scores(expected) if length else []), (vectors, expected)):
            assert [position for position, _ in kept.get(name, [])] == list(range(length)), name
            if length:
                np.testing.assert_allclose(np.stack([row for _, row in kept[name]]), values, rtol=1e-5, atol=1e-4)


def test_a_hub_and_a_server_that_are_killed_lose_and_repeat_nothing(address, tmp_path):
    requests, messages = kill_often(address, tmp_path, hub_kills=1, server_kills=2, seed=0)
    assert requests
    assert messages > 2 * requests


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hub_and_a_server_that_are_killed_often_lose_and_repeat_nothing(address, tmp_path, seed):
    requests, messages = kill_often(address, tmp_path, hub_kills=15, server_kills=25, seed=seed)
    print(requests, "requests,", messages, "messages")
    assert requests > 100
