"""Recording and replay: consumers get the same calls again, byte for byte, whatever happened to engines and files."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

import capflow
from capflow.buffers.spool import Lost
from capflow.capture.frame import Acted, ActedOn, Frame, Weights
from capflow.capture.result import RequestDone
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, UsageError
from capflow.plugins.configure import ConfiguredConsumer, configure
from capflow.protocol import recording
from capflow.protocol.recording import Recorder
from capflow.replay.dataset import entries_of
from capflow.replay.player import Replay, ReplayPace
from capflow.steering.action import ActionApplied, Answered, Freeze, Rejected, Steer, Unknown
from capflow.steering.events import events_of
from capflow.testing import MemoryHub
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import Recorder as Watcher
from tests.kit.hubs import address, worker_link
from tests.kit.recordings import KNOWN, record, run, tree
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

__all__ = ["address"]


def filesystem(root, **options):
    return configure("filesystem", {"root": str(root), "fsync": False, "policy": "block", **options}, KNOWN)


def replay(path, *consumers, pace=None):
    """Replay a recording, or a data set; return the hub's final status and the replay."""
    with MemoryHub(*consumers) as hub:
        entries = recording.read(path) if recording.is_recording(path) else entries_of(capflow.open(path))
        replayed = Replay(hub.hub, pace or ReplayPace())
        replayed.run(entries)
        assert hub.stop()
        return hub.hub.status(), replayed


def requests(root: Path) -> dict[tuple[str, str, str], bytes]:
    """Return each file of a data set by engine, request and name; either of two engines may have its name."""
    contents = {}
    for sidecar in root.rglob("request.json"):
        kept = json.loads(sidecar.read_bytes())
        contents |= {
            (kept["engine"], kept["request"], path.name): path.read_bytes() for path in sidecar.parent.iterdir()
        }
    return contents


def busy(hub, seed):
    """Have two engines, one of two pipeline stages, run requests of all kinds, interleaved at random."""
    chance = random.Random(seed)
    halves = make_model(stages=2)
    half = len(halves.sites) // 2
    engines = [
        [hub.engine("single")],
        [hub.engine("split", model=halves, stage=stage, sites=halves.sites[half * stage :][:half]) for stage in (0, 1)],
    ]
    for stages in engines:
        open_requests: dict[str, tuple[int, int]] = {}
        for number in range(12):
            open_requests[f"r{number}"] = (chance.randint(1, 9), 0)
            while open_requests and (chance.random() < 0.7 or number == 11):
                names = chance.sample(sorted(open_requests), chance.randint(1, min(3, len(open_requests))))
                step = []
                for name in names:
                    prompt, done = open_requests[name]
                    length = chance.randint(1, prompt - done) if done < prompt else 1
                    step.append((name, prompt, done, length))
                    open_requests[name] = (prompt, done + length)
                over = {name: chance.choice(["stop", "length", "abort"]) for name in names if chance.random() < 0.35}
                for stage in chance.sample(stages, len(stages)):
                    stage.step(step, texts=number % 2 == 0)
                    for name, status in over.items():
                        stage.finish(name, status=status)
                for name in over:
                    del open_requests[name]
        for stage in stages:
            stage.finish("without-rows", status="abort")
            stage.step([("lossy", 4, 0, 4)])
            stage.finish("lossy", lost=[(7, "queue_full")])
            stage.step([("cut-off", 4, 0, 3)])
        for stage in stages:
            stage.settle()
            stage.lose()


class EngineWatcher(Watcher):
    """Keeps the calls of each engine apart, since the order of engines in a consumer's queue is not fixed."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = {}

    def on_session(self, engine, model):
        self.calls.setdefault(engine, []).append("session")

    def on_frame(self, frame):
        super().on_frame(frame)
        self.calls[frame.header.engine] += [
            (chunk.request.id, chunk.sites, chunk.start, chunk.rows.tobytes()) for chunk in frame.chunks()
        ]

    def on_request_done(self, done):
        self.calls[done.engine].append(msgspec.structs.replace(done, finished=()))
        return super().on_request_done(done)


def acted(frame, request, *positions):
    """Return a frame with the events of a gate at these positions of a request."""
    events = tuple(Acted("gate rude", "gate", (), 5, 10**18 + position, position) for position in positions)
    header = msgspec.structs.replace(frame.header, acted=(ActedOn(request, "i-1", events),))
    return Frame.seal(header, frame.payload)


def steered(hub):
    """Have a client and a worker steer a request, of which only the second of three frames has recorded rows."""
    engine = hub.engine()
    outcomes = [ActionApplied("a", 3, 0, "i-1"), Rejected("b", "no", "i-1"), Unknown("c", "no answer")]
    client = [Answered.of(Steer("r1", ()), each, engine=engine.name, asked_by="client") for each in outcomes]
    for number, (start, length) in enumerate([(0, 2), (2, 2), (4, 1)]):
        engine.send(acted(engine.made([("r1", 4, start, length)]), "r1", start, start + length - 1))
        engine.settle()
        hub.hub.tell(client[number])
    hub.hub.tell(Answered.of(Freeze(), outcomes[0], engine=engine.name, asked_by="client"))
    hub.hub.tell(Answered.of(Steer("unseen", ()), outcomes[0], engine=engine.name, asked_by="client"))
    engine.finish("r1", incarnation="i-1")
    engine.settle()
    assert hub.stop()


class EventWatcher(Watcher):
    """Keeps the events that it gets."""

    def __init__(self):
        super().__init__()
        self.told = []

    def on_action(self, answered):
        self.told.append(answered)


class TestARecordingReplayed:
    def test_gives_the_same_events_once_whatever_they_came_in(self, tmp_path):
        """The recorder has no rows of two of the frames."""
        live, again = EventWatcher(), EventWatcher()
        rows = {"positions": "last_prompt"}
        with MemoryHub(live, filesystem(tmp_path / "live", **rows), record(tmp_path / "rec", **rows)) as hub:
            steered(hub)
        replay(tmp_path / "rec", again, filesystem(tmp_path / "again", **rows))
        assert len(live.told) == 11
        assert sorted(again.told, key=lambda each: each.id) == sorted(live.told, key=lambda each: each.id)
        stored, again = (capflow.open(tmp_path / name)["r1"].events for name in ("live", "again"))
        assert again == stored
        assert [event.kind for event in stored].count("steer") == 3

    def test_has_each_event_once_also_if_it_came_again_after_a_kill(self, tmp_path):
        frame = acted(make_frame([("r1", 4, 0, 4)]), "r1", 0)
        (inside,) = events_of(frame.header)
        alone = Answered.of(Steer("r1", ()), ActionApplied("a", 3), engine="engine-1", asked_by="client")
        for _ in range(3):
            with Recorder(tmp_path / "rec") as recorder:
                recorder.frame(frame)
                recorder.event(inside)
                recorder.event(alone)
        kinds = [type(entry) for entry in recording.read(tmp_path / "rec")]
        assert kinds == [Frame, Answered]

    @pytest.mark.parametrize("seed", range(4))
    def test_gives_byte_for_byte_the_same_data_set(self, tmp_path, seed):
        with MemoryHub(filesystem(tmp_path / "live"), record(tmp_path / "rec")) as hub:
            busy(hub, seed)
            assert hub.stop()
        status, replayed = replay(tmp_path / "rec", filesystem(tmp_path / "again"))
        assert not any(lane["errors"] for lane in status["consumers"].values())
        assert replayed.records_lost == 0
        live, again = requests(tmp_path / "live"), requests(tmp_path / "again")
        assert len(live) > 25
        assert again == live
        assert tree(tmp_path / "again").keys() == tree(tmp_path / "live").keys()
        statuses = {json.loads(data)["status"] for (_, _, name), data in live.items() if name == "request.json"}
        assert statuses >= {"stop", "length", "abort", "error"}

    def test_a_replay_can_be_recorded_and_is_the_same_recording(self, tmp_path):
        with MemoryHub(record(tmp_path / "rec")) as hub:
            busy(hub, 5)
            assert hub.stop()
        replay(tmp_path / "rec", record(tmp_path / "again"))
        assert told(tmp_path / "again") == told(tmp_path / "rec")

    def test_consumers_are_told_the_same_of_each_engine_in_the_same_order(self, tmp_path):
        def watched():
            return EngineWatcher(spec=CaptureSpec({"post_block": "all", "mlp_in": "all"}))

        live, again = watched(), watched()
        with MemoryHub(live, record(tmp_path / "rec")) as hub:
            busy(hub, 6)
            assert hub.stop()
        replay(tmp_path / "rec", again)
        assert {name: calls.count("session") for name, calls in live.calls.items()} == {"single": 1, "split": 1}
        assert min(map(len, live.calls.values())) > 30
        assert again.calls == live.calls

    def test_frames_are_kept_as_they_came(self, tmp_path):
        sent = []
        with MemoryHub(record(tmp_path / "rec", layers=[0], positions="last_prompt")) as hub:
            engine = hub.engine()
            sent.append(engine.step([("r1", 4, 0, 2)]))
            sent.append(engine.step([("r1", 4, 2, 2), ("r2", 9, 0, 8)]))
            engine.finish("r1")
        kept = [item for item in recording.read(tmp_path / "rec") if isinstance(item, Frame)]
        assert [list(map(bytes, frame.encode())) for frame in kept] == [list(map(bytes, sent[1].encode()))]

    def test_what_the_recorder_was_not_given_is_counted(self, tmp_path):
        with MemoryHub(filesystem(tmp_path / "x"), record(tmp_path / "rec", positions="last_prompt")) as hub:
            engine = hub.engine(sites=[(0, "post_block")])
            engine.step([("r1", 4, 0, 4)])
            engine.step([("r1", 4, 4, 1)])
            engine.finish("r1")
        watcher = Watcher()
        replay(tmp_path / "rec", watcher)
        assert [(lost.rows, lost.reason) for lost in watcher.done["r1"].dropped] == [(1, "not_recorded")]

    def test_a_replica_that_dies_takes_only_its_own_requests_along(self, tmp_path):
        def told(watcher):
            return {name: (done.status, done.rows) for name, done in watcher.done.items()}

        live, again = Watcher(), Watcher()
        with MemoryHub(live, record(tmp_path / "rec")) as hub:
            replicas = [hub.engine(replica=replica, boot=f"boot-{replica}") for replica in (0, 1)]
            for step in range(3):
                for number, replica in enumerate(replicas):
                    replica.step([(f"r{number}", 3, step, 1)])
            replicas[1].settle()
            replicas[1].worker.close()
            eventually(lambda: "r1" in live.done)
            replicas[0].step([("r0", 3, 3, 1)])
            replicas[0].finish("r0")
            assert hub.stop()
        assert told(live) == {"r1": ("error", 12), "r0": ("stop", 16)}
        replay(tmp_path / "rec", again)
        assert told(again) == told(live)
        assert again.positions == live.positions

    def test_an_engine_that_a_consumer_cannot_use_is_refused_with_the_reason(self, tmp_path):
        with MemoryHub(record(tmp_path / "rec")) as hub:
            hub.engine().step([("r1", 4, 0, 4)])
        with pytest.raises(CapflowError, match=r"refused engine engine-1.*consumers\.filesystem.*layer"):
            replay(tmp_path / "rec", filesystem(tmp_path / "x", layers=[7]))

    def test_a_slow_consumer_holds_the_replay_up_and_loses_nothing(self, tmp_path):
        with MemoryHub(record(tmp_path / "rec")) as hub:
            engine = hub.engine()
            for step in range(200):
                engine.step([("r1", 200, step, 1)])
            engine.finish("r1")
        watcher = Watcher()
        status, _ = replay(tmp_path / "rec", ConfiguredConsumer.of(watcher, queue_bytes_max=2000))
        assert watcher.rows["r1"] == 4 * 200
        assert status["consumers"]["recorder"]["queue_bytes_peak"] < 25_000


def told(path):
    """Return the entries of each engine in a recording, in order."""
    of = {}
    for item in recording.read(path):
        engine = item.header.engine if isinstance(item, Frame) else getattr(item, "engine", None) or item.name
        content = (
            tuple(map(bytes, item.encode())) if isinstance(item, Frame) else msgspec.json.encode(item, enc_hook=str)
        )
        of.setdefault(engine, []).append(content)
    return of


class TestPace:
    def header(self, seconds, boot="b", step=0):
        return msgspec.structs.replace(make_frame(boot=boot, step=step).header, time_ns=int(seconds * 1e9))

    def test_full_speed_waits_for_nothing(self):
        pace = ReplayPace()
        assert [pace.due(self.header(t), now) for t, now in ((5, 1.0), (500, 1.5))] == [1.0, 1.5]

    def test_a_factor_makes_the_recorded_time_pass_faster(self):
        pace = ReplayPace(4.0)
        assert [pace.due(self.header(t), 100.0) for t in (5, 7, 6, 25)] == [100.0, 100.5, 100.25, 105.0]

    def test_steps_come_evenly_for_each_worker(self):
        pace = ReplayPace(None, 10.0)
        frames = [("a", 5), ("a", 6), ("b", 5), ("a", 7), ("a", 7), ("b", 6), ("a", 8)]
        due = [pace.due(self.header(0, boot, step), 3.0) for boot, step in frames]
        assert due == pytest.approx([3.0, 3.1, 3.0, 3.2, 3.2, 3.1, 3.3])

    def test_a_replay_keeps_the_pace(self, tmp_path):
        with MemoryHub(record(tmp_path / "rec")) as hub:
            engine = hub.engine()
            for step in range(5):
                engine.step([("r1", 5, step, 1)])
        rests = []
        with MemoryHub(Watcher()) as hub:
            replayed = Replay(hub.hub, ReplayPace(None, 50.0))
            replayed._rest = rests.append
            replayed.run(recording.read(tmp_path / "rec"))
        assert [b - rests[0] for b in rests] == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08])


class Frames(Watcher):
    """Keeps each frame whole."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.whole = []

    def on_frame(self, frame):
        super().on_frame(frame)
        self.whole.append((frame.header, bytes(frame.payload), frame.memory_bytes))


class TestFrames:
    """A replay does not encode frames; consumers get each as the hub had got it live."""

    @pytest.mark.parametrize("queue_bytes_max", [None, 4096])
    def test_are_the_live_ones(self, tmp_path, queue_bytes_max):
        live, again = Frames(), Frames()
        with MemoryHub(record(tmp_path / "rec"), live) as hub:
            engine = hub.engine()
            for number in range(70):
                engine.step([("r1", 300, 4 * number, 4)])
                engine.step([(f"s{number}", 8, 0, 8), ("r2", 100, number, 1)])
                engine.finish(f"s{number}")
            engine.finish("r1")
            engine.finish("r2")
            engine.settle()
        narrow = {} if queue_bytes_max is None else {"queue_bytes_max": queue_bytes_max}
        replay(tmp_path / "rec", ConfiguredConsumer.of(again, policy="block", **narrow))
        assert len(live.whole) == 140
        assert again.whole == live.whole
        assert again.done.keys() == live.done.keys()

    def test_of_several_workers_keep_their_order(self, tmp_path):
        """Frames that wait to be given together do not wait for those of another worker."""
        model, order = make_model(stages=2), []
        half = len(model.sites) // 2
        with MemoryHub(record(tmp_path / "rec")) as hub:
            stages = [hub.engine(model=model, stage=n, sites=model.sites[half * n :][:half]) for n in (0, 1)]
            for number, at in enumerate([0, 0, 1, 0, 1, 1, 1, 0, 0, 1]):
                stages[at].step([("r1", 40, 4 * number, 4)])
                stages[at].settle()
                order.append((at, 4 * number))
        consumer = Frames()
        replay(tmp_path / "rec", consumer)
        assert [(header.rank.pp, header.requests[0].start) for header, *_ in consumer.whole] == order

    def test_with_another_checksum_are_left_out_and_counted(self, tmp_path):
        with Recorder(tmp_path) as recorder:
            recorder.engine("engine-1", make_model())
            for number in range(3):
                frame = make_frame([("r1", 12, 4 * number, 4)], seq=number + 1)
                header = msgspec.structs.replace(frame.header, xxh3=frame.header.xxh3 ^ (number == 1))
                recorder.frame(Frame(header, frame.payload))
        consumer = Frames()
        _, replayed = replay(tmp_path, consumer)
        assert (replayed.records_lost, replayed.frames) == (1, 2)
        assert [header.requests[0].start for header, *_ in consumer.whole] == [0, 8]


class TestARecordingThatWasCutShort:
    CHILD = """
        import os, signal, sys
        from capflow.plugins.configure import configure, load_plugins
        from capflow.testing import MemoryHub
        hub = MemoryHub(configure("record", {"path": sys.argv[1]}, load_plugins())).__enter__()
        engine = hub.engine()
        engine.step([("r1", 4, 0, 4)])
        engine.finish("r1")
        assert hub.result("r1").status == "ok"
        engine.step([("r2", 4, 0, 2)])
        engine.settle()
        os.kill(os.getpid(), signal.SIGKILL)
    """

    def test_is_whole_up_to_there_and_is_gone_on_with(self, tmp_path):
        path = tmp_path / "rec"
        child = subprocess.run([sys.executable, "-c", textwrap.dedent(self.CHILD), path], timeout=60, check=False)
        assert child.returncode == -signal.SIGKILL
        kinds = [type(entry).__name__ for entry in recording.read(path)]
        assert kinds == ["RecordedEngine", "Frame", "RequestDone", "Frame"]
        with MemoryHub(record(path)) as hub:
            engine = hub.engine()
            engine.step(
                [("r1", 4, 0, 4)]
            )  # what was acknowledged is sent again all the same: it is known by its number
            engine.finish("r1")
            engine.step([("r2", 4, 0, 2)])
            engine.step([("r2", 4, 2, 2)])
            engine.finish("r2")
            assert hub.result("r2").status == "ok"
            assert hub.lanes[0].counts["frames_again"] == 2
        watcher = Watcher()
        replay(path, watcher)
        assert dict(watcher.rows) == {"r1": 16, "r2": 16}
        assert not any(done.dropped for done in watcher.done.values())

    def test_what_is_damaged_is_named_and_the_rest_is_said(self, tmp_path, capsys):
        path = tmp_path / "rec"
        with MemoryHub(record(path)) as hub:
            engine = hub.engine(sites=[(0, "post_block")])
            for step in range(3):
                engine.step([("r1", 3, step, 1)])
            engine.finish("r1")
        (segment,) = path.glob("*.spool")
        data = bytearray(segment.read_bytes())
        payload = next(
            item for item in recording.read(path) if isinstance(item, Frame) and item.header.seq == 2
        ).payload
        data[data.index(bytes(payload)) + 3] ^= 4
        segment.write_bytes(data)
        assert [item.first for item in recording.read(path) if isinstance(item, Lost)] == [3]
        watcher = Watcher()
        _, replayed = replay(path, watcher)
        assert replayed.records_lost == 1
        assert watcher.rows["r1"] == 2
        assert [(lost.rows, lost.reason) for lost in watcher.done["r1"].dropped] == [(1, "not_recorded")]
        assert run(["replay", str(path), "--consumer", "log"]) == 1
        assert "1 records of" in " ".join(capsys.readouterr().err.split())

    def test_a_full_recording_says_so_and_keeps_what_it_has(self, tmp_path):
        with MemoryHub(record(tmp_path / "rec", bytes_max=24_000)) as hub:
            engine = hub.engine()
            engine.step([("r1", 4, 0, 4)])
            engine.finish("r1")
            assert hub.result("r1").status == "ok"
            for step in range(20):
                engine.step([("r2", 80, 4 * step, 4)])
            engine.finish("r2")
            result = hub.result("r2")
            assert result.status == "partial_error"
            assert "is full" in result.error
        watcher = Watcher()
        replay(tmp_path / "rec", watcher)
        assert watcher.rows["r1"] == 16

    def test_two_processes_do_not_write_one(self, tmp_path):
        with Recorder(tmp_path / "rec"), pytest.raises(CapflowError, match="in use"), Recorder(tmp_path / "rec"):
            pass


class TestADataSetReplayed:
    @pytest.mark.parametrize(
        "options", [{}, {"positions": "last_prompt+every:2"}, {"dtype": "float16", "hooks": "post_block+mlp_in"}]
    )
    def test_gives_the_same_data_set_but_for_the_names_of_its_frames(self, tmp_path, options):
        with MemoryHub(filesystem(tmp_path / "live", **options)) as hub:
            busy(hub, 3)
            assert hub.stop()
        replay(tmp_path / "live", filesystem(tmp_path / "again", **options))
        assert tree(tmp_path / "again").keys() == tree(tmp_path / "live").keys()
        live, again = requests(tmp_path / "live"), requests(tmp_path / "again")
        assert set(again) == set(live)
        unlike = {name for name in live if again[name] != live[name]}
        assert {file for _, _, file in unlike} <= {"request.json"}
        for name in unlike:
            before, after = (json.loads(files[name]) for files in (live, again))
            for sidecar in (before, after):
                del sidecar["sources"], sidecar["xxh3_64"]  # of the sidecar itself
                if "dtype" in options:
                    del sidecar["dtype"]  # that of capture is not stored twice
                if "positions" in options:
                    del sidecar["texts"]  # those of positions without rows are not said
            assert after == before, name

    def test_frames_and_results_keep_the_adapter_and_the_weights_of_each_position(self, tmp_path):
        used = (Weights(3, "a"), Weights(4, start=2))
        watcher = Watcher()
        with MemoryHub(filesystem(tmp_path / "live"), watcher) as hub:
            engine = hub.engine()
            for weights, (start, length) in zip(used, [(0, 2), (2, 3)], strict=True):
                frame = engine.made([("r1", 8, start, length)])
                parts = tuple(msgspec.structs.replace(part, adapter="lora") for part in frame.header.requests)
                header = msgspec.structs.replace(
                    frame.header, requests=parts, weights=msgspec.structs.replace(weights, start=0)
                )
                engine.send(Frame.seal(header, frame.payload))
            end = make_finished("r1", 8, 5, rows=5 * len(engine.sites))
            end = msgspec.structs.replace(end, adapter="lora", weights=used)
            engine.send(make_frame([], finished=[end], hidden=engine.model.hidden_size, seq=3, step=3))
            engine.settle()
            assert hub.stop()
        assert (watcher.done["r1"].adapter, watcher.done["r1"].weights) == ("lora", used)
        frames = [entry for entry in entries_of(capflow.open(tmp_path / "live")) if isinstance(entry, Frame)]
        seen = [(p.start, len(p.token_ids), p.adapter, f.header.weights) for f in frames for p in f.header.requests]
        assert seen == [(0, 2, "lora", Weights(3, "a")), (2, 3, "lora", Weights(4))]
        replay(tmp_path / "live", filesystem(tmp_path / "again"))
        again = capflow.open(tmp_path / "again")["r1"]
        assert (again.adapter, again.weights) == ("lora", used)

    def test_ends_of_engines_are_told(self, tmp_path):
        with MemoryHub(filesystem(tmp_path / "live")) as hub:
            busy(hub, 1)
        watcher = Watcher()
        replay(tmp_path / "live", watcher)
        assert watcher.done["cut-off"].status == "error"
        assert watcher.done["without-rows"].rows == 0

    def test_each_request_may_ask_for_what_is_stored_of_it(self, tmp_path):
        with MemoryHub(filesystem(tmp_path / "live", layers=[1])) as hub:
            engine = hub.engine()
            engine.step([("r1", 4, 0, 4)])
            engine.finish("r1")
        watcher = Watcher(spec=None, reads_requests=True)
        with MemoryHub(watcher) as hub:
            Replay(hub.hub, ReplayPace()).run(entries_of(capflow.open(tmp_path / "live"), ask=True))
        assert {str(site) for _, site, _ in watcher.positions} == {"post_block:1"}
        assert watcher.rows["r1"] == 4


class TestCommands:
    @pytest.fixture
    def recorded(self, tmp_path):
        with MemoryHub(filesystem(tmp_path / "set"), record(tmp_path / "rec")) as hub:
            engine = hub.engine()
            engine.step([("r1", 4, 0, 4)])
            engine.finish("r1")
        return tmp_path

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["{}/none", "--consumer", "log"], "none: got"),
            (["{}", "--consumer", "log"], "expected a recording (capflow record) or a data set"),
            (["{}/rec"], "--consumer: got none, expected at least one"),
            (
                ["{}/rec", "--consumer", "log", "--speed", "fast"],
                "--speed: got fast, expected full, recorded or a factor",
            ),
            (["{}/rec", "--consumer", "log", "--speed", "0"], "--speed: got 0, expected"),
            (["{}/rec", "--consumer", "log", "--ask"], "--ask: got a recording, expected a data set"),
            (
                ["{}/set", "--consumer", "log", "--speed", "recorded"],
                "--speed: got a data set, which has no times, expected full; --steps-per-s N gives it a pace",
            ),
            (
                ["{}/set", "--consumer", "filesystem:root={}/x,capture=requests"],
                "got one that captures only what requests ask for; add --ask",
            ),
            (["{}/rec", "--consumer", "record:path={}/set"], "consumers.record.path: got"),
        ],
    )
    def test_what_cannot_be_replayed_is_refused_with_what_to_do(self, recorded, capsys, words, message):
        assert run(["replay", *(word.format(recorded) for word in words)]) == 2
        errors = capsys.readouterr().err
        assert message in errors
        assert errors.count("\n") == 1

    def test_a_controller_is_refused(self, recorded, capsys):
        probe = ROOT / "examples" / "code.safetensors"
        options = f"gate:probe={probe},threshold=1,action=steer"
        code = run(["replay", str(recorded / "rec"), "--consumer", options])
        assert code == 2
        assert "gate" in capsys.readouterr().err

    def test_another_spool_is_no_recording(self, tmp_path, capsys):
        from capflow.buffers.spool import Spool

        with Spool(tmp_path / "other") as spool:
            spool.append(b"Zzz", b"")
        assert run(["replay", str(tmp_path / "other"), "--consumer", "log"]) == 2
        assert "expected a recording" in capsys.readouterr().err

    def test_replays_into_files(self, recorded, capsys):
        assert run(["replay", str(recorded / "rec"), "--consumer", f"filesystem:root={recorded}/again"]) == 0
        assert tree(recorded / "again") == tree(recorded / "set")
        assert "replayed 1 frames, 128 rows" in capsys.readouterr().err

    def test_ctrl_c_ends_a_replay_that_waits(self, tmp_path):
        with MemoryHub(record(tmp_path / "rec")) as hub:
            engine = hub.engine()
            for step in range(3):
                engine.step([("r1", 4, step, 1)])
        words = ["replay", str(tmp_path / "rec"), "--consumer", "log", "--steps-per-s", "0.001"]
        with subprocess.Popen([sys.executable, "-m", "capflow", *words], stderr=subprocess.PIPE, text=True) as child:
            try:
                assert "listening" in child.stderr.readline()
                assert "connected" in child.stderr.readline()
                child.send_signal(signal.SIGINT)
                errors = child.stderr.read()
                assert child.wait(30) == 0, errors
            finally:
                child.kill()
        assert "replayed 0 frames" in errors or "replayed 1 frames" in errors

    def test_record_keeps_what_engines_send_until_it_is_stopped(self, tmp_path, address):
        command = [sys.executable, "-m", "capflow", "record", str(tmp_path / "rec"), "--address", address]
        environment = os.environ | {"COLUMNS": "200"}
        with subprocess.Popen(
            [*command, "--capture", "layers=0+1"], stderr=subprocess.PIPE, text=True, env=environment
        ) as child:
            try:
                assert "listening" in child.stderr.readline()
                with worker_link(address, make_hello()) as link:
                    frame = make_frame([("r1", 4, 0, 4)], finished=[make_finished()])
                    assert link.send(frame.header, frame.payload) is None
                    eventually(lambda: any(isinstance(s, RequestDone) for s in safely(tmp_path / "rec")))
                child.send_signal(signal.SIGINT)
                errors = child.stderr.read()
                assert child.wait(30) == 0, errors
            finally:
                child.kill()
        watcher = Watcher()
        replay(tmp_path / "rec", watcher)
        assert watcher.rows["r1"] == 4


def safely(path):
    try:
        return list(recording.read(path))
    except UsageError:
        return []
