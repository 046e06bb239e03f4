"""The sender turns computed steps into frames; a link that keeps them stands where the transport would."""

import numpy as np
import pytest

from capflow import limits
from capflow.capture.frame import Dropped, Frame, Gap, Rank
from capflow.capture.model import ModelInfo
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow_engine.scheduler.orders import Ended
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.ring import Ring
from capflow_engine.worker.sender import Computed, Sender, Way
from tests.kit.waiting import eventually

SITES = (Site(0, "post_block"), Site(3, "post_block"))
INFO = ModelInfo("m", 4, 2, "float32", SITES)


class KeepingLink:
    """Keeps every frame that it is given, or refuses those with rows for a reason: all, or of some steps."""

    def __init__(self):
        self.frames, self.refusal, self.full_at = [], None, set()

    def send(self, header, payload):
        if len(payload) and (self.refusal or header.step in self.full_at):
            return self.refusal or "queue_full"
        frame = Frame.seal(header, payload)
        frame.check()
        self.frames.append(frame)
        return None

    def close(self, drain_s=0):
        pass


class Bench:
    """A planner, a sender and a way to compute steps whose rows say whose they are: [token id, site index]."""

    def __init__(self):
        self.link, self.planner, self.number = KeepingLink(), Planner(2), 0
        self.sender = Sender(
            [Way(self.link, "b")],
            engine="e",
            rank=Rank(0, 0, 0),
            info=INFO,
            sites=SITES,
            text_of=lambda t: f"<{t}>",
        )
        self.sender.start()

    def request(self, key, prompt, want=None):
        ship = self.planner.program(want if want is not None else {0: Positions.ALL, 1: Positions.ALL})
        return Tracked(key, f"name-{key}", prompt, ship, self.planner.nothing)

    def step(self, parts, ended=(), lost=None):
        self.number += 1
        batch, row, ids = [], 0, []
        for request, start, length in parts:
            batch.append(Scheduled(request, row, start, length))
            ids += [100 * int(request.key) + start + i for i in range(length)]
            row += length
        plan = self.planner.plan(batch)
        rows = np.full((plan.rows, 2), np.nan, np.float32)
        for block in plan.blocks:
            for place, site in enumerate(block.sites):
                for run in block.runs:
                    at = block.base + place * block.rows + run.target
                    rows[at : at + run.length, 0] = ids[run.source : run.source + run.length]
                    rows[at : at + run.length, 1] = site
        payload = None if lost else rows.view(np.uint8).reshape(-1)
        self.sender.put(
            Computed(self.number, 7, plan, payload, np.array(ids), lambda: None, lost, [(r, e) for r, e in ended])
        )

    def frames(self):
        self.sender.close(30)
        return self.link.frames


@pytest.fixture
def bench():
    return Bench()


def rows_of(frames):
    rows = {}
    for frame in frames:
        for chunk in frame.chunks():
            for i, site in enumerate(chunk.sites):
                for j, token in enumerate(chunk.token_ids):
                    key = chunk.request.id, site, chunk.start + j
                    assert key not in rows
                    assert chunk.rows[i, j].tolist() == [token, SITES.index(site)]
                    assert chunk.texts[j] == f"<{token}>"
                    rows[key] = token
    return rows


def test_rows_token_ids_and_texts_stay_together(bench):
    one, two = bench.request("1", 3), bench.request("2", 2, {1: Positions.ALL_GENERATED})
    bench.step([(one, 0, 3), (two, 0, 2)])
    bench.step([(two, 2, 1), (one, 3, 1)])
    frames = bench.frames()
    assert [f.header.step_tokens for f in frames] == [5, 2]
    expected = {("name-1", site, p): 100 + p for site in SITES for p in range(4)}
    expected["name-2", SITES[1], 2] = 202
    assert rows_of(frames) == expected


def test_rows_behind_the_end_of_a_request_are_not_delivered(bench):
    one, two = bench.request("1", 3), bench.request("2", 3)
    bench.step([(one, 0, 3), (two, 0, 3)])
    bench.step([(one, 3, 1), (two, 3, 1)], ended=[(one, Ended("stop", 3))])
    frames = bench.frames()
    rows = rows_of(frames)
    assert ("name-1", SITES[0], 3) not in rows
    assert ("name-2", SITES[0], 3) in rows
    (finished,) = frames[1].header.finished
    assert (finished.id, finished.status, finished.computed_length, finished.rows) == ("name-1", "stop", 3, 6)


def test_a_request_that_ends_without_rows_is_still_finished(bench):
    one = bench.request("1", 3, {0: Positions.ALL_GENERATED})
    bench.step([(one, 0, 3)], ended=[(one, Ended("abort", 3))])
    (frame,) = bench.frames()
    assert not len(frame.payload)
    assert frame.header.finished[0].rows == 0


@pytest.mark.parametrize("lost", [None, "queue_full"])
def test_more_ends_than_a_frame_takes_are_in_several(bench, monkeypatch, lost):
    monkeypatch.setattr(limits, "FINISHED_PER_FRAME_MAX", 2)
    requests = [bench.request(str(number), 3) for number in range(5)]
    bench.step([(each, 0, 3) for each in requests], lost=lost, ended=[(each, Ended("stop", 3)) for each in requests])
    frames = bench.frames()
    ends = [finished for frame in frames for finished in frame.header.finished]
    assert [len(frame.header.finished) for frame in frames] == [2, 2, 1]
    assert [finished.id for finished in ends] == [f"name-{number}" for number in range(5)]
    assert {finished.rows for finished in ends} == {0 if lost else 6}


@pytest.mark.parametrize("where", ["link", "step"])
def test_lost_rows_are_counted_with_their_reason(bench, where):
    one = bench.request("1", 3)
    bench.link.refusal = "queue_full" if where == "link" else None
    lost = "queue_full" if where == "step" else None
    bench.step([(one, 0, 3)], lost=lost)
    bench.step([(one, 3, 1)], lost=lost, ended=[(one, Ended("length", 4))])
    (frame,) = bench.frames()
    (finished,) = frame.header.finished
    gap = Gap(("post_block:0", "post_block:3"), 0, 4)
    assert (finished.rows, finished.dropped) == (0, (Dropped(8, "queue_full", (gap,)),))
    assert bench.sender.dropped == ({"queue_full": 8},)


def test_what_is_sent_and_what_is_said_to_be_lost_are_all_rows(bench):
    """Requests with different sites and strides, and a link that now and then takes nothing."""
    rng = np.random.default_rng(3)
    wants = [
        {0: Positions.ALL, 1: Positions.ALL},
        {0: Positions.parse({"every": 3})},
        {0: Positions.ALL_GENERATED, 1: Positions.ALL},
    ]
    requests = [bench.request(str(n + 1), 5, want) for n, want in enumerate(wants)]
    for start, length in [(0, 3), (3, 2), *((n, 1) for n in range(5, 60))]:
        bench.link.full_at |= {bench.number + 1} if rng.random() < 0.5 else set()
        ended = [(request, Ended("length", 60)) for request in requests] if start == 59 else []
        bench.step([(request, start, length) for request in requests], ended=ended)
    frames = bench.frames()
    came = rows_of(frames)
    (finished,) = [frame.header.finished for frame in frames if frame.header.finished]
    for request, want, end in zip(requests, wants, finished, strict=True):
        due = {(str(SITES[s]), n) for s, p in want.items() for n in range(60) if p.at(5).runs(n, n + 1)}
        lost = [
            (site, n)
            for dropped in end.dropped
            for gap in dropped.gaps
            for site in gap.sites
            for n in range(gap.start, gap.stop)
        ]
        sent = {(str(site), n) for name, site, n in came if name == request.id}
        assert lost
        assert sent
        assert len(lost) == len(set(lost)) == sum(dropped.rows for dropped in end.dropped)
        assert (sent | set(lost), sent & set(lost)) == (due, set())


@pytest.mark.parametrize("full", [None, 0, 1, 2])
@pytest.mark.parametrize(
    ("room", "expected"), [(1, [4, 4, 3]), (4, [4, 4, 3]), (7, [4, 7]), (8, [8, 3]), (10, [8, 3]), (11, [11])]
)
def test_a_large_step_leaves_in_several_frames(bench, monkeypatch, room, expected, full):
    monkeypatch.setattr(limits, "STEP_BYTES_MAX", 10 * 8)
    monkeypatch.setattr(limits, "STEP_PART_BYTES_MAX", room * 8)
    offered = []

    class Full(KeepingLink):
        """Refuses one frame of the second step."""

        def send(self, header, payload):
            if len(payload) and header.step == 2:
                offered.append(len(payload) // 8)
                if len(offered) - 1 == full:
                    return "queue_full"
            return super().send(header, payload)

    bench.link.__class__ = Full
    both, second = bench.request("1", 9), bench.request("2", 9, {1: Positions.ALL})
    bench.step([(both, 0, 2)])
    # The block of `both` has four rows at two sites, that of `second` three at one.
    bench.step([(both, 2, 4), (second, 0, 3)], ended=[(both, Ended("stop", 9)), (second, Ended("stop", 9))])
    bench.step([])
    frames = bench.frames()
    assert offered == expected
    rows = rows_of(frames)
    refused = expected[full] if full is not None and full < len(expected) else 0
    assert len(rows) == 2 * 2 + 11 - refused
    ends = [end for frame in frames for end in frame.header.finished]
    assert sorted(end.id for end in ends) == ["name-1", "name-2"]
    assert sum(end.rows for end in ends) == len(rows)
    assert {dropped.reason for end in ends for dropped in end.dropped} == ({"queue_full"} if refused else set())
    assert sum(dropped.rows for end in ends for dropped in end.dropped) == refused
    # The ends come with the last rows, or after them.
    last = next(n for n, frame in enumerate(frames) if frame.header.finished)
    assert not any(frame.header.blocks for frame in frames[last + 1 :])


def test_a_sender_that_waits_keeps_no_memory_of_a_step(bench):
    """Else a step that needs all of the ring would wait for the one before, and that one for it."""
    ring = Ring(128 * 1024, pinned=False)
    plan = bench.planner.plan([Scheduled(bench.request("0", 4), row=0, start=0, length=4)])
    rows = ring.acquire(plan.rows * 8, 0)
    bench.sender.put(Computed(1, 0, plan, rows, np.arange(4), lambda: None))
    del rows
    eventually(lambda: bench.link.frames)
    bench.link.frames.clear()
    assert ring.acquire(ring.bytes_max, 20) is not None


def test_one_hub_is_sent_the_steps_own_memory_and_several_are_sent_copies():
    class Holding(KeepingLink):
        def send(self, header, payload):
            self.payload = payload
            return super().send(header, payload)

    for hubs in (1, 2):
        links, planner = [Holding() for _ in range(hubs)], Planner(2, hubs)
        sender = Sender(
            [Way(link, "b") for link in links], engine="e", rank=Rank(0, 0, 0), info=INFO, sites=SITES, text_of=None
        )
        sender.start()
        batch = [
            Scheduled(
                Tracked(
                    f"{n}", f"r{n}", 2, planner.program({0: Positions.ALL}, n % hubs), planner.nothing, hub=n % hubs
                ),
                row=2 * n,
                start=0,
                length=2,
            )
            for n in range(4)
        ]
        plan = planner.plan(batch)
        rows = np.arange(plan.rows * 2, dtype=np.float32).view(np.uint8)
        sender.put(Computed(1, 0, plan, rows, np.arange(8), lambda: None))
        sender.close(30)
        assert [np.shares_memory(link.payload, rows) for link in links] == [hubs == 1] * hubs
        assert b"".join(bytes(link.payload) for link in links) == bytes(rows)
        assert [[part.id for part in link.frames[0].header.requests] for link in links] == (
            [["r0", "r1", "r2", "r3"]] if hubs == 1 else [["r0", "r2"], ["r1", "r3"]]
        )
