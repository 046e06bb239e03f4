"""What rules count, against a plain list of all scores, and their changes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from capflow.capture.frame import Block, Dropped, Frame, RequestRows, Span
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from capflow_dashboard import limits
from capflow_dashboard.board.board import Board
from capflow_dashboard.board.series import Series
from capflow_dashboard.views.alerts.book import AlertBook, AlertsSeen
from capflow_dashboard.views.alerts.rules import read_rules
from capflow_dashboard.views.alerts.tally import EngineTally
from capflow_dashboard.views.alerts.windows import CountedRequest, LatestParts, LatestRequests
from tests.kit.frames import make_model
from tests.kit.pages import SITES, done, frame_of

SITE = Site(1, "post_block")
ODD = [np.nan, np.inf, -np.inf, 1.0, np.float32(0.1), 3e38]


class Time:
    """A clock that a test moves."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def random_step(rng, number):
    """Return the requests, the block and the scores `[2, rows]` of a step, and of each token what it is.

    Rows between spans are rejected drafts. An id comes again, with another incarnation.
    """
    requests, spans, tokens, row = [], [], [], 0
    for place in range(rng.integers(0, 5)):
        name, incarnation = f"r{(number + place) % 7}", f"i{number // 40}"
        start, length, prompt = int(rng.integers(0, 12)), int(rng.integers(1, 6)), int(rng.integers(1, 12))
        row += int(rng.integers(0, 3))
        requests.append(RequestRows(name, prompt, start, tuple(range(length)), (), None, incarnation))
        spans.append(Span(place, start, length, row))
        tokens += [((name, incarnation), start + n >= prompt, row + n) for n in range(length)]
        row += length
    rows = row + int(rng.integers(0, 3))
    scores = rng.normal(0, 2, (2, rows)).astype(np.float32)
    odd = rng.random((2, rows)) < 0.1
    scores[odd] = rng.choice(np.array(ODD, np.float32), int(odd.sum()))
    return requests, Block((SITE,), rows, tuple(spans)), scores, tokens


RULES = [
    "share(code > 1) > 5% over 5s",
    "share(code) > 5% over 60s",
    "share(code <= -1, prompt) > 5% over 7s",
    "share(code >= 0.1, generated) > 5% over 3s, min 20",
    "requests(code > 3) > 0 over 4s",
    "requests(deep > 2.5, generated) > 0 over 11s",
    "max(deep) > 9 over 2s",
    "max(code, prompt) > 9 over 9s",
]


def expected(rule, tokens, now):
    """Return the value of a rule, from every token since the beginning: its time, request, part and score."""
    column = 0 if rule.probe == "code" else 1
    part = [
        (name, scores[column])
        for at, name, generated, scores in tokens
        if now - rule.over_s < at <= now
        and np.isfinite(scores[column])
        and rule.part in ("", "generated" if generated else "prompt")
    ]
    threshold = np.float32(rule.threshold if rule.compare else 1.0)
    fires = {">": np.greater, ">=": np.greater_equal, "<=": np.less_equal}[rule.compare or ">="]
    fired = [name for name, score in part if fires(score, threshold)]
    if rule.quantity == "share":
        return 100 * len(fired) / len(part) if len(part) >= rule.count_min else None
    if rule.quantity == "requests":
        return len(set(fired))
    return max((float(score) for _, score in part), default=None)


@pytest.mark.parametrize("seed", range(6))
def test_values_are_those_of_all_scores_in_the_window(seed):
    rng = np.random.default_rng(seed)
    rules = read_rules([f"r{number}: {text}" for number, text in enumerate(RULES)], "")
    series = [Series(SITE, "code", 1.0), Series(SITE, "deep", 1.0)]
    tally, tokens, steps = EngineTally(rules, series, 3), [], 0
    assert tally.rules == list(rules)
    for second in range(1, 90):
        # Some seconds are idle, and some parts have only one probe, as those of a pipeline stage.
        for _ in range(rng.integers(0, 4) * rng.integers(0, 3)):
            requests, block, scores, places = random_step(rng, steps)
            steps += 1
            shown = [[0, 1], [0], [1]][rng.integers(0, 3)]
            values = np.concatenate([np.zeros((1, block.rows), np.float32), scores[shown]])
            tally.take(requests, block, [2, *(3 + column for column in shown)], values)
            hidden = {0, 1} - set(shown)
            for name, generated, row in places:
                pair = [np.float32(-np.inf) if column in hidden else scores[column, row] for column in (0, 1)]
                tokens.append((float(second), name, generated, pair))
        tally.count(float(second))
        for rule, reading in zip(tally.rules, tally.readings(float(second)), strict=True):
            assert reading.value == pytest.approx(expected(rule, tokens, second), abs=1e-9), (second, rule)
    assert steps > 50


def test_a_request_is_named_and_its_id_may_come_again():
    rules = read_rules(["a: max(code) > 9 over 10s", "b: requests(code > 0) > 0 over 10s"], "")
    tally = EngineTally(rules, [Series(SITE, "code", 1.0)], 0)
    block = Block((SITE,), 4, (Span(0, 0, 2, 0), Span(1, 0, 2, 2)))
    for incarnation in ("i1", "i2"):
        requests = [RequestRows(name, 4, 0, (1, 2), (), None, incarnation) for name in ("r1", "r2")]
        tally.take(requests, block, [0], np.array([[1, 2, 7, -1]], np.float32))
    tally.count(1.0)
    highest, count = tally.readings(1.0)
    assert (highest.value, highest.request, count.value) == (7.0, "r2", 4)
    tally.take(requests[:1], Block((SITE,), 2, (Span(0, 2, 2, 0),)), [0], np.array([[1, 1]], np.float32))
    tally.count(2.0)
    assert tally.readings(2.0)[1] == (4, "r1")
    assert tally.readings(11.0)[1] == (1, "r1")
    assert tally.readings(12.0) == [(None, ""), (0, "")]


def test_a_long_window_covers_its_time_and_up_to_a_60th_more():
    rng = np.random.default_rng(3)
    window, came, now = LatestParts(3600.0, lambda a, b: a + b), [], 0.0
    for _ in range(30_000):
        now += float(rng.choice([0.3, 1.0, 7.0, 90.0], p=[0.5, 0.4, 0.09, 0.01]))
        window.add(now, 1)
        came.append(now)
        if rng.random() < 0.01:
            later = now + rng.random() * 100
            times = np.array(came)
            total = window.total(later) or 0
            assert np.count_nonzero(times > later - 3600) <= total <= np.count_nonzero(times > later - 3661)
            now = later
        assert len(window._parts) <= limits.ALERT_PARTS + 2


def test_requests_of_a_window_are_bounded():
    window = LatestRequests(60.0)
    for number in range(limits.ALERT_REQUESTS_MAX + 10):
        window.add(number / 1000, CountedRequest(f"r{number}", ""))
    assert window.total(5.0) == (limits.ALERT_REQUESTS_MAX, f"r{limits.ALERT_REQUESTS_MAX + 9}")
    assert window.total(1000.0) == (0, "")


def probe(name, pool="token"):
    return Probe.make(SITE, np.eye(8)[3:4], names=(name,), threshold=15.0, pool=pool)


def board_of(*texts, probes=(), clock=None, wall=None, engine="engine-1"):
    """Return a board with the rules `r0`, `r1`, …"""
    board = Board(16, 64, clock=clock or Time(), wall=wall or Time(5e8))
    rules = read_rules([f"r{number}: {text}" for number, text in enumerate(texts)], "")
    board.alerts = AlertBook(rules, clock=board._clock, wall=board._wall)
    board.greet(engine, make_model(), SITES, probes)
    return board


def frame_at(time_s, *arguments, **more):
    """Return a frame whose rows are of a time."""
    frame = frame_of(*arguments, **more)
    return Frame.seal(msgspec.structs.replace(frame.header, time_ns=int(time_s * 1e9)), frame.payload)


def evaluated(board, silent_s=0.0):
    """Let a second pass; return the changes as words."""
    board._clock.now += 1
    return [
        f"{change.rule.name} {change.state} {change.engine} {change.value} {change.request}".strip()
        for change in board.alerts.evaluate(silent_s)
    ]


def test_the_board_counts_prompts_answers_and_requests_with_pooling():
    rules = [
        "share(code, prompt) > 50%",
        "share(code, generated) > 50%",
        "max(tone) > 16",
        "requests(tone) > 0 over 2s",
        "share(missing) > 1%",
    ]
    board = board_of(*rules, probes=[probe("code"), probe("tone", "mean")])
    norms = np.tile(np.array([20.0, 20, 20, 1, 1, 20], np.float32), (4, 1))
    board.take(frame_of("r1", norms[:, :4], prompt=3))
    assert evaluated(board) == ["r0 firing engine-1 100.0"]
    board.take(frame_of("r1", norms[:, 4:], prompt=3, start=4, seq=2))
    # One generated token of three fires.
    assert evaluated(board) == []
    board.finish(done("r1", prompt=3))
    # The mean of the request is below the threshold.
    assert evaluated(board) == []
    board.take(frame_of("r2", norms[:, :1], seq=3))
    board.finish(done("r2"))
    assert evaluated(board) == ["r2 firing engine-1 20.0 r2", "r3 firing engine-1 1.0 r2"]
    assert evaluated(board) == ["r3 resolved engine-1 0.0"]


def test_rows_that_come_late_fire_only_the_rule_about_that():
    clock, wall = Time(), Time(1_000_000.0)
    rules = ["lag > 5s over 2s", "lost > 0", "skipped > 0", "silent > 3s", "left > 0", "share(code > 99) > 0%"]
    board = board_of(*rules, probes=[probe("code")], clock=clock, wall=wall)
    norms = np.full((4, 4), 20.0)
    for seq in range(1, 30):
        wall.now += 1
        board.take(frame_at(wall.now - 4.5, f"r{seq}", norms, seq=seq))
        board.finish(done(f"r{seq}"))
        assert evaluated(board) == []
    board.take(frame_at(wall.now - 7, "late", norms, seq=99))
    assert evaluated(board) == ["r0 firing engine-1 7.0"]
    assert [*evaluated(board), *evaluated(board)] == ["r0 resolved engine-1 None"]


def test_lost_and_skipped_rows_silence_and_engines_that_left():
    board = board_of("lost > 5 over 3s", "skipped > 0 over 3s", "silent > 3s", "left > 0 over 3s")
    board.finish(done("r1", dropped=[Dropped(5, "queue_full"), Dropped(9, "skipped")]))
    assert evaluated(board) == ["r1 firing engine-1 9.0"]
    # A request of which the board has no row counts too.
    board.finish(done("r2", dropped=[Dropped(1, "shutdown"), Dropped(2, "not_tapped")]))
    assert evaluated(board, 3.0) == ["r0 firing engine-1 6.0"]
    assert evaluated(board, 3.1) == ["r2 firing  3.1"]
    board.forget("engine-1")
    # Nothing of it is in the windows after three seconds, and its rules are over.
    assert evaluated(board, 0.0) == ["r2 resolved  0.0", "r3 firing engine-1 1.0", "r0 resolved engine-1 1.0"]
    assert evaluated(board) == ["r1 resolved engine-1 0.0"]
    assert evaluated(board) == ["r3 resolved engine-1 0.0"]
    assert board.alerts._engines == {}


def test_an_engine_that_comes_back_goes_on_and_with_another_model_it_begins_again():
    board = board_of("max(code) > 15 over 10s", probes=[probe("code")])
    board.take(frame_of("r1", np.full((4, 4), 20.0)))
    assert evaluated(board) == ["r0 firing engine-1 20.0 r1"]
    board.forget("engine-1")
    board.greet("engine-1", make_model(), SITES, [probe("code")])
    assert evaluated(board) == []
    board.greet("engine-2", make_model(), SITES, [probe("code")])
    board.take(frame_of("r1", np.full((4, 4), 30.0), engine="engine-2"))
    assert evaluated(board) == ["r0 firing engine-2 30.0 r1"]
    board.greet("engine-1", make_model(num_layers=2), SITES[:2], [probe("code")])
    assert evaluated(board) == ["r0 resolved engine-1 None"]
    board.take(frame_of("r2", np.full((2, 4), 20.0), seq=2))
    assert evaluated(board) == ["r0 firing engine-1 20.0 r2"]


def test_engines_that_are_gone_are_bounded_and_what_fires_is_over():
    board = board_of("max(code) > 15 over 1h", probes=[probe("code")])
    for number in range(limits.ALERT_GONE_MAX + 3):
        board.greet(f"e{number}", make_model(), SITES, [probe("code")])
        board.take(frame_of("r1", np.full((4, 4), 20.0), engine=f"e{number}"))
        board.forget(f"e{number}")
    fired = evaluated(board)
    assert len(fired) == limits.ALERT_GONE_MAX + 6
    assert fired[-3:] == [f"r0 resolved e{number} None" for number in range(3)]
    assert len(board.alerts._engines) == limits.ALERT_GONE_MAX + 1
    seen = AlertsSeen(watching=True)
    news = board.alerts.news(seen)["alerts"]
    assert len(news["changes"]) <= limits.ALERT_CHANGES_MAX
    assert board.alerts.news(seen) == {}


def test_a_page_gets_what_changed_and_values_while_it_shows_them():
    board = board_of("max(code) > 15 over 10s", "lost > 0", probes=[probe("code")], wall=Time(5e8))
    away, watching = AlertsSeen(), AlertsSeen(watching=True)
    evaluated(board)
    assert board.alerts.news(away) == {"alerts": {"states": [], "changes": []}}
    assert [state["state"] for state in board.alerts.news(watching)["alerts"]["states"]] == ["inactive"] * 2
    evaluated(board)
    assert board.alerts.news(away) == {}
    assert board.alerts.news(watching)["alerts"]["changes"] == []
    board.take(frame_of("r1", np.full((4, 4), 20.0)))
    evaluated(board)
    news = board.alerts.news(away)["alerts"]
    one = {"rule": "r0", "engine": "engine-1", "request": "r1", "state": "firing", "value": 20.0}
    assert news == {"states": [one | {"since_s": 5e8}], "changes": [one | {"at_s": 5e8, "fired_s": 0.0}]}
    evaluated(board)
    assert board.alerts.news(away) == {}
    assert board.alerts.news(watching)["alerts"]["changes"] == news["changes"]
    # A page that is opened later has the history.
    assert board.alerts.news(AlertsSeen())["alerts"]["changes"] == news["changes"]


def test_rows_of_rejected_drafts_are_not_counted():
    board = board_of("share(code) > 0%", "max(code) > 0 over 5s", probes=[probe("code")])
    frame = frame_of("r1", np.full((4, 4), 20.0))
    (block,) = (block for block, _ in frame.blocks())
    values = np.array([[99.0, 1.0, 99.0, 2.0]], np.float32)
    tally = board.alerts._engines["engine-1"].tally
    tally.take(frame.header.requests, block._replace(spans=(Span(0, 0, 1, 1), Span(0, 1, 1, 3))), [4], values)
    tally.count(1.0)
    assert [reading.value for reading in tally.readings(1.0)] == [0.0, 2.0]


def test_scores_that_wait_are_bounded():
    board = board_of("share(code) > 0%", probes=[probe("code")])
    tally = board.alerts._engines["engine-1"].tally
    norms = np.full((4, 1000), 20.0)
    norms[:, :250] = 1.0
    for step in range(3 * limits.ALERT_ROWS_MAX // 1000):
        board.take(frame_of("r1", norms, start=step * 1000, seq=step + 1))
        assert tally._rows < limits.ALERT_ROWS_MAX
    assert evaluated(board) == ["r0 firing engine-1 75.0"]
