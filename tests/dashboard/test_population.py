"""Populations: histograms and rates of scores, against numpy over all scores that came."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import expect

from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.probes.probe import Probe
from capflow_dashboard import limits
from capflow_dashboard.board.board import Board, PageState
from capflow_dashboard.board.series import Series
from capflow_dashboard.views.population import Population
from tests.kit.dashboards import Pageless, dashboard, open_dashboard
from tests.kit.frames import make_frame, make_model
from tests.kit.pages import SITES, done, frame_of, with_norms
from tests.kit.waiting import eventually

SITE = Site(1, "post_block")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def population(*, threshold=1.0, pool="token", labels=None, clock=None, names=("code",)):
    probes = [Series(SITE, name, threshold, pool) for name in names]
    return Population(probes, 4, labels or {}, clock or Clock())


def at_edges(fields, counts):
    """Return how many are at or above each edge."""
    return np.cumsum(counts[::-1])[::-1][1:].tolist() if fields["edges"] else []


def above(scores, edges):
    """Return how many scores are at or above each edge, in float64."""
    finite = np.asarray(scores, np.float64)
    finite = finite[np.isfinite(finite)]
    return [int(np.count_nonzero(finite >= edge)) for edge in edges]


@given(
    st.lists(
        st.lists(
            st.one_of(
                st.floats(-1e3, 1e3, width=32), st.sampled_from([np.nan, np.inf, -np.inf, 1.0, 0.0, 3e38, -3e38, 1e-40])
            ),
            max_size=200,
        ),
        max_size=12,
    ),
    st.sampled_from([0.0, 1.0, -7.5, 0.1, 1e4]),
)
@settings(max_examples=120, deadline=None)
def test_counts_are_exact_at_every_edge(blocks, threshold):
    one = population(threshold=threshold)
    for block in blocks:
        one.add([4], np.array([block], np.float32))
    fields = one.fields("code")
    scores = np.concatenate([np.empty(0), *blocks]).astype(np.float32)
    assert len(fields["edges"]) == limits.POPULATION_BINS + 1
    assert np.float32(threshold) in np.array(fields["edges"])
    assert (np.diff(fields["edges"]) > 0).all()
    assert at_edges(fields, fields["tokens"]) == above(scores, fields["edges"])
    assert sum(fields["tokens"]) == np.count_nonzero(np.isfinite(scores))
    assert fields["odd"] == np.count_nonzero(np.isnan(scores) | (scores == np.inf))
    assert fields["fixed"] == (sum(map(np.count_nonzero, map(np.isfinite, blocks))) >= limits.BASELINE_TOKENS)


def test_the_bins_are_fixed_by_the_first_scores_and_outliers_are_counted_beyond_them():
    rng = np.random.default_rng(1)
    one = population(threshold=2.0)
    usual = rng.normal(0, 1, limits.BASELINE_TOKENS).astype(np.float32)
    one.add([4], usual[None, :100])
    assert not one.fields("code")["fixed"]
    one.add([4], usual[None, 100:])
    edges = one.fields("code")["edges"]
    later = rng.normal(5, 50, 10_000).astype(np.float32)
    one.add([4], later[None])
    fields = one.fields("code")
    assert fields["edges"] == edges
    assert edges[0] < -2 < 2 < edges[-1] < 10
    both = np.concatenate([usual, later]).astype(np.float64)
    assert fields["tokens"][0] == np.count_nonzero(both < edges[0])
    assert fields["tokens"][-1] == np.count_nonzero(both >= edges[-1])


def test_requests_have_the_score_of_the_pooling_and_their_label():
    labels = {"a": True, "b": False, "c": True}
    one = population(threshold=1.0, pool="mean", labels=labels)
    for request, score in (("a", 1.0), ("b", 1.5), ("c", 0.5), ("d", 2.0), ("e", None)):
        one.finish(request, [score])
    fields = one.fields("code")
    place = fields["edges"].index(1.0)
    unlabelled, negative, positive = ([at_edges(fields, part)[place], sum(part)] for part in fields["requests"])
    assert (unlabelled, negative, positive) == ([1, 1], [1, 1], [1, 2])
    assert fields["labels"] == 3


def test_what_fires_is_counted_by_second_and_minute():
    clock = Clock()
    one = population(threshold=1.0, clock=clock)
    one.add([4], np.array([[0.5, 1.0, 2.0, np.nan]], np.float32))
    assert one.fields("code")["seconds"] == []
    clock.now += 1
    one.add([4], np.array([[0.5]], np.float32))
    clock.now += 2
    assert one.fields("code")["seconds"] == [[3, 2], [1, 0], [0, 0]]
    clock.now += 60
    assert one.fields("code")["minutes"] == [[4, 2]]
    clock.now += 100_000
    fields = one.fields("code")
    assert len(fields["seconds"]) == limits.RATES_S
    assert len(fields["minutes"]) == limits.RATES_MINUTES
    pooled = population(threshold=1.0, pool="max", clock=clock)
    pooled.add([4], np.array([[2.0]], np.float32))
    pooled.finish("r", [2.0])
    clock.now += 1
    assert pooled.fields("code")["seconds"] == [[1, 1]]


def probe(name, pool="token", site=SITE):
    return Probe.make(site, np.eye(8)[3:4], names=(name,), threshold=15.0, pool=pool)


def test_the_board_counts_stages_dropped_columns_and_engines_that_come_back():
    board = Board(4, 16, clock=Clock())
    probes = [probe("code"), probe("deep", "mean", SITES[3])]
    board.greet("engine-1", make_model(), SITES, probes)
    rng = np.random.default_rng(2)
    norms = rng.uniform(10, 20, (4, 64)).astype(np.float32)
    for start in range(0, 64, 8):
        part = norms[:, start : start + 8]
        # Two stages: the second misses a step.
        board.take(frame_of("r1", part[:2], prompt=4, start=start, seq=start + 1))
        if start != 24:
            later = frame_of("r1", part, prompt=4, start=start, seq=start + 2)
            rows = np.frombuffer(later.payload, np.float32).reshape(4, 8, 8)[2:]
            board.take(with_norms(make_frame([("r1", 4, start, 8)], SITES[2:], seq=start + 2), rows[..., 3]))
    board.finish(done("r1"))
    # It reconnects with the same model, and goes on; with another one, it starts again.
    board.greet("engine-1", make_model(), SITES, probes)
    page = PageState()
    board.look(page, 0, probe="code", population="engine-1")
    fields = board.news(page)[0]["population"]
    assert at_edges(fields, fields["tokens"]) == above(norms[1], fields["edges"])
    assert at_edges(fields, fields["requests"][0]) == above([norms[1].max()], fields["edges"])
    board.look(page, 0, probe="deep", population="engine-1")
    fields = board.news(page)[0]["population"]
    kept = np.delete(norms[3], slice(24, 32)).astype(np.float64)
    assert at_edges(fields, fields["tokens"]) == above(kept, fields["edges"])
    assert at_edges(fields, fields["requests"][0]) == above([kept.mean()], fields["edges"])
    assert board.news(page) is None
    board.greet("engine-1", make_model(num_layers=2), SITES[:2], probes)
    board.look(page, 0, probe="code", population="engine-1")
    assert sum(board.news(page)[0]["population"]["tokens"]) == 0


def test_a_page_gets_the_population_that_it_shows_and_no_other(tmp_path):
    path = tmp_path / "code.safetensors"
    probe("code").save(path)
    with open_dashboard(probes=(str(path),)) as consumer, Pageless(consumer) as page:
        consumer.on_session("engine-1", make_model())
        page.until(lambda p: p.engines)
        consumer.on_frame(frame_of("r1", np.full((4, 6), 16.0)))
        page.until(lambda p: p.requests)
        assert page.population == {}
        page.subscribe(probe="code", population="engine-1")
        page.until(lambda p: p.population and sum(p.population["tokens"]) == 6)
        assert page.population["engine"] == "engine-1"
        page.subscribe(population="unknown")
        page.until(lambda p: len(p.heartbeats) > 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ('{"request": 1}', "a request and a label"), ('{"request": "a", "label": 1}', "two")],
)
def test_labels_that_cannot_be_used_are_refused_at_the_start(tmp_path, content, message):
    path = tmp_path / "labels.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=message), dashboard(labels=str(path)):
        pass


def show_population(consumer, requests=20, tokens=60):
    """Let requests finish; return the scores of all tokens, by request, in float64."""
    consumer.on_session("engine-1", make_model())
    rng = np.random.default_rng(4)
    scores = []
    for number in range(requests):
        norms = rng.normal(11, 2, (4, tokens)).clip(1).astype(np.float32)
        consumer.on_frame(frame_of(f"r{number}", norms, prompt=20, seq=number + 1))
        consumer.on_request_done(done(f"r{number}", prompt=20))
        scores.append(norms[1].astype(np.float64))
    return np.array(scores)


def options_of(tmp_path):
    path, labels = tmp_path / "code.safetensors", tmp_path / "labels.jsonl"
    probe("code").save(path)
    labels.write_text("".join(f'{{"request": "r{n}", "label": {n % 2}}}\n' for n in range(16)), encoding="utf-8")
    return {"probes": (str(path),), "labels": str(labels)}


@pytest.mark.browser
def test_the_page_counts_what_a_threshold_would_fire_at(opened, tmp_path):
    with open_dashboard(**options_of(tmp_path)) as consumer:
        window = opened(consumer)
        page = window.page
        scores = show_population(consumer)
        page.locator(".tab", has_text="Population").click()

        def shown(threshold):
            highest = scores.max(axis=1)
            fired = highest >= threshold
            labelled, positive = np.arange(20) < 16, np.arange(20) % 2 == 1
            expect(page.locator("#population-tokens")).to_contain_text(
                f"{np.count_nonzero(scores >= threshold):,} of 1,200"
            )
            expect(page.locator("#population-requests")).to_contain_text(f"{np.count_nonzero(fired)} of 20")
            wrong = np.count_nonzero(fired & labelled & ~positive)
            missed = np.count_nonzero(~fired & labelled & positive)
            expect(page.locator("#population-fp")).to_contain_text(f"{wrong} false positives")
            expect(page.locator("#population-fn")).to_contain_text(f"{missed} false negatives")

        shown(15.0)
        line = page.locator(".edge-line").first
        line.focus()
        for key in ("ArrowLeft", "PageDown", "ArrowRight", "PageDown"):
            before = line.get_attribute("aria-valuenow")
            page.keyboard.press(key)
            eventually(lambda before=before: line.get_attribute("aria-valuenow") != before)
            shown(float(line.get_attribute("aria-valuenow")))
        page.locator("#population-log").click()
        expect(page.locator("#population-log")).to_have_attribute("aria-pressed", "true")
        page.locator("#population-reset").click()
        expect(page.locator("#population-threshold")).to_have_text("15")
        box = line.bounding_box()
        page.mouse.move(box["x"] + 12, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] - 150, box["y"] + 40, steps=3)
        page.mouse.up()
        moved = float(line.get_attribute("aria-valuenow"))
        assert moved < 14
        shown(moved)
        expect(page).to_have_url(re.compile(f"threshold={line.get_attribute('aria-valuenow')}%40"))
        page.reload()
        shown(moved)
        eventually(
            lambda: "1,200" in page.locator("canvas[aria-label*='tokens fired']").first.get_attribute("aria-label")
        )
        with page.expect_download() as waiting:
            page.keyboard.press("e")
            page.locator("#export [data-name=Histograms]").click()
        assert waiting.value.suggested_filename == "capflow-histograms.png"


@pytest.mark.browser
@pytest.mark.parametrize(
    ("width", "scheme", "forced"),
    [(320, "light", "none"), (390, "dark", "none"), (1440, "light", "active"), (3840, "dark", "none")],
)
def test_the_population_fits_and_axe_finds_nothing_serious(opened, tmp_path, width, scheme, forced):
    with open_dashboard(**options_of(tmp_path)) as consumer:
        settings_of = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme, "forced_colors": forced}
        window = opened(consumer, "#/population", **settings_of)
        expect(window.page.locator(".population-head")).to_contain_text("No engine with a probe")
        assert window.findings() == []
        show_population(consumer)
        expect(window.page.locator("#population-requests")).to_contain_text("of 20")
        assert window.overflows() == []
        assert window.findings() == []
