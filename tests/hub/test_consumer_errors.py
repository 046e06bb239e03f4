"""What a lane makes of a consumer's errors: retry, poison, fatal; no error acknowledges a row."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import Future

import pytest

from capflow import limits
from capflow.buffers.spool import Lost
from capflow.capture.frame import rows_of
from capflow.capture.result import CaptureResult
from capflow.errors import FatalError, RetryError
from capflow.hub.health import problems
from capflow.hub.lanes import dead_letters
from capflow.plugins.configure import ConfiguredConsumer
from capflow.plugins.consumer import Consumer
from capflow.testing.hub import MemoryHub
from tests.kit.hubs import EVERYTHING
from tests.kit.waiting import eventually

RETRIES = (
    lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    MemoryError,
    lambda: RetryError("the database is locked"),
)
FATALS = (lambda: FatalError("the connection is gone"), lambda: SystemExit(1))
POISONS = (lambda: ValueError("no"), lambda: KeyError("x"), RecursionError)


def no_space():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Store(Consumer):
    """Keeps rows in memory and stores those of a request at its end, all or none, as a database does.

    errors: exceptions to raise, by method and the number of the frame or the id of the request; one is taken at each
    call.
    stored: rows by request, which outlive every opening.
    """

    name = "store"
    reads_requests = False

    def __init__(self, errors=None, stored=None, later=False):
        super().__init__(None)
        self.errors = errors or {}
        self.stored = {} if stored is None else stored
        self.later = later
        self.pending = {}
        self.calls = Counter()
        self.is_open = False
        self.results = []

    def spec(self):
        return EVERYTHING

    def _fail(self, method, key=None):
        self.calls[method] += 1
        waiting = self.errors.get((method, key))
        if waiting:
            error = waiting[0] if callable(waiting[0]) else waiting.pop(0)
            raise error() if callable(error) else error

    def open(self, context):
        assert not self.is_open
        self._fail("open")
        self.is_open = True
        self.pending = {}
        self.engines = []

    def on_session(self, engine, model):
        assert self.is_open
        self._fail("on_session")
        self.engines.append(engine)

    def on_frame(self, frame):
        assert self.is_open
        self._fail("on_frame", frame.header.seq)
        for chunk in frame.chunks():
            for site, at in itertools.product(chunk.sites, range(chunk.rows.shape[1])):
                self.pending.setdefault(chunk.request.id, []).append((str(site), chunk.start + at))

    def on_request_done(self, done):
        assert self.is_open
        if self.later:
            future = Future()
            try:
                self._fail("on_request_done", done.request)
            except BaseException as e:  # noqa: BLE001  as a thread's is
                future.set_exception(e)
            else:
                future.set_result(self._store(done))
            return future
        self._fail("on_request_done", done.request)
        return self._store(done)

    def _store(self, done):
        rows = self.pending.pop(done.request, [])
        assert done.request not in self.stored, f"{done.request} was given again after it was stored"
        self.stored[done.request] = rows
        return CaptureResult("ok" if len(rows) == done.rows else "partial_error", payload={"rows": len(rows)})

    def on_idle(self):
        self._fail("on_idle")

    def close(self):
        self.is_open = False
        self._fail("close")


@pytest.fixture
def hub_of(tmp_path, monkeypatch):
    """Return what makes a hub with a consumer that spills, or has another policy; pauses are short."""
    monkeypatch.setattr(limits, "RETRY_S_MIN", 0.01)
    monkeypatch.setattr(limits, "RETRY_S_MAX", 0.05)

    def made(consumer, policy="spill"):
        spill = {"spool_dir": tmp_path / "spool"} if policy == "spill" else {}
        return MemoryHub(ConfiguredConsumer.of(consumer, policy=policy, **spill))

    return made


def request(engine, name, frames=3, rows=2):
    """Send a request of some frames."""
    for step in range(frames):
        engine.step([(name, rows, step * rows, rows)])
    engine.finish(name)


def letters(tmp_path):
    """Return the dead letters."""
    return [
        result
        for place in (tmp_path / "spool").glob("*.dead")
        for result in dead_letters.read(place)
        if not isinstance(result, Lost)
    ]


def dead_rows(tmp_path):
    """Return how often each row is in the dead letters, each with a reason."""
    rows = Counter()
    for result in letters(tmp_path):
        assert result.letter.error
        if result.frame is not None:
            result.frame.check()
            for chunk in result.frame.chunks():
                for site, at in itertools.product(chunk.sites, range(chunk.rows.shape[1])):
                    rows[chunk.request.id, str(site), chunk.start + at] += 1
    return rows


@pytest.mark.parametrize("policy", ["spill", "block"])
@pytest.mark.parametrize("error", RETRIES)
def test_what_may_work_later_is_tried_again_and_nothing_is_lost(hub_of, error, policy):
    consumer = Store({("on_frame", 2): [error(), error()], ("on_request_done", "r1"): [error()] * 3})
    with hub_of(consumer, policy) as hub:
        engine = hub.engine()
        request(engine, "r1")
        request(engine, "r2")
        assert [hub.result(name).status for name in ("r1", "r2")] == ["ok", "ok"]
        lane = hub.lanes[0]
        assert (lane.errors, lane.unkept, lane.backoff.retries, lane.restarts) == (0, 0, 5, 0)
        assert lane.status()["retrying"] is None
        assert hub.stop()
    assert all(len(rows) == len(set(rows)) for rows in consumer.stored.values())


def test_a_consumer_that_waits_says_so_everywhere(hub_of, caplog):
    full = threading.Event()
    full.set()
    consumer = Store()

    def on_frame(frame):
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device", "/data/patient-4711.safetensors")
        Store.on_frame(consumer, frame)

    consumer.on_frame = on_frame
    with hub_of(consumer) as hub, caplog.at_level(logging.WARNING, "capflow.consumer"):
        engine = hub.engine()
        request(engine, "r1")
        eventually(lambda: problems(hub.hub, time.monotonic()))
        result = problems(hub.hub, time.monotonic())
        assert result == ["consumer store: waits and tries on_frame again: No space left on device"]
        status = hub.hub.status()["consumers"]["store"]["retrying"]
        assert (status["method"], status["reason"]) == ("on_frame", "No space left on device")
        eventually(lambda: hub.lanes[0].backoff.retries > 5)
        full.clear()
        assert hub.result("r1").status == "ok"
        assert problems(hub.hub, time.monotonic()) == []
    message = [record.event for record in caplog.records if getattr(record, "event", "").startswith("consumer_")]
    assert message == ["consumer_waits", "consumer_goes_on"]


@pytest.mark.parametrize("key", [("on_frame", 2), ("on_request_done", "r1"), ("on_idle", None)])
def test_at_shutdown_the_inbox_keeps_what_a_consumer_that_waits_did_not_take(hub_of, key):
    stored = {}
    first = Store({key: [no_space]}, stored)
    with hub_of(first) as hub:
        request(hub.engine(), "r1")
        eventually(lambda: hub.lanes[0].backoff.retries > 1)
        began = time.monotonic()
        hub.hub.stop(1.0, leave=True)
        assert time.monotonic() - began < 10
        assert hub.lanes[0].gave_up
    second = Store({}, stored)
    with hub_of(second) as hub:
        eventually(lambda: "r1" in stored)
        hub.engine()
    assert len(stored["r1"]) == len(set(stored["r1"]))
    assert {at for _, at in stored["r1"]} == set(range(6))


def test_a_frame_that_cannot_be_handled_is_a_dead_letter_and_its_request_says_so(hub_of, tmp_path):
    consumer = Store({("on_frame", 2): [ValueError("no")]})
    with hub_of(consumer) as hub:
        engine = hub.engine()
        request(engine, "r1")
        request(engine, "r2")
        result = hub.result("r1")
        assert result.status == "partial_error"
        assert "ValueError: no" in result.error
        assert "dead letters" in result.error
        assert hub.result("r2").status == "ok"
        assert hub.lanes[0].status()["dead_letters"]["letters"] == 2  # and the end
    frame, end = letters(tmp_path)
    assert (frame.letter.method, frame.letter.requests, frame.letter.engine) == ("on_frame", ("r1",), "engine-1")
    assert "ValueError: no" in frame.letter.error
    assert end.letter.done.request == "r1"
    assert set(dead_rows(tmp_path).values()) == {1}
    assert len(consumer.stored["r1"]) + rows_of(frame.frame.header).total() == result.payload["rows"] * 3 // 2


@pytest.mark.parametrize("later", [False, True])
def test_a_request_whose_end_cannot_be_handled_is_a_dead_letter_with_its_rows(hub_of, tmp_path, later):
    consumer = Store({("on_request_done", "r1"): [ValueError("no")]}, later=later)
    with hub_of(consumer) as hub:
        engine = hub.engine()
        for step in range(3):
            engine.step([("r1", 2, 2 * step, 2), ("r2", 2, 2 * step, 2)])
        engine.finish("r1")
        engine.finish("r2")
        result = hub.result("r1")
        assert result.status == "error"
        assert "dead letters" in result.error
        assert hub.result("r2").status == "ok"
        sites = len(engine.sites)
    rows = dead_rows(tmp_path)
    assert {name for name, _, _ in rows} == {"r1"}
    assert len(rows) == 6 * sum(1 for site in consumer.stored["r2"] if site[1] == 0)
    assert set(rows.values()) == {1}
    assert sites


class Full(Store):
    """Keeps nothing, and says so in its own results."""

    def _store(self, done):
        return CaptureResult("error", f"{done.request} has no room")


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("policy", ["spill", "block"])
def test_an_error_in_a_result_of_the_consumer_is_logged(hub_of, caplog, policy, later):
    with hub_of(Full(later=later), policy) as hub:
        request(hub.engine(), "r1")
        assert hub.result("r1").error == "r1 has no room"
    (line,) = [record for record in caplog.records if getattr(record, "event", "") == "request_failed"]
    assert (line.levelno, line.getMessage()) == (logging.WARNING, "consumer store: request r1: r1 has no room")
    fields = (line.consumer, line.engine, line.request, line.status, line.error)
    assert fields == ("store", "engine-1", "r1", "error", "r1 has no room")


def test_an_exception_is_logged_once_though_it_is_the_error_of_the_result_too(hub_of, caplog):
    consumer = Store({("on_request_done", "r1"): [ValueError("no")]})
    with hub_of(consumer, "block") as hub:
        request(hub.engine(), "r1")
        assert "ValueError: no" in hub.result("r1").error
    events = [record.event for record in caplog.records if record.levelno >= logging.WARNING]
    assert events == ["consumer_failed"]


def test_poison_is_not_given_again_by_the_next_hub_nor_after_a_restart(hub_of, tmp_path):
    stored = {}
    first = Store({("on_frame", 2): [ValueError("no")], ("on_request_done", "r1"): [no_space]}, stored)
    with hub_of(first) as hub:
        request(hub.engine(), "r1")
        eventually(lambda: hub.lanes[0].backoff.retries > 1)
        hub.hub.stop(1.0, leave=True)
    second = Store({("on_frame", 2): [AssertionError("given again")]}, stored)
    with hub_of(second) as hub:
        eventually(lambda: "r1" in stored)
    assert set(dead_rows(tmp_path).values()) == {1}
    assert second.errors["on_frame", 2]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("error", FATALS)
@pytest.mark.parametrize("key", [("on_frame", 2), ("on_request_done", "r1"), ("on_idle", None)])
def test_after_a_fatal_error_the_consumer_is_opened_again_and_given_what_it_is_not_done_with(hub_of, error, key, later):
    consumer = Store({key: [error()], ("open", None): []}, later=later)
    with hub_of(consumer) as hub:
        engine = hub.engine()
        consumer.errors["open", None] = [no_space(), ValueError("not yet")]
        request(engine, "r0")
        engine.step([("open", 2, 0, 2)])
        request(engine, "r1")
        engine.step([("open", 2, 2, 2)])
        engine.finish("open")
        assert [hub.result(name).status for name in ("r0", "r1", "open")] == ["ok"] * 3
        eventually(lambda: hub.lanes[0].restarts == 1)
        assert hub.lanes[0].errors == 0
        assert hub.stop()
    assert all(len(rows) == len(set(rows)) for rows in consumer.stored.values())


def test_what_is_fatal_again_and_again_becomes_a_dead_letter(hub_of, tmp_path):
    consumer = Store({("on_frame", 2): [lambda: FatalError("no")]})
    with hub_of(consumer) as hub:
        engine = hub.engine()
        request(engine, "r1")
        assert hub.result("r1").status == "partial_error"
        assert hub.lanes[0].restarts == limits.RESTARTS_MAX
    assert len(letters(tmp_path)) == 2


class Breaks(Store):
    """Breaks at a frame, and is of no use then until it is opened again."""

    def open(self, context):
        super().open(context)
        self.broken = False

    def on_frame(self, frame):
        self.broken = self.broken or frame.header.seq == 2
        if self.broken:
            raise FatalError("broken")
        super().on_frame(frame)


@pytest.mark.parametrize("policy", ["spill", "block"])
def test_a_frame_that_breaks_every_opening_costs_no_other(hub_of, policy):
    consumer = Breaks()
    with hub_of(consumer, policy) as hub:
        engine = hub.engine()
        request(engine, "r1")
        assert hub.result("r1").status != "ok"
        request(engine, "r2")
        assert hub.result("r2").status == "ok"


def test_a_consumer_without_an_inbox_names_what_an_opening_lost(hub_of):
    consumer = Store({("on_frame", 2): [FatalError("no")]})
    with hub_of(consumer, "block") as hub:
        engine = hub.engine()
        request(engine, "r1")
        result = hub.result("r1")
        assert result.status == "partial_error"
        assert "opened again" in result.error
        request(engine, "r2")
        assert hub.result("r2").status == "ok"
        assert hub.lanes[0].unkept == 1


@pytest.mark.parametrize("policy", ["spill", "block"])
@pytest.mark.parametrize("error", [*RETRIES, *FATALS])
def test_a_consumer_that_is_opened_again_meets_its_engines_however_often_that_has_to_be_tried(hub_of, error, policy):
    consumer = Store()
    with hub_of(consumer, policy) as hub:
        first, second = hub.engine(), hub.engine("engine-2")
        names = {"r1": first, "r2": second}
        for name, engine in names.items():
            request(engine, name)
            assert hub.result(name).status == "ok"
        entry = sorted(consumer.engines)
        assert len(entry) == 2
        consumer.errors["on_idle", None] = [FatalError("the connection is gone")]
        consumer.errors["on_session", None] = [error(), error()]
        eventually(lambda: hub.lanes[0].restarts)
        for name, engine in names.items():
            request(engine, name + "-again")
            assert hub.result(name + "-again").status == "ok"
        assert consumer.errors["on_session", None] == []
        assert sorted(consumer.engines) == entry
        assert hub.lanes[0].errors == 0


def test_dead_letters_without_room_are_counted_by_name(hub_of, monkeypatch):
    monkeypatch.setattr(limits, "DEAD_LETTERS_MAX", 1)
    consumer = Store({("on_frame", n): [ValueError("no")] for n in (1, 2)})
    with hub_of(consumer) as hub:
        engine = hub.engine()
        request(engine, "r1")
        result = hub.result("r1")
        assert "dead_letters_full" in result.error
        rows = result.payload["rows"]  # of the one frame that was taken
        assert [(lost.reason, lost.rows) for lost in result.dropped] == [("dead_letters_full", rows)]
        assert hub.lanes[0].dropped == {"dead_letters_full": rows}
        assert hub.lanes[0].status()["dead_letters"] | {"directory": ""} == {
            "directory": "",
            "letters": 1,
            "refused": 2,
        }


@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_in_the_consumer_or_in_a_dead_letter_whatever_fails_in_whatever_order(hub_of, tmp_path, seed):
    """Requests that overlap, errors of each kind at any call, hubs that stop in between."""
    choose = random.Random(seed)
    stored, errors, names = {}, scripted(choose), iter(range(20))
    seq, later, sent = 0, choose.random() < 0.5, []
    for _ in range(2):
        with hub_of(Store(errors, stored, later)) as hub:
            engine = hub.engine(seq=seq)
            sent += list(some_requests(engine, choose, names))
            engine.settle()
            seq = engine.worker.seq
            hub.hub.stop(choose.choice([0.0, 20.0]), leave=True)
    errors.clear()
    with hub_of(Store(errors, stored, later)) as hub:
        eventually(lambda: hub.lanes[0].left == (0, 0))
    dead = dead_rows(tmp_path)
    sites = {site for rows in stored.values() for site, _ in rows} | {site for _, site, _ in dead}
    assert len(sent) == len(set(sent))
    for (name, at), site in itertools.product(sent, sites):
        kept = stored.get(name, []).count((site, at))
        assert kept or dead[name, site, at], f"{name} {site} {at} is nowhere"
        assert kept <= 1
        assert dead[name, site, at] <= 1


def scripted(choose):
    """Return errors of each kind for some calls."""

    def some():
        kinds = choose.choices([RETRIES, FATALS, POISONS], [4, 2, 2], k=choose.randint(1, 3))
        return [choose.choice(kind)() for kind in kinds]

    errors = {("on_frame", number): some() for number in range(1, 61) if choose.random() < 0.3}
    errors |= {("on_request_done", f"r{number}"): some() for number in range(20) if choose.random() < 0.4}
    return errors | {("on_idle", None): [choose.choice(RETRIES)(), choose.choice(FATALS)()]}


def some_requests(engine, choose, names):
    """Send 30 frames of requests that overlap, and their ends; yield each request and position."""
    running = []
    for _ in range(30):
        if len(running) < 3 and (number := next(names, None)) is not None:
            running.append([f"r{number}", 0])
        engine.step([(name, 2, start, 2) for name, start in running])
        for each in running:
            yield from ((each[0], at) for at in (each[1], each[1] + 1))
            each[1] += 2
        if running and choose.random() < 0.4:
            engine.finish(running.pop(0)[0])
    for name, _ in running:
        engine.finish(name)
