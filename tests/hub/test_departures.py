"""Engines that leave with many open requests, and clients that leave with many questions: no other peer waits."""

from __future__ import annotations

import random
import time
from collections import defaultdict

import pytest

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.capture import frame_cost
from capflow.capture.frame import Rank
from capflow.errors import RoomError
from capflow.hub.effects import Continue, Effects, Log
from capflow.hub.exchange.waiters import Waiters
from capflow.hub.peers.departures import Departures
from capflow.plugins.configure import ConfiguredConsumer
from capflow.protocol import message
from capflow.protocol.message import Await, Bye, Hello, Results, Welcome
from capflow.testing import MemoryHub
from tests.kit.exchanges import Desk
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import Recorder

NAMES = [f"r{number}" for number in range(2000)]
assert len(NAMES) > 4 * limits.SLICE_REQUESTS


def step_of(names, engine="many", boot="one", seq=1):
    return make_frame([(name, 4, 0, 1) for name in names], seq=seq, step=seq, engine=engine, boot=boot)


def receive(desk, peer, text):
    """Have a message handled, and nothing that was put off."""
    desk.dispatch.receive(peer, [message.encode(text)])


def left(desk):
    """Have a worker with many open requests leave; return its engine, of which not all has ended."""
    desk.hello(b"w", engine="many", boot="one")
    desk.say(b"w", step_of(NAMES))
    desk.handle_all()
    engine = desk.exchange.roster.engines["many"]
    assert len(engine.open) == len(NAMES)
    receive(desk, b"w", Bye())
    assert len(engine.open) == len(NAMES) - limits.SLICE_REQUESTS
    return engine


def test_requests_of_an_engine_that_leaves_end_in_slices_between_what_others_say():
    recorder = Recorder()
    desk = Desk(recorder)
    desk.say(b"c", Hello("client", "", "c"))
    desk.say(b"c", Await(tuple(NAMES), wait=True))
    desk.hello(b"other", engine="other", boot="o")
    engine = left(desk)
    frame = make_frame([("x", 4, 0, 4)], engine="other", boot="o", finished=[make_finished("x")])
    desk.dispatch.receive(b"other", frame.encode())
    assert len(engine.open) == len(NAMES) - limits.SLICE_REQUESTS
    assert desk.exchange.counts.frames == 2
    desk.handle_all()
    assert recorder.rows["x"] == 4
    desk.turn()
    desk.handle_all()
    assert not engine.open
    assert {recorder.done[name].status for name in NAMES} == {"error"}
    final = [text.request for text in desk.sent[b"c"] if isinstance(text, Results) and text.results]
    assert sorted(final) == sorted(NAMES)
    assert desk.exchange.index.requests_failed == len(NAMES)


@pytest.mark.parametrize("hidden", [8, 16])
def test_an_engine_that_is_back_meanwhile_is_told_of_behind_the_ends(hidden):
    recorder = Recorder()
    desk = Desk(recorder)
    engine = left(desk)
    hello = make_hello("many", "two", model=make_model(hidden=hidden))
    slices = sum(1 for _ in desk.dispatch.handle(b"w2", [message.encode(hello)]))
    assert slices >= 4
    assert not engine.open
    desk.say(b"w2", make_frame([(NAMES[-1], 4, 0, 4)], engine="many", boot="two", hidden=hidden))
    desk.handle_all()
    status = [event for event in recorder.events if event[0] == "session" or event == ("done", NAMES[0])]
    assert status == [("session", "many"), ("done", NAMES[0]), ("session", "many")]
    assert recorder.events[-1] == ("session", "many")
    assert recorder.rows[NAMES[-1]] == 1 + 4
    assert list(desk.exchange.roster.engines["many"].open) == [NAMES[-1]]


@pytest.mark.usefixtures("replaced_at_once")
def test_a_frame_of_a_worker_that_started_again_waits_for_the_ends_of_what_it_had_before():
    recorder = Recorder()
    desk = Desk(recorder)
    desk.hello(b"w", engine="many", boot="one")
    desk.say(b"w", step_of(NAMES))
    receive(desk, b"w2", make_hello("many", "two"))
    engine = desk.exchange.roster.engines["many"]
    assert len(engine.open) == len(NAMES) - limits.SLICE_REQUESTS
    desk.dispatch.receive(b"w2", step_of(NAMES[-1:], boot="two").encode())
    assert list(engine.open) == NAMES[-1:]
    desk.turn()
    desk.handle_all()
    assert len(recorder.done) == len(NAMES)
    assert recorder.rows[NAMES[-1]] == 2


@pytest.mark.usefixtures("replaced_at_once")
def test_who_comes_and_goes_again_and_again_leaves_no_more_to_do_than_is_done():
    desk = Desk(Recorder())
    halves = make_model(stages=2)
    for stage, peer in enumerate((b"w", b"honest")):
        desk.hello(peer, engine="many", boot="one", model=halves, rank=Rank(stage, 0, 0))
    desk.say(b"w", step_of(NAMES))
    engine = desk.exchange.roster.engines["many"]
    for number in range(20):
        desk.dispatch.receive(b"h", [message.encode(make_hello("many", f"{number}", model=halves))])
        assert "many" not in desk.exchange.departures or number == 0
        receive(desk, b"h", Bye())
    assert len(desk.exchange.departures._waiting.get("many", ())) <= 1
    assert not engine.open


def test_a_large_frame_that_is_read_while_its_engine_departs_waits(monkeypatch, tmp_path):
    monkeypatch.setattr(frame_cost, "_SMALL_BYTES", 1000)
    recorder = Recorder()
    desk = Desk(recorder)
    halves = make_model(stages=2)
    for stage, peer in enumerate((b"w", b"second")):
        desk.hello(peer, engine="many", boot="one", model=halves, rank=Rank(stage, 0, 0))
    desk.say(b"w", step_of(NAMES))
    engine = desk.exchange.roster.engines["many"]
    more = make_frame([(name, 4, 1, 1) for name in NAMES[:100]], seq=2, step=2, engine="many", boot="one")
    handling = desk.dispatch.handle(b"w", more.encode())
    next(handling)  # it is read
    receive(desk, b"second", Bye())
    assert len(engine.open) == len(NAMES) - limits.SLICE_REQUESTS
    assert sum(1 for _ in handling) > 1
    assert sorted(engine.open) == sorted(NAMES[:100])  # opened again, without state of their first run
    desk.handle_all()
    assert set(recorder.done) == set(NAMES)


@pytest.mark.usefixtures("replaced_at_once")
@pytest.mark.parametrize("says_bye", [True, False])
def test_an_engine_that_starts_again_has_the_room_that_its_requests_give_back(says_bye):
    desk = Desk(Recorder(), memory_bytes_max=64 * limits.MIB)
    state = desk.exchange.budget.state
    desk.hello(b"w", engine="many", boot="one")
    for seq, first in enumerate(range(0, 6000, 500), 1):
        names = [f"r{number}" for number in range(first, first + 500)]
        desk.say(b"w", step_of(names, seq=seq))
    for number in range(8):  # whose shares make this one's smaller than what it has
        desk.hello(b"o%d" % number, engine=f"other{number}", boot="o")
    engine = desk.exchange.roster.engines["many"]
    assert not state.room(engine.owner)
    if says_bye:
        receive(desk, b"w", Bye())
    receive(desk, b"w2", make_hello("many", "two"))
    assert isinstance(desk.sent[b"w2"][0], Welcome)
    assert not engine.open


@pytest.mark.parametrize("asked", ["", "many", "many@1"])
def test_a_client_that_waits_for_a_request_of_an_engine_that_started_again_is_answered(asked):
    desk = Desk(Recorder())
    desk.say(b"c", Hello("client", "", "c"))
    desk.hello(b"w", engine="many@1", boot="one")
    desk.say(b"w", step_of(NAMES, engine="many@1"))
    desk.say(b"c", Await(NAMES[-1:], wait=True, engine=asked))
    receive(desk, b"w", Bye())
    receive(desk, b"w2", make_hello("many@2", "two"))
    desk.dispatch.receive(b"w2", step_of(NAMES[-1:], engine="many@2", boot="two").encode())
    desk.handle_all()
    end = make_frame([], finished=[make_finished(NAMES[-1], rows=1)], engine="many@2", boot="two", seq=2, step=2)
    desk.say(b"w2", end)
    desk.handle_all()
    (answer,) = [text for text in desk.sent[b"c"] if isinstance(text, Results)]
    assert answer.results["recorder"].status == ("partial_error" if asked == "many@1" else "ok")
    assert b"c" not in desk.exchange.answers


def test_clients_are_answered_of_more_requests_at_once_than_are_kept(monkeypatch):
    monkeypatch.setattr(limits, "RESULTS_KEPT_MAX", 500)
    desk = Desk(Recorder())
    desk.say(b"c", Hello("client", "", "c"))
    desk.hello(b"w", engine="many", boot="one")
    desk.say(b"w", step_of(NAMES))
    desk.say(b"c", Await(tuple(NAMES), wait=True))
    desk.say(b"w", Bye())
    desk.handle_all()
    answered = [text for text in desk.sent[b"c"] if isinstance(text, Results)]
    assert sorted(text.request for text in answered) == sorted(NAMES)
    assert {text.results["recorder"].status for text in answered} == {"partial_error"}


def test_an_end_at_which_the_hub_fails_costs_no_other(monkeypatch, caplog):
    recorder = Recorder()
    desk = Desk(recorder)
    over = desk.exchange.frames.end

    def failing(request, *args):
        if request.id == NAMES[300]:
            raise MemoryError
        return over(request, *args)

    monkeypatch.setattr(desk.exchange.frames, "end", failing)
    engine = left(desk)
    desk.turn()
    desk.handle_all()
    assert not engine.open
    assert set(recorder.done) == set(NAMES) - {NAMES[300]}
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["hub_failed"]


def test_requests_of_stages_that_fell_silent_one_after_the_other_have_their_results(tmp_path):
    """The stage that is left ends its requests; the other has not, and never comes."""
    halves = make_model(stages=2)
    made = ConfiguredConsumer.of(Recorder(), policy="spill", spool_dir=tmp_path)
    with MemoryHub(made) as hub:
        stages = [
            hub.engine("many", model=halves, stage=stage, sites=halves.sites[10 * stage :][:10]) for stage in (0, 1)
        ]
        dispatch = hub.hub._dispatch
        stages[1].step([("x", 4, 0, 1)])
        stages[1].settle()
        hub.asked(lambda: dispatch.give_up(stages[1].worker._peer))
        stages[0].step([(name, 4, 0, 1) for name in NAMES[:20]])
        for name in NAMES[:20]:
            stages[0].finish(name)
        stages[0].settle()
        # Nothing shows that the hub has looked who is there; it does so in less than this.
        time.sleep(1)
        hub.asked(lambda: dispatch.give_up(stages[0].worker._peer))
        scheduler = stages[0]._scheduler._peer
        hub.asked(lambda: dispatch.give_up(scheduler))
        assert {hub.result(name, "many").status for name in NAMES[:20]} == {"partial_error"}


def test_a_hub_that_stops_ends_what_is_left():
    recorder = Recorder()
    desk = Desk(recorder)
    engine = left(desk)
    desk.dispatch.drain()
    assert not engine.open
    desk.handle_all()
    assert set(recorder.done) == set(NAMES)


@pytest.mark.parametrize("policy", ["block", "drop", "spill"])
def test_each_request_of_an_engine_that_leaves_has_its_result(policy, tmp_path):
    made = ConfiguredConsumer.of(Recorder(), policy=policy, spool_dir=tmp_path)
    with MemoryHub(made) as hub:
        engine = hub.engine("many")
        engine.step([(name, 4, 0, 1) for name in NAMES])
        engine.finish(NAMES[0])
        engine.settle()
        engine.lose()
        result = [hub.result(name, "many").status for name in NAMES]
        assert result == ["ok"] + ["partial_error"] * (len(NAMES) - 1)
        again = hub.engine("many", boot="two")
        again.step([(NAMES[0], 4, 0, 4)])
        again.finish(NAMES[0])
        assert hub.result(NAMES[0], "many").status == "ok"


class TestDepartures:
    def test_what_fails_is_over_and_what_is_behind_it_is_done(self):
        effects, done = Effects(None), []
        departures = Departures(effects)

        def failing():
            done.append("first")
            yield
            raise ValueError("no")

        departures.add("e", failing())
        departures.call("e", lambda: done.append("last"))
        assert done == ["first"]
        assert effects.take() == [Continue("e")]
        departures.proceed("e")
        assert [(type(effect), str(effect.error)) for effect in effects.take()[:1]] == [(Log, "no")]
        departures.proceed("e")
        assert done == ["first", "last"]
        assert "e" not in departures

    def test_engines_do_not_wait_for_each_other(self):
        effects, done = Effects(None), []
        departures = Departures(effects)

        def slices(name):
            for number in range(3):
                done.append((name, number))
                yield

        departures.add("a", slices("a"))
        departures.add("b", slices("b"))
        departures.call("c", lambda: done.append("c"))
        assert done == [("a", 0), ("b", 0), "c"]
        departures.finish()
        assert sorted(done[3:]) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


class TestWaiters:
    @pytest.mark.parametrize("seed", range(20))
    def test_know_who_waits_for_what_whatever_comes_in_which_order(self, seed, monkeypatch):
        monkeypatch.setattr(limits, "AWAITED_MAX", 60)
        chance = random.Random(seed)
        state = Shares("memory", 10**6, do="")
        waiters, model = Waiters(state), defaultdict(set)
        for _ in range(3000):
            client, request = chance.choice([b"a", b"b", b"c"]), ("", f"r{chance.randrange(100)}")
            match chance.choice(["add"] * 6 + ["pop"] * 5 + ["gone"] * (chance.random() < 0.1)):
                case "add":
                    waits = sum(client in clients for clients in model.values())
                    if waits == 60 and client not in model[request]:
                        with pytest.raises(RoomError, match="requests waited for: got more than 60"):
                            waiters.add(request, client, client.decode())
                    else:
                        waiters.add(request, client, client.decode())
                        model[request].add(client)
                case "pop":
                    assert set(waiters.pop(request)) == model.pop(request, set())
                case "gone":
                    waiters.gone(client)
                    for clients in model.values():
                        clients.discard(client)
            assert waiters.waits(request) == bool(model[request])
            assert (client in waiters) == any(client in clients for clients in model.values())
        assert max(map(len, waiters._named.values()), default=0) <= 2 * 60 + 64 + 1
        for client in (b"a", b"b", b"c"):
            waiters.gone(client)
        assert not waiters._clients
        assert not waiters._named
        assert state.used == 0

    def test_who_leaves_costs_what_it_waited_for_and_not_what_others_do(self, monkeypatch):
        waiters = Waiters(Shares("memory", 10**9, do=""))
        for number in range(10_000):
            waiters.add(("", f"{number}"), b"much", "much")
        waiters.add(("", "x"), b"little", "little")
        looked = []
        monkeypatch.setattr(Waiters, "_of", lambda self, asked: looked.append(asked) or (self._clients[asked],))
        waiters.gone(b"little")
        assert looked == [("", "x")]
