"""The dashboard's page in a real browser, fed with real frames: what it shows of requests, tokens and layers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from playwright.sync_api import expect

from capflow.capture.frame import Dropped
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from capflow.steering.action import Answered
from tests.kit.dashboards import open_dashboard
from tests.kit.frames import make_frame, make_model, token_of
from tests.kit.pages import SITES, done, frame_of, with_texts
from tests.kit.waiting import eventually, never

pytestmark = pytest.mark.browser

WORDS = {"r1": ["<bos>", "The", " capital", " of", " France", " is", " Paris", "."]}
RISING = np.array([np.linspace(10, 20, 20)] * 4)


def probe_file(tmp_path, **more):
    """Return the path of a probe whose score is the norm of `pages.frame_of`'s rows at the second site."""
    path = tmp_path / "probes.safetensors"
    settings = {"names": ("truth",), "threshold": 12.5} | more
    Probe.make(Site(1, "post_block"), np.eye(8)[3:4], **settings).save(path)
    return (str(path),)


def test_the_empty_page_says_what_to_do_next(opened):
    with open_dashboard() as consumer:
        page = opened(consumer).page
        expect(page.locator("#empty h2")).to_have_text("No engine is connected yet")
        expect(page.locator("#empty")).to_contain_text("capflow serve MODEL")
        expect(page.locator("#request")).to_be_hidden()
        consumer.on_session("engine-1", make_model())
        expect(page.locator("#empty h2")).to_have_text("Waiting for a request")
        expect(page.locator("#empty li.done")).to_contain_text("Start an engine ✓ done")
        expect(page.locator("#empty")).to_contain_text('"model": "test-model"')
        expect(page.locator(".engine")).to_contain_text("test-model 4 \u00d7 8, float32 · engine-1")


def test_the_token_leaves_the_address_at_once(opened):
    with open_dashboard() as consumer:
        page = opened(consumer).page
        token = consumer.link.partition("token=")[2]
        assert token not in page.url
        page.reload()
        expect(page.locator("#link")).to_have_text(re.compile("live|stale"))


def test_a_request_is_shown_while_it_runs(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(with_texts(make_frame([("r1", 4, 0, 4)], SITES), WORDS))
        window.wait_tokens(4)
        expect(page.locator("#request-status")).to_have_text("● live")
        for position in range(4, 7):
            frame = make_frame([("r1", 4, position, 1)], SITES, seq=position)
            consumer.on_frame(with_texts(frame, WORDS))
            window.wait_tokens(position + 1)
        assert page.locator(".prompt .t").all_text_contents() == WORDS["r1"][:4]
        assert page.locator(".generated .t").all_text_contents() == WORDS["r1"][4:7]
        expect(page.locator("#request-facts")).to_contain_text("4 prompt tokens, 3 generated")
        consumer.on_request_done(done("r1", "length", [Dropped(5, "consumer_queue_full")]))
        expect(page.locator("#request-status")).to_have_text("✓ done, at its length limit")
        expect(page.locator("#request-facts")).to_contain_text("5 rows lost")
        expect(page.locator(".facts .bad", has_text="rows dropped")).to_contain_text("5")


def test_colours_wait_for_the_reference_and_say_how_far_it_is(opened):
    norms = np.array([np.linspace(10, 20, 30)] * 4)
    with open_dashboard() as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", norms[:, :5], prompt=4))
        window.wait_tokens(5)
        expect(window.page.locator("#reference")).to_have_text("no colours yet; reference: 5 of 16 rows")
        assert window.steps() == [None] * 5
        consumer.on_frame(frame_of("r1", norms[:, 5:16], prompt=4, start=5, seq=2))
        expect(window.page.locator("#reference")).to_have_text("robust z, reference: first 16 rows")
        window.wait_coloured()


def test_a_colour_once_drawn_stays_however_the_request_goes_on(opened):
    random = np.random.default_rng(3)
    norms = random.uniform(10, 20, (4, 400)).astype(np.float32)
    norms[:, 200:] *= 50
    with open_dashboard() as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", norms[:, :40], prompt=40))
        for scale in ("z", "ratio", "log", "raw"):
            window.choose_scale(scale)
            end = window.tokens().count()
            before, cells = window.wait_coloured()[:40], window.cells(4, 40, end)
            for start in range(end, end + 90, 30):
                steered = {"r1": (200, start + 30)} if start >= 200 else None
                rows = norms[:, start : start + 30]
                consumer.on_frame(frame_of("r1", rows, prompt=40, start=start, seq=start, steered=steered))
                window.wait_tokens(start + 30)
            assert window.steps()[:40] == before, scale
            expect(window.page.locator("#heat")).to_have_attribute("aria-valuemax", str(start + 29))
            np.testing.assert_array_equal(window.cells(4, 40, start + 30), cells)


def test_tokens_and_cells_have_the_colours_of_their_norms(opened):
    norms = np.concatenate([RISING[:3], RISING[3:, ::-1]])
    with open_dashboard() as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", norms))
        window.wait_tokens(20)
        for site, order in (("post_block:3", -1), ("post_block:0", 1)):
            window.page.select_option("#by", site)
            for scale in ("z", "ratio", "log", "raw"):
                window.choose_scale(scale)
                eventually(lambda o=order: None not in window.steps() and np.all(np.diff(window.steps()[::o]) > 0))
        window.choose_scale("raw")
        expect(window.page.locator("#legend .legend")).to_contain_text("≤ 10")
        expect(window.page.locator("#legend .legend")).to_contain_text("≥ 20")
        cells = window.cells(4, 20)
        np.testing.assert_array_equal(cells[0], cells[3][::-1])
        assert len({tuple(cell) for cell in cells[0]}) == 20


def test_one_outlier_does_not_take_all_the_colours(opened):
    norms = RISING.copy()
    norms[:, 0] = 1000
    with open_dashboard() as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", norms))
        window.choose_scale("raw")
        eventually(lambda: window.steps()[:1] == [63] and len(set(window.steps())) > 15)


def test_pointing_at_a_token_shows_every_layer_of_it(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(with_texts(frame_of("r1", RISING, prompt=4), {"r1": [*WORDS["r1"], *["x"] * 12]}))
        window.wait_tokens(20)
        window.tokens().nth(2).hover()
        expect(page.locator("#token-title")).to_have_text("Token  capital")
        facts = page.locator("#token-facts")
        expect(facts).to_contain_text("2, prompt")
        expect(facts).to_contain_text(str(token_of("r1", 2)))
        layers = page.locator("#token-layers tbody tr")
        expect(layers).to_have_count(4)
        expect(layers.first).to_contain_text(f"post_block:3{RISING[3, 2]:.4g}")
        window.tokens().nth(4).hover()
        expect(facts).to_contain_text("4, generated")
        page.locator("#request-id").hover()
        expect(page.locator("#token h2")).to_have_text("Token")


def test_a_token_that_is_clicked_stays_and_is_in_the_address(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", RISING))
        window.wait_tokens(20)
        window.tokens().nth(3).click()
        page.locator("#request-id").hover()
        expect(page.locator("#token-facts")).to_contain_text("3, prompt")
        expect(page).to_have_url(re.compile(r"#/r/engine-1/r1\?pos=3"))
        page.reload()
        expect(page.locator("#token-facts")).to_contain_text("3, prompt")
        expect(window.tokens().nth(3)).to_have_attribute("aria-selected", "true")


def test_a_click_in_the_heatmap_moves_the_cursor_and_keeps_the_colours(opened, tmp_path):
    with open_dashboard(probes=probe_file(tmp_path)) as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", RISING))
        window.wait_coloured()
        assert page.locator("#by").input_value() == "probe:truth@post_block:1"
        box = page.locator("#heat").bounding_box()
        plot = (box["width"] - 74) / 24
        page.mouse.click(box["x"] + 60 + 5.5 * plot, box["y"] + (box["height"] - 20) * 0.99 - 2)
        expect(page.locator("#heat-value")).to_contain_text("position 5, post_block:0: 12.63")
        assert page.locator("#by").input_value() == "probe:truth@post_block:1"
        expect(page.locator("#token-layers [aria-current]")).to_contain_text("post_block:0")
        expect(page.locator("#heat")).to_have_attribute(
            "aria-valuetext", re.compile("^position 5, post_block:0: 12.63")
        )


def test_the_loaded_probe_colours_the_tokens_and_marks_where_it_fires(opened, tmp_path):
    with open_dashboard(probes=probe_file(tmp_path)) as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", RISING))
        steps = window.wait_coloured()
        fires = int((RISING[0] >= 12.5).sum())
        expect(page.locator("#text .fires")).to_have_count(fires)
        assert np.all(np.diff(steps) >= 0)
        assert steps[20 - fires - 1] < 32 <= steps[20 - fires]
        window.tokens().nth(19).hover()
        expect(page.locator("#token-probes tbody tr")).to_have_text(
            re.compile(r"truth\s+post_block:1\s*20\s*12\.5\s*yes")
        )
        window.tokens().nth(0).hover()
        expect(page.locator("#token-probes tbody tr")).to_have_text(re.compile(r"10\s*12\.5\s*no"))
        page.select_option("#by", "post_block:2")
        expect(page.locator("#text .fires")).to_have_count(0)


def test_a_moved_threshold_shows_what_would_fire_and_changes_no_colour(opened, tmp_path):
    with open_dashboard(probes=probe_file(tmp_path)) as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", RISING))
        steps = window.wait_coloured()
        head, line = page.locator(".track-head"), page.locator(".threshold")
        fires = int((RISING[0] >= 12.5).sum())
        expect(head).to_contain_text(f"fires from 12.5: {fires} tokens")
        before = line.bounding_box()
        page.mouse.move(before["x"] + 200, before["y"] + 12)
        page.mouse.down()
        page.mouse.move(before["x"] + 200, before["y"] + 2)
        page.mouse.up()
        moved = float(line.get_attribute("aria-valuenow"))
        assert moved > 12.5
        would = int((RISING[0] >= moved).sum())
        expect(head).to_contain_text(f"would: {would} tokens")
        expect(head).to_contain_text(f"fires from 12.5: {fires} tokens")
        expect(page.locator("#text .fires")).to_have_count(would)
        line.focus()
        page.keyboard.press("PageDown")
        eventually(lambda: float(line.get_attribute("aria-valuenow")) < moved)
        assert "tokens" in line.get_attribute("aria-valuetext")
        assert window.steps() == steps
        # The address has it: whoever opens the link sees the same, and the population of the probe has it too.
        chosen, words = line.get_attribute("aria-valuenow"), line.get_attribute("aria-valuetext")
        expect(page).to_have_url(re.compile(f"threshold={chosen}%40"))
        page.reload()
        window.wait_coloured()
        expect(line).to_have_attribute("aria-valuenow", chosen)
        expect(line).to_have_attribute("aria-valuetext", words)
        page.locator(".tab", has_text="Population").click()
        expect(page.locator("#population-reset")).to_have_text("Reset to 12.5")
        page.go_back()
        expect(line).to_be_visible()
        line.focus()
        page.keyboard.press("Home")
        expect(page.locator(".moved")).to_have_count(0)
        assert window.steps() == steps


def test_a_pooled_probe_fires_for_the_request_and_not_by_token(opened, tmp_path):
    with open_dashboard(probes=probe_file(tmp_path, pool="mean")) as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", RISING))
        window.wait_coloured()
        expect(page.locator("#text .fires")).to_have_count(0)
        expect(page.locator(".track-head")).to_contain_text("the request's mean")
        expect(page.locator(".track-head")).to_contain_text("fires from 12.5: fires")
        expect(page.locator("#request-facts")).to_contain_text("truth 15 (mean) fires")


def test_steered_tokens_are_marked_and_say_by_what(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", RISING, prompt=4, steered={"r1": (6, 10)}))
        event = ("id1", "engine-1", "r1", "steer", (SITES[1],), "gate@x", 10**9, 7, "", 6)
        consumer.on_action(Answered(*event, scale=2.0))
        window.wait_tokens(20)
        expect(page.locator("#text .steered")).to_have_count(4)
        expect(page.locator(".request-head .steered")).to_have_text("steered")
        expect(page.locator("#requests .row .steered")).to_have_text("steered")
        expect(page.locator(".lane-canvas")).to_have_attribute("aria-label", re.compile("Steered at positions 6 to 9"))
        window.tokens().nth(7).hover()
        expect(page.locator("#token-steered")).to_contain_text("yes")
        expect(page.locator("#token-steered")).to_contain_text("by gate@x at post_block:1")
        window.tokens().nth(10).hover()
        expect(page.locator("#token-steered")).to_have_text("no")
        expect(page.locator("#events li")).to_contain_text("steer")


def test_nan_infinity_and_missing_rows_differ_by_more_than_colour(opened):
    norms = RISING.copy()
    norms[:, 2], norms[:, 3] = np.nan, np.inf
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", norms, prompt=23))
        consumer.on_frame(frame_of("r1", RISING[:, :2], prompt=23, start=21, seq=2))
        consumer.on_request_done(done("r1", prompt=23))
        window.wait_tokens(23)
        for place, text in ((2, "NaN"), (3, "infinite"), (20, "no row")):
            window.tokens().nth(place).hover()
            expect(page.locator("#token-layers tbody tr").first).to_contain_text(text)
        expect(page.locator("#token-facts")).to_contain_text("unknown")
        page.locator("#request-id").hover()
        eventually(lambda: page.locator("#text .odd").count() == 2)
        assert page.locator("#text .gone").all_text_contents() == ["·"]
        looks = page.evaluate(
            """() => ["odd", "gone"].map((name) => {
              const style = getComputedStyle(document.querySelector(`#text .${name}`));
              return [style.outlineStyle, style.backgroundImage.slice(0, 9)];
            })"""
        )
        assert looks == [["dashed", "repeating"], ["dotted", "none"]]
        value, odd, missing = (window.inked(column, 24) for column in (1, 2, 20))
        assert value == 1
        assert missing < 0.2 < odd < 0.9
        assert missing > 0


def test_texts_are_text_and_never_markup(opened):
    evil = ["<img src=x onerror=alert(1)>", "<script>alert(2)</script>", "&lt;b&gt;", "\u202egnol", "\n", ""]
    request = "<b onmouseover=alert(3)>r</b>"
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("<i>engine</i>", make_model())
        frame = make_frame([(request, 6, 0, 6)], SITES, engine="<i>engine</i>")
        consumer.on_frame(with_texts(frame, {request: evil}))
        window.wait_tokens(6)
        assert window.tokens().all_text_contents() == [*evil[:4], "⏎\n", f"#{token_of(request, 5)}"]
        expect(page.locator("#request-id")).to_have_text(request)
        expect(page.locator("#requests .row .id")).to_have_text(request)
        expect(page.locator(".engine")).to_contain_text("<i>engine</i>")
        window.tokens().nth(0).hover()
        expect(page.locator("#token-title")).to_contain_text(evil[0])
        assert page.locator("#text img, #text script, .engine i, #token img, #requests b").count() == 0


def test_the_newest_request_is_followed_and_a_chosen_one_kept(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        shown = page.locator("#request-id")
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))
        expect(shown).to_have_text("r1")
        consumer.on_frame(make_frame([("r2", 4, 0, 4)], SITES, seq=2))
        consumer.on_request_done(done("r1"))
        expect(shown).to_have_text("r2")
        window.choose("r1")
        expect(page.locator("#follow")).to_have_attribute("aria-pressed", "false")
        consumer.on_request_done(done("r2"))
        consumer.on_frame(make_frame([("r3", 4, 0, 4)], SITES, seq=3))
        expect(page.locator(".more")).to_have_text("1 new request: show")
        expect(page.locator("#requests .row")).to_have_count(2)
        page.locator(".more").click()
        expect(page.locator("#requests .row").first).to_contain_text("r3")
        expect(shown).to_have_text("r1")
        page.locator("#follow").click()
        expect(shown).to_have_text("r3")
        assert page.locator('#requests .row[aria-selected="true"]').count() == 1


def test_engines_that_left_are_counted_and_not_listed(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        for number in (1, 2):
            consumer.on_session(f"engine-{number}", make_model())
            consumer.on_frame(make_frame([(f"r{number}", 4, 0, 4)], SITES, engine=f"engine-{number}"))
        expect(page.locator(".engine")).to_contain_text("engine-1, engine-2")
        consumer.on_engine_gone("engine-1")
        expect(page.locator(".engine")).not_to_contain_text("engine-1")
        expect(page.locator(".engines")).to_contain_text("1 left")


def test_a_long_request_keeps_its_latest_tokens(opened):
    with open_dashboard(tokens_max=64) as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 60, 0, 60)], SITES))
        window.wait_tokens(60)
        consumer.on_frame(make_frame([("r1", 60, 60, 20)], SITES, seq=2))
        expect(window.page.locator(".before")).to_have_text("Positions 0 to 15 are not kept.")
        window.wait_tokens(64)
        expect(window.page.locator("#reference")).to_have_text("robust z, reference: 60 prompt rows")
        window.tokens().first.hover()
        expect(window.page.locator("#token-facts")).to_contain_text("16, prompt")


def test_a_request_of_32000_tokens_is_shown_in_parts(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        for start in range(0, 32_000, 8_000):
            frame = make_frame([("r1", 2_000, start, 8_000)], SITES[:1], seq=start + 1, texts=True)
            consumer.on_frame(frame)
        expect(page.locator("#heat")).to_have_attribute("aria-valuemax", "31999")
        eventually(lambda: page.locator(".chunk").count() >= 32_000 // 256)
        assert window.tokens().count() < 8_000
        page.locator("#text").focus()
        page.keyboard.press("End")
        expect(page.locator("#token-facts")).to_contain_text("31,999, generated")
        eventually(window.shows_cursor)
        page.keyboard.press("+")
        expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
        page.keyboard.press("0")
        expect(page).not_to_have_url(re.compile("from="))


def test_the_cursor_stays_in_view_when_the_window_changes_until_the_user_scrolls(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 400, 0, 4_000)], SITES[:1], texts=True))
        consumer.on_request_done(done("r1", prompt=400))
        expect(page.locator("#heat")).to_have_attribute("aria-valuemax", "3999")
        for key, facts in (("End", "3,999, generated"), ("PageUp", "3,949, generated"), ("Home", "0, prompt")):
            page.set_viewport_size({"width": 1280, "height": 1000})
            page.locator("#text").press(key)
            expect(page.locator("#token-facts")).to_contain_text(facts)
            eventually(window.shows_cursor)
            for size in ((1280, 500), (700, 500), (1280, 1000)):
                page.set_viewport_size({"width": size[0], "height": size[1]})
                eventually(window.shows_cursor)
        page.locator("#text").hover()
        page.mouse.wheel(0, 4_000)
        eventually(lambda: not window.shows_cursor())
        page.set_viewport_size({"width": 1280, "height": 900})
        never(window.shows_cursor, 0.5)
