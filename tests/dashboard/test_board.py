"""The board of the dashboard: what it keeps, what it drops, and what a page gets of it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capflow.capture.frame import Dropped
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from capflow.steering.action import Answered
from capflow_dashboard import limits
from capflow_dashboard.board.board import Board, PageState
from capflow_dashboard.board.record import RequestRecord
from capflow_dashboard.board.series import MISSING, Measures
from capflow_dashboard.views.rates import RateSeries
from tests.kit.frames import make_frame, make_model

SITES = tuple(Site(layer, "post_block") for layer in range(4))


def done(request, *, status="stop", prompt_length=4, dropped=()):
    return RequestDone("engine-1", request, status, prompt_length, 6, 24, 24, tuple(dropped))


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def board(requests_max=4, tokens_max=64, probes=(), clock=None):
    made = Board(requests_max, tokens_max, clock=clock or Clock(), wall=lambda: 1000.0)
    made.greet("engine-1", make_model(), SITES, probes)
    return made


def keys_of(made):
    return {record.id: key for key, record in made._records.items()}


def test_a_full_board_forgets_the_oldest_that_is_over_and_not_looked_at():
    made = board(requests_max=3)
    for number, request in enumerate(("a", "b", "c")):
        made.take(make_frame([(request, 2, 0, 2)], SITES, seq=number + 1))
    seen = PageState()
    made.look(seen, keys_of(made)["a"])
    for request in ("a", "b", "c"):
        made.finish(done(request))
    assert made.news(seen) is not None
    gone = keys_of(made)["b"]
    made.take(make_frame([("d", 2, 0, 2)], SITES, seq=4))
    assert set(keys_of(made)) == {"a", "c", "d"}
    head, _ = made.news(seen)
    assert head["gone"] == [gone]
    assert [request["id"] for request in head["requests"]] == ["d"]


def test_when_all_run_new_ones_are_counted_and_never_half_kept():
    made = board(requests_max=2)
    made.take(make_frame([("a", 2, 0, 2), ("b", 2, 0, 2), ("c", 2, 0, 2)], SITES))
    assert made.news(PageState())[0]["counts"] | {"bytes": 0} == {
        "open": 3,
        "done": 0,
        "not_kept": 1,
        "dropped": {},
        "tokens": 6,
        "rows": 24,
        "bytes": 0,
    }
    made.finish(done("a"))
    made.take(make_frame([("c", 2, 2, 1)], SITES, seq=2))
    assert set(keys_of(made)) == {"a", "b"}
    made.finish(done("c"))
    assert made.news(PageState())[0]["counts"]["not_kept"] == 0
    assert not made._not_kept


def test_an_engine_that_is_gone_is_shown_as_long_as_a_request_of_it_is():
    made = board(requests_max=1)
    seen = PageState()
    for number in range(3):
        name = f"e{number}"
        made.greet(name, make_model(), SITES, ())
        made.take(make_frame([("r", 2, 0, 2)], SITES, engine=name))
        made.finish(msgspec.structs.replace(done("r"), engine=name))
        made.forget(name)
    made.forget("engine-1")
    assert [engine["name"] for engine in made.news(seen)[0]["engines"]] == ["e2"]
    made.greet("e2", make_model(), SITES, ())
    made.take(make_frame([("r", 2, 0, 2)], SITES, engine="e2", seq=2))
    made.forget("never-told")
    assert [engine["name"] for engine in made.news(seen)[0]["engines"]] == ["e2"]
    assert made._gone == set()


def test_an_id_that_comes_again_is_another_request():
    made = board()
    made.take(make_frame([("a", 2, 0, 2)], SITES))
    made.finish(done("a", status="abort", dropped=[Dropped(3, "consumer_queue_full")]))
    made.take(make_frame([("a", 2, 0, 1)], SITES, seq=2))
    head = made.news(PageState())[0]
    assert [(r["key"], r["status"], r["tokens"], r["rows_lost"]) for r in head["requests"]] == [
        (2, "live", 1, 0),
        (1, "abort", 2, 3),
    ]
    assert head["counts"]["dropped"] == {"consumer_queue_full": 3}


def test_a_step_of_several_stages_counts_once_and_a_new_boot_again():
    made = board()
    for _ in range(2):
        made.take(make_frame([("a", 2, 0, 2)], SITES, step=5, step_tokens=7))
    assert made.news(PageState())[0]["counts"]["tokens"] == 7
    made.greet("engine-1", make_model(), SITES, ())
    made.take(make_frame([("a", 2, 0, 2)], SITES, step=1, step_tokens=2))
    assert made.news(PageState())[0]["counts"]["tokens"] == 9


def test_an_engine_that_comes_back_goes_on_with_its_requests():
    made = board()
    made.take(make_frame([("a", 2, 0, 2)], SITES))
    made.greet("engine-1", make_model(), SITES, ())
    made.take(make_frame([("a", 2, 2, 1)], SITES, seq=2))
    assert made._records[1].count == 3
    made.greet("engine-1", make_model(num_layers=2), SITES[:2], ())
    made.take(make_frame([("a", 2, 3, 1), ("b", 2, 0, 1)], SITES[:2], seq=3))
    assert made._records[1].count == 3
    assert len(made._records[2].measures) == 2


def test_a_page_with_nothing_new_is_told_nothing():
    made, seen = board(), PageState()
    made.take(make_frame([("a", 2, 0, 2)], SITES))
    made.look(seen, 1)
    assert made.news(seen) is not None
    assert made.news(seen) is None
    made.look(seen, 0)
    made.look(seen, 1)
    assert made.news(seen) is None


def test_choosing_another_request_brings_all_of_it():
    made, seen = board(), PageState()
    made.take(make_frame([("a", 2, 0, 2), ("b", 3, 0, 3)], SITES))
    for key in (1, 2, 1):
        made.look(seen, key)
        head, values = made.news(seen)
        assert head["detail"]["fresh"]
        assert head["detail"]["key"] == key
        assert values.shape == (4, key + 1)


def test_a_record_without_memory_keeps_its_latest_tokens(monkeypatch):
    column = 4 * len(SITES) + limits.TOKEN_BYTES
    monkeypatch.setattr(limits, "BOARD_BYTES_MAX", 2 * 64 * column)
    made = board(tokens_max=1000)
    made.take(make_frame([("a", 60, 0, 60), ("b", 60, 0, 60)], SITES))
    for position in range(60, 200):
        made.take(make_frame([("a", 60, position, 1)], SITES, seq=position))
    record = made._records[1]
    assert record.base + record.count == 200
    assert 48 <= record.count <= 64
    assert made._bytes == sum(record.nbytes for record in made._records.values()) <= limits.BOARD_BYTES_MAX
    assert record.summary()["text"] == ""
    made.take(make_frame([("c", 2, 0, 2)], SITES, seq=200))
    assert made.news(PageState())[0]["counts"]["not_kept"] == 1
    made.finish(done("b"))
    made.take(make_frame([("d", 2, 0, 2)], SITES, seq=201))
    assert set(keys_of(made)) == {"a", "d"}


def test_finished_requests_make_room_in_memory_oldest_first(monkeypatch):
    column = 4 * len(SITES) + limits.TOKEN_BYTES
    monkeypatch.setattr(limits, "BOARD_BYTES_MAX", 3 * 64 * column)
    made = board(requests_max=100)
    for number in range(20):
        made.take(make_frame([(f"r{number}", 2, 0, 2)], SITES, seq=number + 1))
        made.finish(done(f"r{number}"))
    assert set(keys_of(made)) == {"r17", "r18", "r19"}
    assert made._bytes == 3 * 64 * column


def test_the_list_is_told_twice_a_second_and_only_what_changed():
    clock, page = Clock(), PageState()
    made = board(clock=clock)
    made.take(make_frame([("a", 2, 0, 2)], SITES, texts=True))
    (whole,) = made.news(page)[0]["requests"]
    assert whole["key"] == 1
    assert whole["text"].startswith(" ")
    for position in (2, 3):
        made.take(make_frame([("a", 2, position, 1)], SITES, seq=position))
        assert "requests" not in made.news(page)[0]
    clock.now += 1 / limits.LISTS_PER_S_MAX
    assert made.news(page)[0]["requests"] == [{"key": 1, "tokens": 4}]
    made.take(make_frame([("b", 2, 0, 2)], SITES, seq=4))
    assert [request["id"] for request in made.news(page)[0]["requests"]] == ["b"]  # a new one is told at once


def test_a_page_that_opens_gets_the_newest_requests_first(monkeypatch):
    monkeypatch.setattr(limits, "REQUESTS_PER_UPDATE", 3)
    made, page = board(requests_max=8), PageState()
    for number in range(8):
        made.take(make_frame([(f"r{number}", 2, 0, 2)], SITES, seq=number + 1))
    parts = [[request["id"] for request in made.news(page)[0]["requests"]] for _ in range(3)]
    assert parts == [["r7", "r6", "r5"], ["r4", "r3", "r2"], ["r1", "r0"]]
    assert made.news(page) is None


def test_scores_of_a_request_are_those_of_all_its_rows(tmp_path):
    """Also of rows whose columns are dropped, of rows that are not finite, and of none."""
    rng = np.random.default_rng(5)
    probes = [Probe.make(Site(1, "post_block"), np.eye(8)[:2], names=("a", "b"), threshold=0.5)]
    made = board(tokens_max=64, probes=probes)
    rows = rng.normal(size=(200, 8)).astype(np.float32)
    rows[3, 0], rows[190, 1] = np.nan, np.inf
    for start in range(0, 200, 10):
        frame = make_frame([("r", 100, start, 10)], SITES[1:2], seq=start + 1)
        made.take(type(frame).seal(frame.header, rows[start : start + 10].view(np.uint8)))
    record = made._records[1]
    assert record.base > 0
    for number, summary in enumerate(record.summary()["probes"]):
        # A row with a number that is not finite has no score.
        column = rows[np.isfinite(rows).all(axis=1), number].astype(np.float64)
        highest, mean, last, fired = summary
        assert highest == pytest.approx(column.max(), rel=1e-5)
        assert mean == pytest.approx(column.mean(), rel=1e-4)
        assert last == pytest.approx(rows[199, number], rel=1e-5)
        assert fired == np.count_nonzero(column >= 0.5)
    spark = record.spark("b")
    assert len(spark) == limits.SPARK_LENGTH
    kept = rows[record.base :, 1]
    assert max(value for value in spark if value is not None) == pytest.approx(kept[np.isfinite(kept)].max(), rel=1e-5)
    assert record.spark("nobody") == []
    empty = board(probes=probes)
    empty.take(make_frame([("r", 2, 0, 2)], SITES[2:3]))
    assert empty._records[1].summary()["probes"] == [[None, None, None, 0]] * 2


def test_sparklines_are_told_of_rows_in_view_and_of_one_probe():
    clock, page = Clock(), PageState()
    probes = [Probe.make(Site(1, "post_block"), np.eye(8)[:2], names=("a", "b"))]
    made = board(probes=probes, clock=clock)
    for number, request in enumerate(("x", "y")):
        made.take(make_frame([(request, 2, 0, 2)], SITES, seq=number + 1))
    assert "sparks" not in made.news(page)[0]
    made.look(page, 0, [2, 99], "a")
    clock.now += 1
    sparks = made.news(page)[0]["sparks"]
    assert set(sparks) == {"2"}
    clock.now += 1
    made.take(make_frame([("x", 2, 2, 1)], SITES, seq=3))
    assert "sparks" not in made.news(page)[0]
    made.look(page, 0, [2], "b")
    clock.now += 1
    assert made.news(page)[0]["sparks"]["2"] != sparks["2"]
    # A request of an engine without the probe has no curve, and keeps none of the probe before.
    made.look(page, 0, [2], "nobody")
    clock.now += 1
    assert made.news(page)[0]["sparks"] == {"2": []}


def answered(request, number, **more):
    return Answered(
        f"id{number}", "engine-1", request, "steer", (SITES[1],), "client", 10**9, 7, "", 3, scale=2.0, **more
    )


def test_where_a_request_was_steered_and_by_whom_is_told_once():
    made, page = board(), PageState()
    frame = make_frame([("a", 2, 0, 6)], SITES)
    request = msgspec.structs.replace(frame.header.requests[0], steered=(1, 3, 5, 6))
    frame.header = msgspec.structs.replace(frame.header, requests=(request,))
    made.take(frame)
    made.note(answered("a", 1))
    made.note(answered("nobody", 2))
    made.look(page, 1)
    detail = made.news(page)[0]["detail"]
    assert detail["steered"] == (1, 3, 5, 6)
    (event,) = detail["events"]
    assert (event["kind"], event["by"], event["position"], event["scale"]) == ("steer", "client", 3, 2.0)
    assert made._records[1].summary()["steered"] == 3
    made.note(answered("a", 1))  # comes again, after a kill
    assert made.news(page) is None
    made.note(answered("a", 3))
    assert [event["id"] for event in made.news(page)[0]["detail"]["events"]] == ["id3"]
    for number in range(limits.EVENTS_MAX + 10):
        made.note(answered("a", 100 + number))
    assert len(made._records[1].events) == limits.EVENTS_MAX


def test_a_request_that_is_shown_again_comes_whole():
    made, page = board(), PageState()
    made.take(make_frame([("a", 2, 0, 4)], SITES))
    made.look(page, 1)
    assert made.news(page)[0]["detail"]["count"] == 4
    made.look(page, 0)
    made.take(make_frame([("a", 2, 4, 2)], SITES, seq=2))
    made.news(page)
    made.look(page, 1)
    detail = made.news(page)[0]["detail"]
    assert (detail["fresh"], detail["count"]) == (True, 6)


def test_rows_that_belong_to_no_request_count_in_no_population_and_no_baseline():
    """Those of rejected drafts, and those behind the end of a request."""
    probes = [Probe.make(Site(1, "post_block"), np.eye(8)[:1], names=("a",), threshold=0.5)]
    frames = [make_frame([("a", 2, 100 * n, 100), ("b", 2, 100 * n, 100)], SITES, seq=n + 1) for n in range(6)]
    drafted = []
    for frame in frames:
        (block,) = frame.header.blocks
        # The last 40 rows of each request were rejected.
        spans = tuple(span._replace(length=60) for span in block.spans)
        requests = tuple(
            msgspec.structs.replace(request, token_ids=request.token_ids[:60]) for request in frame.header.requests
        )
        header = msgspec.structs.replace(frame.header, blocks=(block._replace(spans=spans),), requests=requests)
        drafted.append(type(frame)(header, frame.payload))
        drafted[-1].check(hashed=False)
    made = board(tokens_max=4096, probes=probes)
    for frame in drafted:
        made.take(frame)
    page = PageState()
    made.look(page, 1, probe="a", population="engine-1")
    population = made.news(page)[0]["population"]
    assert sum(population["tokens"]) + population["odd"] == 6 * 2 * 60
    rows = [chunk.rows[1, :, 0].astype(np.float64) for frame in drafted for chunk in frame.chunks()]
    scores = np.concatenate(rows)[: limits.BASELINE_TOKENS]
    assert made._engines["engine-1"].measures.baseline.fields["median"][4] == pytest.approx(np.median(scores), rel=1e-5)


def test_the_baseline_comes_once_it_is_fixed():
    made, page = board(tokens_max=4096), PageState()
    made.take(make_frame([("a", 2, 0, 100)], SITES))
    made.look(page, 1)
    assert made.news(page)[0]["detail"]["baseline"] is None
    made.take(make_frame([("a", 2, 100, limits.BASELINE_TOKENS)], SITES, seq=2))
    baseline = made.news(page)[0]["detail"]["baseline"]
    assert len(baseline["median"]) == 4
    made.take(make_frame([("a", 2, 700, 1)], SITES, seq=3))
    assert "baseline" not in made.news(page)[0]["detail"]
    made.take(make_frame([("b", 2, 0, 1)], SITES, seq=4))
    made.look(page, 2)
    assert made.news(page)[0]["detail"]["baseline"] == baseline


def test_a_hub_that_says_nothing_is_stale_and_rows_have_an_age():
    clock = Clock()
    made = board(clock=clock)
    assert made.heartbeat() == {"t": 1000.0, "state": "live", "silent_s": 0.0, "lag_s": None, "skipped_rows": 0}
    clock.now += limits.SILENCE_S + 0.1
    assert made.heartbeat()["state"] == "stale"
    made.hear(0.0, None)
    assert made.heartbeat()["state"] == "live"
    made.hear(5.0, None)
    assert (made.heartbeat()["state"], made.heartbeat()["silent_s"]) == ("stale", 5.0)
    frame = make_frame([("a", 2, 0, 2)], SITES)
    frame.header = msgspec.structs.replace(frame.header, time_ns=int((1000 - 2.5) * 1e9))
    made.take(frame)
    assert made.heartbeat()["lag_s"] == 2.5
    frame.header = msgspec.structs.replace(frame.header, time_ns=0)  # a data set has no times
    made.take(frame)
    made.finish(done("a", dropped=[Dropped(8, "skipped"), Dropped(1, "queue_full")]))
    assert made.heartbeat()["skipped_rows"] == 8


@given(
    st.integers(16, 40),
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 50), st.integers(0, 3), st.booleans()), max_size=25),
)
@settings(max_examples=150, deadline=None)
def test_what_a_page_merges_is_what_came(tokens_max, puts):
    """Against a plain dictionary: any order of positions and sites, forgetting, and pages that look now and then."""
    measures = Measures(make_model(), SITES, ())
    record = RequestRecord(
        1, "e", "r", measures, prompt_length=4, base=puts[0][0] if puts else 0, tokens_max=tokens_max, started_s=0
    )
    expected, page = {}, None
    seen = -1
    for version, (start, length, row, looks) in enumerate(puts, 1):
        values = np.arange(length, dtype=np.float32)[None] + 1000 * version
        ids = list(range(start, start + length))
        record.put(version, start, ids, [str(i) for i in ids], [row], values)
        expected |= {(row, start + i): values[0, i] for i in range(length)}
        if looks or version == len(puts):
            fresh = page is None or page[0] != record.base
            change = record.since(-1 if fresh else seen)
            seen = version
            if change is not None:
                columns, news = change
                if fresh:
                    page = (columns["base"], {})
                for column in range(columns["count"]):
                    for series in range(4):
                        page[1][series, columns["base"] + columns["first"] + column] = news[series, column]
    assert record.count <= tokens_max
    if page is None:
        return
    kept = {(row, position) for row in range(4) for position in range(record.base, record.base + record.count)}
    assert {at: value for at, value in page[1].items() if value != MISSING} == {
        at: value for at, value in expected.items() if at in kept
    }
    assert max(position for _, position in expected) < record.base + tokens_max


def test_rates_are_told_by_whole_seconds_and_bounded():
    clock = Clock()
    rates = RateSeries(clock)
    rates.add(5, 50, 500)
    assert rates.since(-1) is None
    clock.now += 1
    rates.add(1, 1, 1)
    assert rates.since(-1) == {"last": 100, "tokens": (5,), "rows": (50,), "bytes": (500,)}
    assert rates.since(100) is None
    clock.now += 3
    assert rates.since(100) == {"last": 103, "tokens": (1, 0, 0), "rows": (1, 0, 0), "bytes": (1, 0, 0)}
    clock.now += 10_000
    assert len(rates.since(103)["tokens"]) == limits.RATES_S
    assert len(rates._past) == limits.RATES_S
