"""Steps that leave in several frames: random requests, sites of several widths, hubs, refusals, ends and events."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from capflow import limits
from capflow.capture.frame import Acted, Frame, Rank, Weights
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow_engine.scheduler.orders import Ended
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.taps.widths import Widths
from capflow_engine.worker.sender import Computed, Noted, Sender, Way
from tests.kit.shaped import shaped_model

INFO = shaped_model()
SITES = INFO.sites
WIDTHS = Widths.of(INFO, SITES)
WANTS = (Positions.ALL, Positions.ALL, Positions.ALL_GENERATED, Positions.parse({"every": 3}))


class RefusingLink:
    """Keeps frames, and refuses some of those with rows."""

    def __init__(self, rng, share):
        self.rng, self.share, self.frames = rng, share, []

    def send(self, header, payload):
        if len(payload) and self.rng.random() < self.share:
            return self.rng.choice(["queue_full", "hub_gone"])
        Frame.seal(header, bytes(payload)).check()
        self.frames.append(Frame.decode(*map(bytes, Frame.seal(header, bytes(payload)).encode())))
        return None

    def close(self, drain_s=0):
        pass


class Scenario:
    """A sender, requests that come and go, and what is due of them; `number_of` says what each row holds."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.hubs = rng.choice([1, 1, 2, 3])
        self.links = [RefusingLink(rng, rng.choice([0, 0.3])) for _ in range(self.hubs)]
        self.planner = Planner(len(SITES), self.hubs, WIDTHS.of_site)
        self.sender = Sender(
            [Way(link, "b") for link in self.links],
            engine="e",
            rank=Rank(0, 0, 0),
            info=INFO,
            sites=SITES,
            text_of=str,
            widths=WIDTHS.classes,
        )
        # By key: running requests with their next positions, what each wants, the runs of computed positions.
        self.running, self.wants, self.runs = {}, {}, {}
        self.over, self.events = [], Counter()

    def begin(self):
        """Let a request come."""
        number = len(self.wants) + 1
        want = {site: self.rng.choice(WANTS) for site in range(len(SITES)) if self.rng.random() < 0.6}
        hub = self.rng.randrange(self.hubs)
        program = self.planner.program(want, hub)
        prompt = self.rng.randint(1, 9)
        request = Tracked(f"k{number}", f"r{number}", prompt, program, self.planner.nothing, hub=hub)
        self.running[request.key] = [request, 0]
        self.wants[request.id], self.runs[request.id] = (request, want), []

    def step(self, number):
        """Compute a step, with ends and events, and send it."""
        rng = self.rng
        while len(self.running) < rng.randint(1, 5):
            self.begin()
        batch, row = [], 0
        for request, start in rng.sample(list(self.running.values()), rng.randint(1, len(self.running))):
            batch.append(Scheduled(request, row, start, rng.randint(1, 6)))
            row += batch[-1].length
        plan = self.planner.plan(batch)
        sizes = [plan.ship_rows, *plan.shaped]
        nbytes = [count * each.width * 4 for count, each in zip(sizes, WIDTHS.classes, strict=False)]
        rows, begins = np.zeros(sum(nbytes), np.uint8), np.cumsum([0, *nbytes])
        for block in plan.blocks:
            width, begin = WIDTHS.classes[block.width_class].width, begins[block.width_class]
            held = rows[begin : begin + block.end * width * 4].view(np.float32).reshape(-1, width)
            for place, site in enumerate(block.sites):
                for run in block.runs:
                    for n in range(run.length):
                        part = next(p for p in batch if p.row <= run.source + n < p.row + p.length)
                        value = number_of(part.request.id, part.start + run.source + n - part.row, site)
                        held[block.base + place * block.rows + run.target + n] = value
        ids = [number_of(p.request.id, p.start + n, 0) for p in batch for n in range(p.length)]
        lost = rng.choice([None] * 8 + ["staging_full"])
        ended = []
        for part in batch:
            key, end = part.request.key, part.start + part.length
            if rng.random() < 0.3:
                end = rng.randint(part.start, end)
                ended.append((part.request, Ended("stop", end)))
                self.over.append(part.request)
                del self.running[key]
            else:
                self.running[key][1] = end
            self.runs[part.request.id].append((part.start, end))
        sent = None if lost else rows
        step = Computed(number, 5, plan, sent, np.array(ids), lambda: None, lost, ended, shaped_at=int(begins[1]))
        step.weights = Weights(number // 3, "")
        for part in batch:
            if rng.random() < 0.3:
                event = Acted("request", "steer", (), number, 1, position=part.start)
                step.events.append(Noted(part.request, event, part.start))
                self.events[part.request.id] += 1
        self.sender.put(step)

    def due(self, request):
        """Return the rows that a request that is over has: positions by site."""
        return {
            (site, position)
            for site, positions in self.wants[request.id][1].items()
            for start, end in self.runs[request.id]
            for first, stop in positions.at(request.prompt_length).runs(start, end)
            for position in range(first, stop)
        }


def number_of(request, position, site):
    return int(request[1:]) * 10_000 + position * 100 + site


@pytest.mark.parametrize("part_bytes", [1, 100, 1000])
@pytest.mark.parametrize("seed", range(12))
def test_every_row_of_split_steps_is_sent_once_or_said_to_be_lost(seed, part_bytes, monkeypatch):
    monkeypatch.setattr(limits, "STEP_BYTES_MAX", part_bytes)
    monkeypatch.setattr(limits, "STEP_PART_BYTES_MAX", part_bytes)
    monkeypatch.setattr(limits, "FINISHED_PER_FRAME_MAX", 1 + seed % 2)
    scenario = Scenario(seed)
    scenario.sender.start()
    for number in range(1, 12):
        scenario.step(number)
    scenario.sender.close(60)
    rows, ends, events, frames = {}, {}, Counter(), Counter()
    for hub, link in enumerate(scenario.links):
        for frame in link.frames:
            header = frame.header
            frames[hub, header.step] += bool(header.blocks)
            assert bool(header.blocks) == bool(header.requests)
            assert len(frame.payload) <= part_bytes or [len(block.sites) for block in header.blocks] == [1]
            assert not {part.id for part in header.requests} & ends.keys(), "rows after an end"
            assert len({part.id for part in header.requests}) == len(header.requests)
            assert all(
                any(span.request == n for b in header.blocks for span in b.spans) for n in range(len(header.requests))
            )
            for chunk in frame.chunks():
                request = chunk.request.id
                assert scenario.wants[request][0].hub == hub
                for site, held in zip(chunk.sites, chunk.rows, strict=True):
                    for n, row in enumerate(held):
                        place = SITES.index(site), chunk.start + n
                        assert (row == number_of(request, place[1], place[0])).all()
                        assert chunk.token_ids[n] == number_of(request, place[1], 0)
                        assert (request, *place) not in rows
                        rows[request, *place] = header.weights.version
            for on in header.acted:
                assert on.id not in ends, "an event after an end"
                events[on.id] += len(on.acted)
            for end in header.finished:
                assert end.id not in ends
                ends[end.id] = end
    assert max(frames.values(), default=2) > 1
    assert events == scenario.events
    assert ends.keys() == {request.id for request in scenario.over}
    for request in scenario.over:
        end = ends[request.id]
        sent = {tuple(place) for name, *place in rows if name == request.id}
        lost = [
            (SITES.index(Site.parse(site)), position)
            for dropped in end.dropped
            for gap in dropped.gaps
            for site in gap.sites
            for position in range(gap.start, gap.stop)
        ]
        assert len(lost) == len(set(lost)) == sum(dropped.rows for dropped in end.dropped)
        assert not sent & set(lost)
        assert sent | set(lost) == scenario.due(request)
        assert end.rows == len(sent)
        named, computed = {weights.version for weights in end.weights}, {rows[request.id, *place] for place in sent}
        assert named == computed if not scenario.links[request.hub].share else named >= computed
        if sent:
            assert end.weights[0].start <= min(position for _, position in sent)
