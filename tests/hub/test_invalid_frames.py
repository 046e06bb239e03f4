"""Invalid frames cost their worker the session and nothing else; engines of different widths share every store."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import capflow
from capflow.capture.frame import Frame
from capflow.capture.site import Site
from capflow.hub.lanes import dead_letters
from capflow.hub.lanes.inbox import Inbox, Known
from capflow.plugins.configure import configure, load_plugins
from capflow.protocol import recording
from capflow.replay.player import Replay, ReplayPace
from capflow.testing import MemoryHub
from tests.kit.frames import make_finished, make_frame, make_hello, make_model, row_of
from tests.kit.hubs import Recorder, address, configured, running_hub, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]

KNOWN = load_plugins()


def overlapping(**kwargs):
    """Return a frame of 8 rows that says of each that it is 500 rows."""
    frame = make_frame(**kwargs)
    (block,) = frame.header.blocks
    return Frame(
        msgspec.structs.replace(frame.header, blocks=(block._replace(spans=block.spans * 500),)), frame.payload
    )


INVALID = {
    "another width": lambda **kwargs: make_frame(hidden=16, **kwargs),
    "another dtype": lambda **kwargs: make_frame(dtype="float16", **kwargs),
    "a site that is not there": lambda **kwargs: make_frame(sites=[(9, "post_block")], **kwargs),
    "overlapping spans": overlapping,
}
invalid = pytest.mark.parametrize("made", INVALID.values(), ids=INVALID)


def frame(request, number, *, length=4, made=make_frame, finished=False, **kwargs):
    """Return a request's frame of 4 rows, or its last one."""
    ends = [make_finished(request, 4, 4 * length)] if finished else []
    return made(requests=[(request, 4, 4 * number, 4)], finished=ends, **kwargs)


@invalid
def test_a_worker_that_sends_one_is_cut_off_and_nothing_of_it_is_kept(address, tmp_path, made):
    consumer = Recorder()
    spills = configured(consumer, "spill", spool_dir=tmp_path)
    honest = make_hello("honest", boot="boot-2")
    with running_hub(address, spills) as hub, worker_link(address, honest) as other, worker_link(address) as link:
        for number in range(4):
            given = frame("r2", number, finished=number == 3, engine="honest", boot="boot-2")
            assert other.send(given.header, given.payload) is None
            if number == 1:
                bad = frame("r1", 0, made=made)
                link.send(bad.header, bad.payload)
                eventually(lambda: hub.counts.protocol_errors >= 1)
        eventually(lambda: "r2" in consumer.done)
        assert consumer.rows == {"r2": 16}
        assert hub.lanes[0].inbox.frames == 4
        assert link.counters["unacked_frames"] == 1


def test_a_frame_that_a_hub_took_itself_is_checked_once(address, tmp_path, monkeypatch):
    checked, check = [], Frame.check

    def noted(self, **kwargs):
        checked.append(self.header.requests[0].id)
        check(self, **kwargs)

    monkeypatch.setattr(Frame, "check", noted)
    consumer = Recorder()
    with running_hub(address, configured(consumer, "spill", spool_dir=tmp_path)), worker_link(address) as link:
        for number in range(4):
            given = frame("r1", number, finished=number == 3)
            assert link.send(given.header, given.payload) is None
        eventually(lambda: "r1" in consumer.done)
    assert consumer.rows == {"r1": 16}
    assert checked == ["r1"] * 4


@invalid
def test_one_that_an_earlier_version_left_in_an_inbox_costs_its_neighbours_nothing(tmp_path, made):
    consumer = Recorder()
    spills = configured(consumer, "spill", spool_dir=tmp_path)
    spill = spills.spill
    left = Inbox(spill.root, spill.name, spill.bytes_max, on_synced=lambda _: None)
    left.open()
    left.put(Known("engine-1", make_model()))
    seq = iter(range(1, 100))
    for number in range(4):
        for request in ("r1", "r2"):
            bad = request == "r1" and number in (1, 3)
            left.put_frame(
                frame(request, number, made=made if bad else make_frame, finished=number == 3, seq=next(seq)), 1.0
            )
    assert left.close(0, lambda _: [], keep=True)
    with MemoryHub(spills) as hub:
        eventually(lambda: consumer.done.keys() == {"r1", "r2"})
        assert (consumer.rows["r1"], consumer.rows["r2"]) == (8, 16)
        assert consumer.done["r2"].problems == []
        (dropped,) = consumer.done["r1"].dropped
        assert dropped.reason == "frame_invalid"
        assert hub.hub.lanes[0].dropped["frame_invalid"] == dropped.rows > 0
        letters = hub.hub.lanes[0].dead.directory
    result = list(dead_letters.read(letters))
    assert [letter.frame.header.seq for letter in result] == [3, 7]
    assert all("expected" in letter.letter.error for letter in result)


@invalid
def test_one_in_a_recording_is_left_out_and_counted(tmp_path, made):
    with recording.Recorder(tmp_path) as recorder:
        recorder.engine("engine-1", make_model())
        for number in range(4):
            recorder.frame(frame("r1", number, made=made if number == 1 else make_frame, seq=number + 1))
    consumer = Recorder()
    with MemoryHub(consumer) as hub:
        replayed = Replay(hub.hub, ReplayPace())
        replayed.run(recording.read(tmp_path))
    assert (replayed.records_lost, replayed.frames) == (1, 3)
    assert consumer.rows["r1"] == 12


def test_a_recording_takes_a_frame_that_it_refused_before(tmp_path):
    with recording.Recorder(tmp_path) as recorder:
        frames = [frame("r1", number, seq=number + 1) for number in range(3)]
        assert [recorder.frame(frames[n]) for n in (0, 2, 1, 2)] == [True, True, True, False]
    with recording.Recorder(tmp_path) as recorder:
        assert [recorder.frame(given) for given in frames] == [False] * 3


def test_engines_of_different_widths_and_dtypes_share_every_store(tmp_path):
    site = Site(1, "post_block")
    models = {
        name: msgspec.structs.replace(make_model(hidden=hidden), dtype=dtype)
        for name, (hidden, dtype) in {"a": (8, "float32"), "b": (24, "bfloat16"), "c": (8, "float16")}.items()
    }
    stores = {
        "packed": ("filesystem", {"root": str(tmp_path / "packed"), "fsync": False}),
        "per_file": ("filesystem", {"root": str(tmp_path / "per_file"), "layout": "per_file", "fsync": False}),
        "sharded": ("filesystem", {"root": str(tmp_path / "sharded"), "layout": "sharded", "fsync": False}),
        "duckdb": ("duckdb", {"path": str(tmp_path / "d.duckdb"), "site": str(site), "vectors": True}),
        "record": ("record", {"path": str(tmp_path / "recording"), "fsync": False}),
        "dashboard": ("dashboard", {"port": 0}),
        "log": ("log", {}),
    }
    consumers = [
        configure(f"{kind}@{name}", {"policy": "block", **options}, KNOWN) for name, (kind, options) in stores.items()
    ]
    with MemoryHub(*consumers) as hub:
        engines = {name: hub.engine(name, model=model, boot=f"boot-{name}") for name, model in models.items()}
        for step in range(6):
            for engine in engines.values():
                engine.step([("r1", 4, 2 * step, 2)])
        for engine in engines.values():
            engine.finish("r1")
            engine.settle()
        for name in engines:
            results = hub.results("r1", name)
            assert {result.status for result in results.values()} == {"ok"}, results
        assert hub.stop()
    for layout in ("packed", "per_file", "sharded"):
        captures = {capture.sidecar.engine: capture for capture in capflow.open(tmp_path / layout)}
        for name, model in models.items():
            expected = np.stack([row_of("r1", site, p, model.hidden_size, model.dtype) for p in range(12)])
            np.testing.assert_array_equal(captures[name][site].rows, expected)
