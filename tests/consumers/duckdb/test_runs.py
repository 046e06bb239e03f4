"""Frames that continue the runs of their requests are stored as frames that do not."""

import random

import msgspec
import pytest

from capflow.capture.frame import Frame, Rank
from capflow_consumers.duckdb.consumer import DuckdbConsumer
from capflow_consumers.duckdb.request import Feed, ScoredRequest
from tests.kit.databases import SITES, Clock, Counts, done, opened, probe_file, query
from tests.kit.frames import make_frame, make_model

TABLES = {
    "tokens": "capture, request_id, position, token_id, text, phase, steered",
    "scores": "capture, request_id, position, probe, layer, hook, score",
    "marks": "capture, request_id, boot, rank, first_frame, last_frame",
    "requests": "capture, request_id, status, rows, capture_status",
}


def scenario(seed):
    """Return what a consumer gets: frames of changing batches, some again, with ends and flushes between them."""
    rng = random.Random(seed)
    waiting = [f"r{n}" for n in range(12)]
    running, position, rows, calls, sent = [], {}, {}, [], []
    seq = {Rank(0, 0, 0): 0, Rank(1, 0, 0): 0}
    ranks = list(seq)[: rng.choice([1, 1, 2])]
    sites = {Rank(0, 0, 0): SITES[:2], Rank(1, 0, 0): SITES[2:]} if len(ranks) > 1 else {ranks[0]: SITES}
    while running or waiting:
        while waiting and len(running) < 4 and rng.random() < 0.5:
            name = waiting.pop()
            position[name], rows[name] = 0, 0
            running.append(name)
        batch = [name for name in running if rng.random() < 0.95]
        parts = []
        for name in batch:
            start = position[name]
            length = rng.choice([4, 7]) if not start else rng.choice([1, 1, 1, 1, 2])
            if start > 5 and rng.random() < 0.03:  # computed again after a preemption
                start -= 3
            parts.append((name, 4, start, length))
            position[name] = max(position[name], start + length)
        for rank in ranks if parts else ():
            seq[rank] += rng.choice([1, 1, 1, 1, 1, 2])
            frame = make_frame(parts, sites[rank], seq=seq[rank], rank=rank, texts=rng.random() < 0.8)
            if rng.random() < 0.3:
                header = frame.header
                steered = [rng.choice([None, (), (part.start, part.start + 1)]) for part in header.requests]
                changed = tuple(
                    msgspec.structs.replace(part, steered=runs)
                    for part, runs in zip(header.requests, steered, strict=True)
                )
                frame = Frame(msgspec.structs.replace(header, requests=changed), frame.payload)
            for name, _, _, length in parts:
                rows[name] += length * len(sites[rank])
            calls.append(("frame", frame))
            sent.append(frame)
        if sent and rng.random() < 0.1:
            calls.append(("frame", rng.choice(sent[-6:])))
        if rng.random() < 0.1:
            calls.append(("idle", None))
        for name in list(running):
            if position[name] > 10 and rng.random() < 0.2:
                running.remove(name)
                calls.append(("done", done(name, 4, position[name], rows=rows[name])))
    return calls


def stored(directory, calls, *, again):
    """Store a scenario; return the results and the tables.

    again: the call before which the file is opened again, as after a kill; what was not committed comes again.
    """
    directory.mkdir()
    for name, site in (("first", SITES[0]), ("last", SITES[2])):
        probe_file(directory, name, site)
    clock, results = Clock(), []
    consumer = opened(directory, "first", "last", clock=clock, batch_rows=200)
    model = make_model()
    for number, (kind, value) in enumerate(calls):
        clock.now += 0.01
        if number == again:
            consumer.close()
            consumer.open(Counts())
            consumer.on_session("engine-1", model)
            over = {each.request for name, each in calls[:number] if name == "done"}
            for name, earlier in calls[:number]:
                if name == "frame" and over.isdisjoint(part.id for part in earlier.header.requests):
                    consumer.on_frame(earlier)
        if kind == "frame":
            consumer.on_frame(value)
        elif kind == "idle":
            clock.now += 2
            consumer.on_idle()
        else:
            result = consumer.on_request_done(value)
            results.append((value.request, result.status, result.error, result.payload["tokens"]))
    consumer.close()
    tables = {name: query(directory, f"SELECT {columns} FROM {name} ORDER BY ALL") for name, columns in TABLES.items()}
    return results, tables


@pytest.mark.parametrize("seed", range(12))
def test_runs_store_what_single_frames_do(tmp_path, monkeypatch, seed):
    calls = scenario(seed)
    again = len(calls) // 2 if seed % 3 == 0 else -1
    taken = []
    run = DuckdbConsumer._run

    def counted(self, header):
        stretches = run(self, header)
        taken.append(stretches is not None)
        return stretches

    monkeypatch.setattr(DuckdbConsumer, "_run", counted)
    with_runs = stored(tmp_path / "runs", calls, again=again)
    monkeypatch.setattr(DuckdbConsumer, "_run", lambda self, header: None)
    assert stored(tmp_path / "single", calls, again=again) == with_runs
    assert any(taken)
    assert not all(taken)


def test_frames_of_a_steady_batch_are_all_taken_as_runs(tmp_path, monkeypatch):
    probe_file(tmp_path, "happy")
    consumer = opened(tmp_path, "happy")
    monkeypatch.setattr(consumer._pending, "add_rows", None)
    monkeypatch.setattr(consumer._pending, "add_block", None)
    for step in range(5):
        consumer.on_frame(make_frame([("r1", 1, step, 1), ("r2", 1, step, 1)], SITES, seq=step + 1))
    assert consumer.on_request_done(done("r1", 1, 5, rows=15)).status == "ok"
    consumer.on_frame(make_frame([("r2", 1, 5, 1)], SITES, seq=6))
    assert consumer.on_request_done(done("r2", 1, 6, rows=18)).status == "ok"
    consumer.close()
    marks = query(tmp_path, "SELECT request_id, min(first_frame), max(last_frame) FROM marks GROUP BY ALL ORDER BY ALL")
    assert marks == [("r1", 1, 5), ("r2", 1, 6)]


WORKER = ("boot", Rank(0, 0, 0))


def begun():
    request, feed = ScoredRequest(1, "engine-1", "r1", 0), Feed(WORKER, 3, 4)
    assert request.begin(feed, 5, 10, 12)
    return request, feed


def test_a_run_is_noted_once():
    request, feed = begun()
    request.seq, request.end = 7, 14
    for _ in range(2):
        request.settle()
        assert (list(request.pending.runs()), list(request.positions)) == ([(WORKER, 5, 7)], [(10, 13)])
        assert (request.tokens, request.rows, request.scores) == (4, 12, 16)
    request.commit()
    assert not request.pending
    assert list(request.stored.runs()) == [(WORKER, 5, 7)]
    assert feed.running == {"r1": request}
    request.leave()
    assert feed.running == {}


@pytest.mark.parametrize(("seq", "start"), [(7, 14), (3, 14), (8, 13), (8, 0)])
def test_no_run_begins_with_an_earlier_frame_or_position(seq, start):
    request, feed = begun()
    request.seq, request.end = 7, 14
    request.commit()
    assert not request.begin(feed, seq, start, start + 1)
    assert feed.running == {}
    assert request.tokens == 4


def test_a_finished_request_begins_no_run():
    request, feed = ScoredRequest(1, "engine-1", "r1", 0), Feed(WORKER, 3, 4)
    request.status = "ok"
    assert not request.begin(feed, 1, 0, 1)
