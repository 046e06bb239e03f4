"""The hub with real consumers: each is given what it wants, in order, and none suffers for another."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.capture.frame import Dropped, Frame, Rank
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, UsageError
from capflow.plugins.configure import ConfiguredController
from capflow.plugins.consumer import Controller
from capflow.protocol import message
from capflow.protocol.message import Act, ActionOutcome, Hello
from capflow.steering.action import Abort, ActionApplied, Rejected, Steer, Unsteer
from capflow.transport.client import Client
from tests.kit.frames import make_finished, make_frame, make_hello, make_model, token_of
from tests.kit.hubs import (
    EVERYTHING,
    Later,
    Recorder,
    address,
    configured,
    raw_peer,
    running_hub,
    scheduler_link,
    worker_link,
)
from tests.kit.waiting import eventually

__all__ = ["address"]

LAST = CaptureSpec({"post_block": [1]}, "last_prompt")


def send(link, *args, **kwargs):
    frame = make_frame(*args, **kwargs)
    return link.send(frame.header, frame.payload)


def send_request(link, request="r1", *, prompt=4, generated=3, sites=((0, "post_block"),), **kwargs):
    """Send a request whole: its prompt, each generated token, its end."""
    assert send(link, [(request, prompt, 0, prompt)], sites, step=0, **kwargs) is None
    for token in range(generated - 1):
        assert send(link, [(request, prompt, prompt + token, 1)], sites, step=1 + token, **kwargs) is None
    computed = prompt + generated - 1
    capture = (kwargs.get("captures") or {}).get(request)
    end = make_finished(request, prompt, computed, rows=computed * len(sites), capture=capture)
    kwargs.pop("captures", None)
    assert send(link, [], finished=[end], step=generated, **kwargs) is None


class TestWhatAConsumerIsGiven:
    def test_all_rows_of_a_request_and_then_its_end(self, address):
        consumer = Recorder()
        with running_hub(address, consumer), worker_link(address) as link:
            send_request(link, "r1", prompt=4, generated=3)
            eventually(lambda: consumer.done)
            site = Site(0, "post_block")
            assert consumer.positions == [("r1", site, position) for position in range(6)]
            done = consumer.done["r1"]
            assert (done.status, done.prompt_length, done.computed_length) == ("stop", 4, 6)
            assert (done.rows, done.rows_promised, done.dropped) == (6, 6, ())

    def test_the_order_of_events(self, address):
        consumer = Recorder()
        with running_hub(address, consumer), worker_link(address) as link, scheduler_link(address):
            send_request(link)
            eventually(lambda: consumer.idle)
        assert consumer.events == ["open", ("session", "engine-1"), ("done", "r1"), "close"]
        assert len(consumer.threads) == 1
        assert threading.current_thread() not in consumer.threads

    def test_only_what_it_wants(self, address):
        last, everything = Recorder("last", LAST), Recorder("everything")
        sites = [(0, "post_block"), (1, "post_block"), (1, "mlp_in")]
        with running_hub(address, last, everything), worker_link(address) as link:
            send_request(link, prompt=4, generated=3, sites=sites)
            eventually(lambda: last.done and everything.done)
            assert last.positions == [("r1", Site(1, "post_block"), 3)]
            assert everything.rows["r1"] == 12
            assert last.done["r1"].rows == 1

    def test_what_requests_ask_for_if_it_reads_them(self, address):
        asked = CaptureSpec({"mlp_in": [2]}, "all_generated")
        reader = Recorder("reader", None, reads_requests=True)
        both = Recorder("both", LAST, reads_requests=True)
        own = Recorder("own", LAST)
        sites = [(1, "post_block"), (2, "mlp_in")]
        with running_hub(address, reader, both, own), worker_link(address) as link, Client(address) as client:
            send_request(link, "asks", sites=sites, captures={"asks": asked})
            send_request(link, "does-not", sites=sites)
            results = client.results(["asks", "does-not"], timeout=20)
            asks = {(r, s, p) for r, s, p in reader.positions}
            assert asks == {("asks", Site(2, "mlp_in"), 4), ("asks", Site(2, "mlp_in"), 5)}
            assert both.rows == {"asks": 3, "does-not": 1}
            assert own.rows == {"asks": 1, "does-not": 1}
            assert results["does-not"]["reader"] == CaptureResult("not_requested")
            assert results["asks"]["both"] == CaptureResult("ok", payload={"rows": 3})
            assert "does-not" not in reader.done

    def test_frames_of_many_requests_each_to_its_place(self, address):
        consumer = Recorder(spec=CaptureSpec({"post_block": "all"}, "all_generated"))
        with running_hub(address, consumer), worker_link(address) as link:
            requests = [(f"r{n}", 2 + n, 0, 4 + n) for n in range(8)]
            send(link, requests, [(0, "post_block"), (3, "post_block")])
            eventually(lambda: len(consumer.rows) == 8)
            assert consumer.rows == {f"r{n}": 4 for n in range(8)}
            assert token_of("r1", 0) != token_of("r2", 0)

    def test_the_end_only_when_every_pipeline_stage_has_sent_it(self, address):
        consumer, model = Recorder(), make_model(stages=2)
        first = make_hello(model=model, boot="a", rank=Rank(0, 0, 0))
        second = make_hello(model=model, boot="b", rank=Rank(1, 0, 0))
        with (
            running_hub(address, consumer) as hub,
            worker_link(address, first) as link0,
            worker_link(address, second) as link1,
        ):
            send_request(link0, boot="a", rank=Rank(0, 0, 0), sites=[(0, "post_block")])
            eventually(lambda: consumer.rows["r1"] == 6)
            eventually(lambda: link0.counters["unacked_frames"] == 0)
            assert hub.snapshot().requests_open == 1
            send_request(link1, boot="b", rank=Rank(1, 0, 0), sites=[(3, "post_block")])
            eventually(lambda: consumer.done)
            assert consumer.rows["r1"] == 12
            assert consumer.done["r1"].rows_promised == 12
            assert len(consumer.done["r1"].finished) == 2

    def test_replicas_of_one_engine_apart(self, address):
        consumer = Recorder()
        with (
            running_hub(address, consumer),
            worker_link(address, make_hello(boot="a", rank=Rank(0, 0, 0))) as link0,
            worker_link(address, make_hello(boot="b", rank=Rank(0, 1, 0))) as link1,
        ):
            send_request(link0, "r0", boot="a", rank=Rank(0, 0, 0))
            send_request(link1, "r1", boot="b", rank=Rank(0, 1, 0))
            eventually(lambda: len(consumer.done) == 2)

    def test_what_its_worker_dropped(self, address):
        consumer = Recorder()
        with running_hub(address, consumer) as hub, worker_link(address) as link, Client(address) as client:
            send(link)
            send(link, [], finished=[make_finished(computed_length=9, rows=4, dropped=(Dropped(5, "queue_full"),))])
            result = client.results(["r1"], timeout=20)["r1"]["recorder"]
            assert (result.status, result.error) == ("partial_error", "5 rows lost: queue_full")
            assert consumer.done["r1"].dropped == (Dropped(5, "queue_full"),)
            assert hub.snapshot().rows_lost == 5

    def test_what_an_earlier_hub_had(self, address):
        consumer = Recorder()
        with running_hub(address, consumer), worker_link(address) as link, Client(address) as client:
            send(link, [("r1", 4, 4, 1)], finished=[make_finished(computed_length=5, rows=5)])
            result = client.results(["r1"], timeout=20)["r1"]["recorder"]
            assert (result.status, result.error) == (
                "partial_error",
                "4 rows lost: earlier_hub, at post_block:0 positions 0..3",
            )

    @pytest.mark.parametrize("split", [False, True])
    @pytest.mark.parametrize(
        ("earlier", "places"),
        [(8, {(site, n) for site in ("post_block:0", "post_block:3") for n in range(4)}), (4, set())],
    )
    def test_what_an_earlier_hub_had_of_a_step_in_several_frames(self, address, split, earlier, places):
        """Of eight rows, four may be those of either site, or of some positions."""
        consumer = Recorder()
        both = [(0, "post_block"), (3, "post_block")]
        parts = [[site] for site in both] if split else [both]
        with running_hub(address, consumer), worker_link(address) as link:
            for sites in parts:
                send(link, [("r1", 4, 4, 1)], sites=sites, step=7)
            send(link, [("r1", 4, 5, 1)], sites=both, step=8)
            send(link, [], finished=[make_finished(computed_length=6, rows=earlier + 4)])
            eventually(lambda: consumer.done)
        (dropped,) = consumer.done["r1"].dropped
        assert (dropped.rows, dropped.reason) == (earlier, "earlier_hub")
        assert {(s, n) for gap in dropped.gaps for s in gap.sites for n in range(gap.start, gap.stop)} == places


def room_for(frames):
    """Return the size of a queue in which so many frames of one request have room, and not one more."""
    size = Frame.decode(*make_frame([("r1", 4, 0, 4)]).encode()).memory_bytes
    return frames * size + size // 2  # headers grow by some bytes with the numbers in them


class TestWhenFull:
    def test_a_slow_consumer_that_drops_slows_no_other(self, address):
        slow, fast = Recorder("slow", held=True), Recorder("fast")
        with (
            running_hub(address, configured(slow, "drop", room_for(2)), configured(fast)) as hub,
            worker_link(address) as link,
            Client(address) as client,
        ):
            send(link, [("r1", 4, 0, 4)])
            assert slow.waiting.wait(20)
            for step in range(1, 200):
                assert send(link, [("r1", 4, step * 4, 4)], step=step) is None
            send(link, [], finished=[make_finished(computed_length=800, rows=800)])
            eventually(lambda: fast.done)  # while the other has not handled its first frame
            assert fast.rows["r1"] == 800
            assert not slow.rows
            slow.go.set()
            results = client.results(["r1"], timeout=20)["r1"]
            assert results["fast"].status == "ok"
            assert slow.rows["r1"] == 3 * 4
            assert slow.seqs == [1, 2, 3]
            assert results["slow"].status == "partial_error"
            assert results["slow"].error == "788 rows lost: consumer_queue_full, at post_block:0 positions 12..799"
            assert slow.done["r1"].rows + slow.done["r1"].dropped[0].rows == 800
            assert hub.snapshot().dropped_rows == {"consumer_queue_full": 788}

    def test_a_consumer_that_skips_is_given_the_newest_and_told_what_it_missed(self, address):
        live = Recorder(held=True)
        queue = room_for(3)
        with running_hub(address, configured(live, "skip", queue)) as hub, worker_link(address) as link:
            send(link, [("r1", 4, 0, 4)])
            assert live.waiting.wait(20)
            for step in range(1, 100):
                assert send(link, [("r1", 4, step * 4, 4)], step=step) is None
            send(link, [], finished=[make_finished(computed_length=400, rows=400)])
            eventually(lambda: hub.counts.frames == 101)
            assert hub.lanes[0].queue.nbytes <= queue
            live.go.set()
            eventually(lambda: live.done)
            assert live.seqs == [1, 98, 99, 100]
            assert live.done["r1"].rows == live.rows["r1"] == 4 * 4
            assert [(dropped.rows, dropped.reason) for dropped in live.done["r1"].dropped] == [(96 * 4, "skipped")]
            assert hub.snapshot().dropped_rows == {"skipped": 96 * 4}

    def test_a_consumer_that_blocks_loses_nothing(self, address):
        slow = Recorder("slow", held=True)
        frame_bytes = make_frame().nbytes
        with (
            running_hub(address, configured(slow, "block", frame_bytes * 8)) as hub,
            worker_link(address, outbound_bytes_max=frame_bytes * 8) as link,
        ):
            results = []

            def run():
                results.extend(send(link, [("r1", 4, step * 4, 4)], step=step) for step in range(100))

            thread = threading.Thread(target=run)
            thread.start()
            assert slow.waiting.wait(20)
            eventually(lambda: link.counters["queued_bytes"] > 0)
            assert thread.is_alive()  # the worker waits
            assert hub.snapshot().queued_bytes <= room_for(8)
            slow.go.set()
            thread.join(20)
            eventually(lambda: slow.rows["r1"] == 400)
            assert results == [None] * 100
            assert slow.seqs == list(range(1, 101))

    def test_a_full_consumer_stops_neither_the_others_nor_the_hub(self, address):
        full, other = Recorder("full", held=True), Recorder("other")
        with (
            running_hub(address, configured(full, "block", 1), configured(other)) as hub,
            worker_link(address) as link,
            worker_link(address, make_hello("engine-2", "boot-2")) as link2,
            scheduler_link(address) as scheduler,
            Client(address) as client,
        ):
            for step in range(20):
                send(link, [("r1", 4, step * 4, 4)], step=step)
            assert full.waiting.wait(20)
            send(link2, [("x", 4, 0, 4)], engine="engine-2", boot="boot-2")
            eventually(lambda: other.rows["x"] == 4)
            assert client.status()["consumers"]["full"]["queued"] >= 1

            def applies():
                acts = []
                eventually(lambda: acts.extend(scheduler.actions()) or acts)
                scheduler.outcome(ActionApplied(acts[0].id, 5))

            thread = threading.Thread(target=applies)
            thread.start()
            assert client.act(Abort("r1"), 20).step == 5
            thread.join(20)
            full.go.set()
            eventually(lambda: full.rows["r1"] == 80 and other.rows["r1"] == 80)
            assert hub.counts.protocol_errors == 0

    def test_credit_comes_back_when_nobody_wants_a_frame(self, address):
        with running_hub(address, Recorder(spec=LAST)) as hub, worker_link(address) as link:
            for step in range(20):
                send(link, [("r1", 4, step * 4, 4)], step=step)
            eventually(lambda: hub.counts.frames == 20 and link.counters["unacked_frames"] == 0)
            assert link.counters["credit_bytes"] == link.welcome.credit_bytes


class TestConsumersThatFail:
    def test_an_exception_is_told_to_its_requests_and_to_nobody_else(self, address, caplog):
        failing, other = Recorder("failing", fails_on=("bad",)), Recorder("other")
        with (
            running_hub(address, failing, other) as hub,
            worker_link(address) as link,
            Client(address) as client,
        ):
            send_request(link, "bad")
            send_request(link, "good")
            results = client.results(["bad", "good"], timeout=20)
            assert results["bad"]["failing"].status == "error"
            assert results["bad"]["failing"].error == "failing.on_frame: ValueError: no bad"
            assert results["bad"]["other"].status == "ok"
            assert results["good"]["failing"].status == "ok"
            assert hub.status()["consumers"]["failing"]["errors"] == 3
            assert sum("on_frame failed" in record.message for record in caplog.records) == 1

    def test_one_bad_frame_of_several_is_a_partial_error(self, address):
        failing = Recorder("failing")
        with running_hub(address, failing), worker_link(address) as link, Client(address) as client:
            send(link, [("r1", 4, 0, 4)], step=0)
            eventually(lambda: failing.rows["r1"] == 4)
            failing.fails_on = ("r1",)
            send(link, [("r1", 4, 4, 1)], step=1, finished=[make_finished(computed_length=5)])
            assert client.results(["r1"], timeout=20)["r1"]["failing"].status == "partial_error"

    @pytest.mark.parametrize("method", ["on_session", "on_request_done", "on_idle", "close"])
    def test_none_of_its_methods_ends_the_hub(self, address, method):
        class Failing(Recorder):
            pass

        def fail(self, *_):
            raise RuntimeError(method)

        setattr(Failing, method, fail)
        failing, other = Failing("failing"), Recorder("other")
        with running_hub(address, failing, other) as hub, worker_link(address) as link, Client(address) as client:
            send_request(link)
            results = client.results(["r1"], timeout=20)["r1"]
            assert results["other"].status == "ok"
            expected = ("error", "failing.on_request_done: RuntimeError: on_request_done")
            assert (results["failing"].status, results["failing"].error) == (
                expected if method == "on_request_done" else ("ok", None)
            )
            if method == "on_idle":
                eventually(lambda: hub.snapshot().errors)
        assert hub.snapshot().errors

    def test_a_result_may_come_later_and_from_another_thread(self, address):
        later = Later("later")
        with running_hub(address, later) as hub, worker_link(address) as link, Client(address) as client:
            for request in ("right", "wrong", "last"):
                send_request(link, request)
            eventually(lambda: len(later.futures) == 3)
            assert client.results(["right"], timeout=0.2)["right"]["later"].status == "pending"
            eventually(lambda: later.idle)  # its thread is not held up
            threading.Thread(
                target=later.futures["right"].set_result, args=(CaptureResult("ok", payload={"n": 7}),)
            ).start()
            later.futures["wrong"].set_exception(RuntimeError("no disk"))
            results = {name: client.results([name], timeout=20)[name]["later"] for name in ("right", "wrong")}
            assert results["right"] == CaptureResult("ok", payload={"n": 7})
            assert results["wrong"] == CaptureResult("error", "later.on_request_done: RuntimeError: no disk")
            assert hub.status()["consumers"]["later"]["errors"] == 1
        assert later.futures["last"].done()  # by `close`

    def test_a_result_that_does_not_come_is_trouble(self, address, monkeypatch):
        monkeypatch.setattr(limits, "CALL_S_MAX", 0.3)
        later = Later("later")
        with running_hub(address, later) as hub, worker_link(address) as link:
            assert hub.status()["consumers"]["later"]["trouble"] is None
            send_request(link)
            eventually(lambda: "without a result" in (hub.status()["consumers"]["later"]["trouble"] or ""))
            later.futures["r1"].set_result(CaptureResult("ok"))
            eventually(lambda: hub.status()["consumers"]["later"]["trouble"] is None)

    def test_that_cannot_be_opened_stops_the_start_and_closes_the_others(self, address):
        class Broken(Recorder):
            def open(self, context):
                raise OSError("disk is gone")

        before, broken = Recorder("before"), Broken("broken")
        with (
            pytest.raises(CapflowError, match="consumer broken cannot be opened: got OSError: disk is gone"),
            running_hub(address, before, broken),
        ):
            pass
        assert before.events == ["open", "close"]
        with running_hub(address, Recorder()):  # the address is free again
            pass


class TestEnginesThatGoAway:
    def test_bye_ends_its_open_requests(self, address):
        consumer = Recorder()
        with running_hub(address, consumer) as hub, Client(address) as client:
            with worker_link(address) as link:
                send(link, [("r1", 4, 0, 4)])
                eventually(lambda: consumer.rows["r1"] == 4)
            result = client.results(["r1"], timeout=20)["r1"]["recorder"]
            assert result.status == "partial_error"
            assert "engine is gone" in result.error
            assert consumer.done["r1"].status == "error"
            assert consumer.done["r1"].rows_promised == 4
            assert (hub.snapshot().requests_failed, hub.snapshot().requests_open) == (1, 0)

    def test_silence_ends_its_open_requests(self, address, monkeypatch):
        monkeypatch.setattr(limits, "SILENCE_S_MAX", 0.3)
        consumer = Recorder()
        with running_hub(address, consumer) as hub, raw_peer(address) as peer:
            peer.send(message.encode(make_hello()))
            peer.send_multipart(make_frame().encode())
            eventually(lambda: consumer.done)
            assert consumer.done["r1"].status == "error"
            assert hub.counts.sessions_lost == 1

    def test_a_new_boot_of_a_worker_ends_what_the_old_one_ran(self, address, monkeypatch):
        monkeypatch.setattr(limits, "NAME_KEPT_S", 0.1)  # the old one is gone, and the hub cannot know it
        monkeypatch.setattr(limits, "REFUSED_S", 0.1)
        consumer = Recorder()
        with running_hub(address, consumer), raw_peer(address) as old:
            old.send(message.encode(make_hello(boot="old")))
            old.send_multipart(make_frame(boot="old").encode())
            eventually(lambda: consumer.rows["r1"] == 4)
            with worker_link(address, make_hello(boot="new"), wait=False) as link:
                eventually(lambda: "r1" in consumer.done)
                assert consumer.done["r1"].status == "error"
                eventually(lambda: link.connected)
                send_request(link, "r2", boot="new")
                eventually(lambda: "r2" in consumer.done)
                assert consumer.done["r2"].status == "stop"

    def test_an_engine_that_comes_back_is_announced_again(self, address):
        consumer = Recorder()
        with running_hub(address, consumer) as hub:
            for _ in range(2):
                with worker_link(address):
                    pass
                eventually(lambda: not hub.snapshot().sessions)
        assert consumer.events.count(("session", "engine-1")) == 2

    def test_the_hubs_own_end_leaves_no_request_half_done(self, address):
        consumer = Recorder()
        with worker_link(address, wait=False) as link:
            with running_hub(address, consumer):
                assert link.wait_welcome(20)
                send(link, [("r1", 4, 0, 4)])
                eventually(lambda: consumer.rows["r1"] == 4)
            assert consumer.events[-2:] == [("done", "r1"), "close"]
            assert consumer.done["r1"].status == "error"


class TestActions:
    def answering(self, link, outcome):
        """Answer the next action that a scheduler gets."""

        def run():
            acts = []
            eventually(lambda: acts.extend(link.actions()) or acts)
            link.outcome(outcome(acts[0]))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def test_without_an_engine_are_rejected(self, address):
        with running_hub(address, Recorder()), Client(address) as client:
            outcome = client.act(Unsteer("r1"), 20)
            assert isinstance(outcome, Rejected)
            assert outcome.reason.startswith("action: no engine is connected to this hub")

    def test_go_to_the_engine_that_runs_the_request(self, address):
        with (
            running_hub(address, Recorder()),
            worker_link(address) as link,
            scheduler_link(address) as mine,
            scheduler_link(address, make_hello("engine-2", "s2", role="scheduler")) as other,
            Client(address) as client,
        ):
            send(link, [("r1", 4, 0, 4)])
            eventually(
                lambda: "r1" in str(client.results(["r1"], wait=False)) and client.results(["r1"], wait=False)["r1"]
            )
            thread = self.answering(mine, lambda act: ActionApplied(act.id, 3))
            outcome = client.act(Steer("r1", ()), 20)
            thread.join(20)
            assert outcome.step == 3
            assert other.actions() == []

    def test_on_unknown_requests_go_to_every_replica_and_applied_wins(self, address):
        with (
            running_hub(address, Recorder()),
            scheduler_link(address) as one,
            scheduler_link(address, make_hello(boot="s2", role="scheduler", rank=Rank(0, 1, 0))) as two,
            Client(address) as client,
        ):
            threads = [
                self.answering(one, lambda act: Rejected(act.id, "not mine")),
                self.answering(two, lambda act: ActionApplied(act.id, 8)),
            ]
            assert client.act(Abort("r1"), 20).step == 8
            for thread in threads:
                thread.join(20)

    def test_rejected_by_all_are_rejected(self, address):
        with running_hub(address, Recorder()) as hub, scheduler_link(address) as link, Client(address) as client:
            thread = self.answering(link, lambda act: Rejected(act.id, "request r1: not running"))
            assert client.act(Abort("r1"), 20).reason == "request r1: not running"
            thread.join(20)
            assert hub.status()["actions"] == {"applied": 0, "rejected": 1, "unknown": 0, "waiting": 0}

    def test_of_an_engine_that_leaves_are_rejected(self, address):
        with running_hub(address, Recorder()), raw_peer(address) as peer:
            peer.send(message.encode(Hello("client", "", "c")))
            peer.recv()
            with scheduler_link(address) as link:
                peer.send(message.encode(Act("mine", Abort("r1"))))
                eventually(link.actions)
            assert peer.poll(20_000)
            text = message.decode(peer.recv())
            assert text == ActionOutcome(Rejected("mine", "action: the engine left before it answered"))

    def test_of_a_consumer_are_sent_and_counted(self, address):
        consumer = Recorder()
        with running_hub(address, consumer) as hub, scheduler_link(address) as link:
            thread = self.answering(link, lambda act: ActionApplied(act.id, 1))
            consumer.context.act(Abort("r1"))
            consumer.context.count("flagged", 2)
            thread.join(20)
            eventually(lambda: hub.lanes[0].counts["actions_applied"] == 1)
            assert hub.status()["consumers"]["recorder"]["counts"] == {"flagged": 2, "actions_applied": 1}

    def test_are_off_where_other_machines_can_send_them(self):
        with (
            running_hub("tcp://0.0.0.0:0", Recorder(), insecure=True) as hub,
            Client(hub.address.replace("0.0.0.0", "127.0.0.1")) as client,
        ):
            assert client.act(Abort("r1"), 20).reason.startswith("actions are off")


class Watch(Controller):
    """A controller that fits models of 8 numbers."""

    name = "watch"

    class Config(msgspec.Struct, frozen=True):
        layer: int

    class State(msgspec.Struct, frozen=True):
        layer: int

    @classmethod
    def load(cls, config):
        return cls.State(config.layer)

    def spec(self):
        return CaptureSpec({"post_block": [self.state.layer]})

    def open(self, model):
        if model.hidden_size != 8:
            raise UsageError("watch: wrong width")

    def on_step(self, view):
        return []


class TestWhatTheHubWants:
    def test_reaches_schedulers(self, address):
        controller = ConfiguredController("watch", Watch, Watch.State(2))
        consumers = [Recorder("a", LAST), Recorder("b", None), Recorder("c", EVERYTHING)]
        with running_hub(address, *consumers, controllers=[controller]), scheduler_link(address) as link:
            assert link.welcome.captures == (LAST, EVERYTHING)
            assert [c.name for c in link.welcome.controllers] == ["watch"]
            assert msgspec.msgpack.decode(link.welcome.controllers[0].state, type=Watch.State) == Watch.State(2)

    @pytest.mark.parametrize(
        ("layer", "model", "reason"),
        [
            (
                7,
                make_model(),
                "controllers.watch.capture.hooks.post_block: got layer 7, expected 0..3, or -4..-1 from the last",
            ),
            (2, make_model(hidden=16), "watch: wrong width"),
        ],
    )
    def test_a_controller_that_does_not_fit_refuses_the_engine(self, address, layer, model, reason):
        refusals = []
        controller = ConfiguredController("watch", Watch, Watch.State(layer))
        with (
            running_hub(address, controllers=[controller], on_refused=lambda *refusal: refusals.append(refusal)),
            scheduler_link(address, make_hello(role="scheduler", model=model), wait=False) as link,
        ):
            eventually(lambda: link.refusal and refusals)
            assert link.refusal == reason
            assert refusals == [("engine-1", reason)]

    def test_that_a_model_has_no_tap_for_names_the_flag(self, address):
        model = make_model(hooks=["mlp_in"])
        with (
            running_hub(address, Recorder()),
            worker_link(address, make_hello(model=model), wait=False) as link,
        ):
            eventually(lambda: link.refusal)
            assert "start the engine with --sites post_block:*" in link.refusal


def test_a_worker_that_had_no_room_comes_back_and_loses_nothing(address, monkeypatch, caplog):
    monkeypatch.setattr(limits, "REFUSED_S", 0.2)
    consumer = Recorder()
    with running_hub(address, consumer) as hub:
        hub.roster.sessions = Shares("sessions", 2, unit="sessions")
        with worker_link(address), worker_link(address, make_hello("engine-2", "b2"), wait=False) as link:
            eventually(lambda: link.refusal)
            assert link.refusal.startswith("sessions: got 1 more sessions beside 0, expected at most 0 now")
            assert hub.counts.protocol_errors == 0
        with worker_link(address, make_hello("engine-3", "b3"), wait=False) as link:
            eventually(lambda: link.connected)
            send_request(link, "r3", engine="engine-3", boot="b3")
            eventually(lambda: consumer.done)
    assert caplog.text.count("refuses this worker") == 1


def test_status_counts_the_tokens_of_a_step_in_several_frames_once(address):
    with running_hub(address, Recorder()), worker_link(address) as link, Client(address) as client:
        send(link, [("r1", 4, 0, 4)], step=1)
        send(link, [("r1", 4, 2, 1)], sites=[(3, "post_block")], step=1)
        eventually(lambda: client.status()["frames"] == 2)
        status = client.status()
        (worker,) = [session for session in status["sessions"] if session["role"] == "worker"]
        (request,) = status["running_requests"]
        assert (status["tokens"], worker["step_tokens"], request["tokens"]) == (4, 4, 4)


def test_status_counts_what_went_through(address):
    consumer = Recorder()
    with running_hub(address, consumer) as hub, worker_link(address) as link, Client(address) as client:
        send_request(link, prompt=4, generated=3)
        client.results(["r1"], timeout=20)
        status = client.status()
        assert status["requests"] == {"open": 0, "done": 1, "failed": 0, "gapped": 0}
        assert (status["frames"], status["rows"], status["tokens"]) == (4, 6, 6)
        worker = next(s for s in status["sessions"] if s["role"] == "worker")
        assert (worker["engine"], worker["rank"], worker["rows"], worker["step_tokens"]) == (
            "engine-1",
            [0, 0, 0],
            6,
            6,
        )
        mine = status["consumers"]["recorder"]
        assert (mine["frames"], mine["rows"], mine["bytes"], mine["policy"]) == (3, 6, 6 * 8 * 4, "block")
        snapshot = hub.snapshot()
        assert (snapshot.requests_done, snapshot.tokens, snapshot.rows, snapshot.engines) == (1, 6, 6, 1)


def test_status_lists_the_oldest_running_requests_of_all_engines(address):
    most = limits.RUNNING_SHOWN_MAX
    hellos = [make_hello(f"engine-{number}", boot=f"b{number}") for number in (1, 2)]
    with (
        running_hub(address, Recorder()) as hub,
        worker_link(address, hellos[0]) as one,
        worker_link(address, hellos[1]) as two,
        Client(address) as client,
    ):

        def send(link, step, requests, **fields):
            hello = hellos[link is two]
            frame = make_frame(requests, step=step, engine=hello.engine, boot=hello.boot, **fields)
            assert link.send(frame.header, frame.payload) is None

        send(one, 0, [("a", 4, 0, 4), ("b", 3, 0, 2)])
        eventually(lambda: hub.counts.frames == 1)
        send(two, 0, [("c", 4, 0, 4)])
        eventually(lambda: hub.counts.frames == 2)
        send(one, 1, [("b", 3, 2, 1), *((f"d{number}", 4, 0, 1) for number in range(most))])
        eventually(lambda: hub.counts.frames == 3)
        running = client.status()["running_requests"]
        assert [each["id"] for each in running] == ["a", "b", "c", *(f"d{number}" for number in range(most - 3))]
        ages = [each.pop("age_s") for each in running]
        assert ages == sorted(ages, reverse=True)
        assert 0 <= ages[-1] <= ages[0] <= client.status()["uptime_s"]
        assert running[:3] == [
            {"id": "a", "engine": "engine-1", "prompt_length": 4, "tokens": 4, "rows": 4},
            {"id": "b", "engine": "engine-1", "prompt_length": 3, "tokens": 3, "rows": 3},
            {"id": "c", "engine": "engine-2", "prompt_length": 4, "tokens": 4, "rows": 4},
        ]
        send(one, 2, [], finished=[make_finished("a", computed_length=4)])
        eventually(lambda: client.status()["running_requests"][0]["id"] == "b")
        assert client.status()["requests"]["open"] == most + 2


def test_results_of_old_requests_are_forgotten(address, monkeypatch):
    monkeypatch.setattr(limits, "RESULTS_KEPT_MAX", 3)
    with running_hub(address, Recorder()), worker_link(address) as link, Client(address) as client:
        for number in range(5):
            send_request(link, f"r{number}")
        client.results(["r4"], timeout=20)
        entry = client.results([f"r{number}" for number in range(5)], wait=False)
        assert [bool(entry[f"r{number}"]) for number in range(5)] == [False, False, True, True, True]


def test_a_request_that_is_over_and_has_its_results_keeps_nothing_else(address, tmp_path):
    kept = configured(Recorder("kept"), "spill", spool_dir=tmp_path)
    with running_hub(address, Recorder(), kept) as hub, worker_link(address) as link, Client(address) as client:
        send_request(link, "r1")
        client.results(["r1"], timeout=20)
        done = hub.index.named("r1")[0]
        assert None not in done.results
        assert not any((done.received, done.finished, done.lost))
        eventually(lambda: not hub.lanes[1].requests.requests_open)
        assert hub.lanes[1].requests.named("r1") == []


def test_stop_is_bounded_though_a_consumer_hangs(address, caplog):
    consumer = Recorder(held=True)
    with worker_link(address, wait=False) as link:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, "GIVE_UP_S", 0.2)
            from capflow.hub.hub import Hub

            hub = Hub(address, [configured(consumer)])
            hub.start()
            assert link.wait_welcome(20)
            send(link)
            assert consumer.waiting.wait(20)
            before = time.monotonic()
            assert not hub.stop(0.2)
            assert time.monotonic() - before < 10
        assert "consumer recorder does not stop" in caplog.text
        consumer.go.set()


def test_the_status_has_what_is_off_in_an_engine(address):
    off = {"KV offloading": "x: missing"}
    hello = msgspec.structs.replace(make_hello(role="scheduler", boot="s"), off=off)
    with running_hub(address, Recorder()), raw_peer(address) as peer, Client(address) as client:
        peer.send(message.encode(hello))
        peer.recv()
        assert [each.get("off") for each in client.status()["sessions"] if each["role"] == "scheduler"] == [off]
