"""Requests of two engines that have one id: each is its own, whoever asks for it, acts on it or stores it."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import duckdb
import msgspec
import pytest
from click.testing import CliRunner

import capflow
from capflow import limits
from capflow.capture.frame import Rank
from capflow.cli import cli
from capflow.errors import UsageError
from capflow.protocol import message
from capflow.steering.action import Abort, ActionApplied, Rejected
from capflow.testing import MemoryHub
from capflow.text.engine_name import is_of, name_of, new_engine
from capflow.transport.client import Client
from capflow.transport.links.former import FormerLink
from capflow.transport.outbox import Outbox
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import Recorder, address, raw_peer, running_hub, scheduler_link, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]


class Counting(Recorder):
    """Says how many rows it was given of each engine's request."""

    def __init__(self):
        super().__init__()
        self.given = {}

    def on_frame(self, frame):
        for chunk in frame.chunks():
            key = frame.header.engine, chunk.request.id
            self.given[key] = self.given.get(key, 0) + chunk.rows.shape[0] * chunk.rows.shape[1]

    def on_request_done(self, done):
        result = super().on_request_done(done)
        result.payload["rows"] = self.given.get((done.engine, done.request), 0)
        return result


@pytest.fixture
def hub():
    """Return a hub that has a request `r1` of engine `a`, with one position, and one of engine `b`, with two."""
    with MemoryHub(Counting()) as hub:
        for number, name in enumerate(("a", "b"), start=1):
            engine = hub.engine(name, boot=f"boot-{name}")
            engine.step([("r1", 4, 0, number)])
            engine.finish("r1")
            engine.step([(f"only-{name}", 4, 0, 1)])
            engine.finish(f"only-{name}")
            engine.settle()
            hub.result("r1", name)
            hub.result(f"only-{name}")
        yield hub


class TestResults:
    def test_the_results_of_a_request_are_of_its_engine(self, address):
        with running_hub(address, Counting()) as hub, Client(address) as client:
            rows = both(hub, client, wait=False)
            assert rows["b"] == 2 * rows["a"] > 0

    def test_results_that_are_waited_for_are_of_the_engine_that_was_named(self, address):
        with running_hub(address, Counting()) as hub, Client(address) as client:
            rows = both(hub, client, wait=True)
            assert rows["b"] == 2 * rows["a"] > 0

    def test_an_id_that_several_engines_have_is_refused_with_their_names(self, address):
        with running_hub(address, Counting()) as hub, Client(address) as client:
            both(hub, client, wait=False)
            for wait in (False, True):
                with pytest.raises(UsageError, match=r"request r1: .* several engines .* one of a, b"):
                    client.results(["r1"], wait=wait, timeout=5)
            assert client.results(["r1"], engine="c", wait=False) == {"r1": {}}

    def test_an_id_that_one_engine_has_needs_no_name(self, hub):
        assert hub.results("only-a")["recorder"].status == "ok"

    def test_a_named_engine_is_asked_for_by_its_name_whichever_start_it_is(self):
        first, second = new_engine("prod"), new_engine("prod")
        assert first != second
        assert name_of(first) == name_of(second) == "prod"
        assert is_of(first, "prod")
        assert is_of(first, first)
        assert is_of(first, "")
        assert not is_of(first, second)
        with MemoryHub(Counting()) as hub:
            for start, positions in ((first, 1), (second, 3)):
                engine = hub.engine(start, boot=start)
                engine.step([("r1", 4, 0, positions)])
                engine.finish("r1")
                engine.settle()
                newest = hub.result("r1", start).payload["rows"]
                engine.lose()
            assert hub.result("r1", "prod").payload["rows"] == hub.result("r1").payload["rows"] == newest


def both(hub, client, *, wait):
    """Run a request `r1` of each of two engines; return what a client learns of the rows of each, by engine."""
    rows = {}
    peers = MemoryPeers(hub)
    for number, name in enumerate(("a", "b"), start=1):
        peers.run(name, number)
    for name in ("a", "b"):
        eventually(lambda name=name: client.results(["r1"], engine=name, wait=False)["r1"]["recorder"].status == "ok")
        rows[name] = client.results(["r1"], engine=name, wait=wait, timeout=20)["r1"]["recorder"].payload["rows"]
    return rows


class MemoryPeers(MemoryHub):
    """Engines in this process, of a hub that runs."""

    def __init__(self, hub):
        self.hub = hub

    def run(self, name, positions):
        engine = self.engine(name, boot=f"boot-{name}")
        engine.step([("r1", 4, 0, positions)])
        engine.finish("r1")
        engine.settle()

    def worker(self, name):
        """Return an engine without its scheduler, which the test plays.

        The hub has forgotten that scheduler when this returns: it would refuse another one beside it.
        """
        engine = self.engine(name, boot=f"boot-{name}")
        engine._scheduler.close()
        engine._scheduler = None
        assert self.asked(lambda: name not in {hello.engine for _, hello in self.hub.roster.schedulers()})
        return engine


class Scheduler:
    """An engine's scheduler that runs requests and takes every action that comes."""

    def __init__(self, stack, address, engine, running=()):
        hello = make_hello(engine, boot=f"scheduler-{engine}", role="scheduler")
        names = dict.fromkeys(running, f"{engine}-1")
        self.link = stack.enter_context(scheduler_link(address, hello, running=names.get))
        self.taken = []

    def turn(self):
        for act in self.link.actions():
            self.taken.append(act.action)
            self.link.outcome(ActionApplied(act.id, 1))


def acted(client_address, schedulers, action):
    """Have a client act; return the outcome and what each scheduler was asked to do."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool, Client(client_address) as client:
        answer = pool.submit(client.act, action, 20)
        eventually(lambda: [scheduler.turn() for scheduler in schedulers] and answer.done())
        return answer.result(), [len(scheduler.taken) for scheduler in schedulers]


class TestActions:
    def test_an_action_on_an_id_that_several_engines_have_is_rejected_with_their_names(self, address):
        with running_hub(address, Recorder()) as hub, contextlib.ExitStack() as stack:
            peers = [MemoryPeers(hub).worker(name) for name in ("a", "b")]
            schedulers = [Scheduler(stack, address, name, ["r1"]) for name in ("a", "b")]
            for peer in peers:
                peer.step([("r1", 4, 0, 1)])
                peer.settle()
            outcome, taken = acted(address, schedulers, Abort("r1"))
            assert isinstance(outcome, Rejected)
            assert "one of a, b" in outcome.reason
            assert taken == [0, 0]
            outcome, taken = acted(address, schedulers, Abort("r1", engine="b"))
            assert isinstance(outcome, ActionApplied)
            assert taken == [0, 1]

    def test_an_action_goes_to_the_engine_that_runs_its_request_and_to_no_other(self, address):
        with running_hub(address, Recorder()) as hub, contextlib.ExitStack() as stack:
            peer = MemoryPeers(hub).worker("a")
            schedulers = [Scheduler(stack, address, name, ["r1"]) for name in ("a", "b")]
            peer.step([("r1", 4, 0, 1)])
            peer.settle()
            assert acted(address, schedulers, Abort("r1"))[1] == [1, 0]

    def test_an_action_on_an_unknown_id_is_rejected_where_several_engines_may_run_it(self, address):
        with running_hub(address, Recorder()), contextlib.ExitStack() as stack:
            schedulers = [Scheduler(stack, address, name, ["r1"]) for name in ("a", "b")]
            outcome, taken = acted(address, schedulers, Abort("r1"))
            assert isinstance(outcome, Rejected)
            assert "one of a, b" in outcome.reason
            assert taken == [0, 0]
            outcome, taken = acted(address, schedulers, Abort("r1", engine="a"))
            assert isinstance(outcome, ActionApplied)
            assert taken == [1, 0]
            outcome, _ = acted(address, schedulers, Abort("r1", engine="c"))
            assert "engine of the action: got c, expected one that is connected: a, b" in outcome.reason

    def test_an_action_on_an_unknown_id_goes_to_the_only_engine(self, address):
        with running_hub(address, Recorder()), contextlib.ExitStack() as stack:
            schedulers = [Scheduler(stack, address, "a", ["r1"])]
            assert acted(address, schedulers, Abort("r1"))[1] == [1]

    def test_an_action_of_a_consumer_is_of_the_engine_whose_rows_it_is_given(self, address):
        class Aborting(Recorder):
            def on_frame(self, frame):
                super().on_frame(frame)
                if frame.header.engine == "b":
                    self.context.act(Abort("r1"))

        with running_hub(address, Aborting()) as hub, contextlib.ExitStack() as stack:
            peers = [MemoryPeers(hub).worker(name) for name in ("a", "b")]
            schedulers = [Scheduler(stack, address, name, ["r1"]) for name in ("a", "b")]
            for peer in peers:
                peer.step([("r1", 4, 0, 1)])
            eventually(lambda: [scheduler.turn() for scheduler in schedulers] and hub.relay.applied)
            assert [len(scheduler.taken) for scheduler in schedulers] == [0, 1]


class TestNames:
    @pytest.mark.parametrize("name", ["a", "prod-1", "A.b_c", "x" * 64])
    def test_a_name_is_taken(self, name):
        assert name_of(new_engine(name)) == name

    @pytest.mark.parametrize("name", ["", "a@b", "a/b", "-a", "a-", "x" * 65, "é", "a b", "a\n", 7])
    def test_what_is_no_name_is_refused(self, name):
        with pytest.raises(UsageError, match="engine_name"):
            new_engine(name)


def captured(root, rows, *, name="r1", **options):
    """Capture a request of one id of each engine in turn, with so many positions of it; return their results."""
    results = []
    consumer = FilesystemConsumer(FilesystemConfig(str(root), **options))
    with MemoryHub(consumer) as hub:
        for number, (engine, positions) in enumerate(rows):
            peer = hub.engine(engine, boot=f"boot-{number}")
            peer.step([(name, 4, 0, positions)])
            peer.finish(name)
            peer.settle()
            results.append(hub.result(name, engine))
            peer.lose()
    return results


LAYOUTS = ["packed", "per_file", "sharded"]


class TestFiles:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("on_collision", ["error", "suffix", "overwrite"])
    def test_requests_of_two_engines_lie_beside_each_other(self, tmp_path, layout, on_collision):
        if (layout, on_collision) == ("sharded", "overwrite"):
            pytest.skip("refused: shards only grow")
        results = captured(tmp_path, [("a", 1), ("b", 2)], layout=layout, on_collision=on_collision)
        assert [result.status for result in results] == ["ok", "ok"]
        dataset = capflow.open(tmp_path)
        rows = {name: len(dataset[name, "r1"]["post_block:0"].rows) for name in "ab"}
        assert rows == {"a": 1, "b": 2}
        assert ("c", "r1") not in dataset
        assert {capture.engine for capture in dataset} == {"a", "b"}
        with pytest.raises(UsageError, match=r"request r1 of several engines: .* one of a, b"):
            dataset["r1"]
        dataset.verify()

    @pytest.mark.parametrize("layout", ["packed", "per_file"])
    def test_a_request_is_overwritten_by_one_of_its_own_engine_alone(self, tmp_path, layout):
        first, second = new_engine("prod"), new_engine("prod")
        engines = [(first, 1), ("b", 2), (second, 3), ("b", 4)]
        results = captured(tmp_path, engines, layout=layout, on_collision="overwrite")
        assert [result.status for result in results] == ["ok"] * 4
        dataset = capflow.open(tmp_path)
        kept = sorted((capture.engine, len(capture["post_block:0"].rows)) for capture in dataset.captures("r1"))
        assert kept == sorted([(second, 3), ("b", 4)])
        assert len(dataset["prod", "r1"]["post_block:0"].rows) == 3

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_request_of_its_own_engine_is_an_error_and_stays(self, tmp_path, layout):
        results = captured(tmp_path, [("a", 1), ("b", 2), ("a", 3)], layout=layout, on_collision="error")
        assert [result.status for result in results] == ["ok", "ok", "error"]
        assert len(capflow.open(tmp_path)["a", "r1"]["post_block:0"].rows) == 1

    def test_two_ids_of_two_engines_need_no_engine(self, tmp_path):
        captured(tmp_path, [("a", 1)], name="mine")
        captured(tmp_path, [("b", 2)], name="yours")
        assert len(capflow.open(tmp_path)["yours"]["post_block:0"].rows) == 2


def test_a_database_has_the_rows_of_each_engines_request(tmp_path):
    consumer = DuckdbConsumer(DuckdbConfig(str(tmp_path / "x.duckdb"), site="post_block:0", vectors=True))
    with MemoryHub(consumer) as hub:
        peers = [hub.engine(name, boot=f"boot-{name}") for name in "ab"]
        for step in range(3):
            for number, peer in enumerate(peers, start=1):
                peer.step([("r1", 4, step * number, number)])
        for peer in peers:
            peer.finish("r1")
            peer.settle()
        assert [hub.result("r1", name).status for name in "ab"] == ["ok", "ok"]
    with duckdb.connect(str(tmp_path / "x.duckdb"), read_only=True) as result:
        ask = "SELECT engine, count(*), count(DISTINCT capture) FROM {} GROUP BY engine ORDER BY engine"
        assert result.sql(ask.format("tokens")).fetchall() == [("a", 3, 1), ("b", 6, 1)]
        assert result.sql(ask.format("requests")).fetchall() == [("a", 1, 1), ("b", 1, 1)]
        vectors = {engine: rows for engine, rows, _ in result.sql(ask.format("vectors")).fetchall()}
        assert vectors["b"] == 2 * vectors["a"] > 0


class TestOneEngineOfAName:
    def test_a_second_engine_of_a_name_is_refused_by_name(self, address):
        first, second = (make_hello(new_engine("prod"), boot=str(number)) for number in range(2))
        with running_hub(address, Recorder()), worker_link(address, first):
            with worker_link(address, second, wait=False) as link:
                assert link.wait_welcome(20) is None
                assert "engine name prod: got that of an engine that is connected" in link.refusal
                assert "--engine-name" in link.refusal
            with scheduler_link(address, make_hello(second.engine, role="scheduler"), wait=False) as link:
                assert link.wait_welcome(20) is None
            with worker_link(address, make_hello(new_engine("other"), boot="3")):
                pass

    def test_the_workers_and_the_scheduler_of_one_engine_have_its_name(self, address):
        hello = make_hello(new_engine("prod"), model=make_model(stages=2))
        stage = msgspec.structs.replace(hello, rank=Rank(1, 0, 0), boot="stage")
        scheduler = msgspec.structs.replace(hello, role="scheduler", boot="scheduler")
        links = worker_link(address, hello), worker_link(address, stage), scheduler_link(address, scheduler)
        with running_hub(address, Recorder()), links[0], links[1], links[2]:
            pass

    @pytest.mark.parametrize("role", ["worker", "scheduler"])
    def test_a_second_engine_of_an_id_is_refused_by_its_place(self, address, role):
        first = make_hello(new_engine(None, "run-1"), role=role, boot="first")
        second = msgspec.structs.replace(first, boot="second")
        elsewhere = msgspec.structs.replace(second, rank=Rank(0, 1, 0))
        link_of = worker_link if role == "worker" else scheduler_link
        with running_hub(address, Recorder()), link_of(address, first) as kept:
            with link_of(address, second, wait=False) as link:
                assert link.wait_welcome(20) is None
                refusal = f"engine run-1: got a second {role} of stage 0, replica 0, rank 0, expected one"
                assert refusal in link.refusal
                assert "--engine-id" in link.refusal
            assert kept.connected
            with link_of(address, elsewhere):
                pass

    def test_what_an_earlier_start_left_on_disk_comes_while_the_next_one_runs(self, address, tmp_path):
        recorder = Recorder()
        left = make_hello(new_engine("prod"), boot="left")
        outbox = Outbox(tmp_path / "left", left, 1 << 24)
        outbox.open()
        frame = make_frame([("r1", 4, 0, 4)], finished=[make_finished("r1")], engine=left.engine, boot="left")
        assert outbox.put(1, frame.header, frame.payload, 1.0) is None
        with running_hub(address, recorder), worker_link(address, make_hello(new_engine("prod"), boot="now")):
            link = FormerLink(str(address), outbox)
            link.start()
            try:
                eventually(lambda: "r1" in recorder.done)
            finally:
                link.close(1)
        assert recorder.done["r1"].engine == left.engine

    @pytest.mark.parametrize("start", [None, "run-1"])
    def test_a_name_is_free_when_its_engine_is_gone(self, address, monkeypatch, start):
        monkeypatch.setattr(limits, "NAME_KEPT_S", 0.2)
        monkeypatch.setattr(limits, "REFUSED_S", 0.1)
        first, second = (make_hello(new_engine("prod", start), boot=str(number)) for number in range(2))
        with running_hub(address, Recorder()) as hub, raw_peer(address) as dead:
            dead.send(message.encode(first))  # and not a word from there on
            dead.recv()
            with worker_link(address, second, wait=False) as link:
                eventually(lambda: link.connected)
            assert hub.snapshot().engines <= 1


def test_a_replay_of_two_starts_of_an_engine_keeps_the_request_of_each(tmp_path):
    first, second = new_engine("prod"), new_engine("prod")
    captured(tmp_path / "rows", [(first, 1), ("b", 2), (second, 3)], on_collision="suffix")
    consumer = f"filesystem:root={tmp_path / 'again'},on_collision=suffix"
    command = [sys.executable, "-m", "capflow", "replay", tmp_path / "rows", "--consumer", consumer]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    again = {capture.engine: len(capture["post_block:0"].rows) for capture in capflow.open(tmp_path / "again")}
    assert again == {first: 1, "b": 2, second: 3}


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["result", "r1"], 2, "one of a, b"),
        (["result", "r1", "--engine", "c"], 1, "request r1: unknown to the hub"),
        (["result", "r1", "--engine", "x" * 600], 2, "--engine: got xxx"),
        (["abort", "r1"], 1, "one of a, b; name it, e.g. with --engine"),
        (["unsteer", "r1", "--engine", "c"], 1, "engine of the action: got c, expected one that is connected: a, b"),
    ],
)
def test_a_command_says_in_one_line_which_engines_have_an_id(address, command, code, words):
    with running_hub(address, Recorder()) as hub:
        for name in ("a", "b"):
            peer = MemoryPeers(hub).engine(name, boot=f"boot-{name}")
            peer.step([("r1", 4, 0, 1)])
            peer.settle()
        result = CliRunner().invoke(cli, [*command, "--address", str(address)])
        assert isinstance(result.exception, UsageError) == (code == 2)
        assert words in str(result.exception)
        assert len(str(result.exception).splitlines()) == 1
