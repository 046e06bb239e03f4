"""Two requests of one page: what the server sends of the second, and how the page compares them."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest
from playwright.sync_api import expect

from capflow.capture.frame import Frame
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from tests.kit.dashboards import Pageless, open_dashboard
from tests.kit.frames import make_frame, make_model
from tests.kit.pages import SITES, done, frame_of
from tests.kit.waiting import eventually

NORMS = np.random.default_rng(1).uniform(10, 20, (4, 60)).astype(np.float32)
OTHER = np.random.default_rng(2).uniform(10, 20, (4, 70)).astype(np.float32)


def with_ids(frame, ids, texts=None):
    """Return the frame of one request with other tokens."""
    (request,) = frame.header.requests
    texts = tuple(texts or (f" w{number}" for number in ids))
    request = msgspec.structs.replace(request, token_ids=tuple(ids), texts=texts)
    return Frame.seal(msgspec.structs.replace(frame.header, requests=(request,)), frame.payload)


def test_the_second_request_comes_with_numbers_of_its_own():
    with open_dashboard() as consumer, Pageless(consumer) as page:
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", NORMS))
        consumer.on_frame(frame_of("r2", OTHER[:, :50], seq=2))
        page.until(lambda p: len(p.requests) == 2)
        page.subscribe(request=1, other=2)
        page.until(lambda p: p.columns == 60 and p.other.columns == 50)
        np.testing.assert_array_equal(page.values, NORMS)
        np.testing.assert_array_equal(page.other.values, OTHER[:, :50])
        # Both grow, at once and apart.
        consumer.on_frame(frame_of("r2", OTHER[:, 50:60], start=50, prompt=50, seq=3))
        page.until(lambda p: p.other.columns == 60)
        consumer.on_frame(make_frame([("r1", 60, 60, 3)], SITES, seq=4))
        consumer.on_frame(frame_of("r2", OTHER[:, 60:], start=60, prompt=50, seq=5))
        page.until(lambda p: p.columns == 63 and p.other.columns == 70)
        np.testing.assert_array_equal(page.other.values, OTHER)
        assert (page.fresh, page.other.fresh) == (1, 1)
        page.subscribe(request=2, other=1)
        page.until(lambda p: p.columns == 70 and p.other.columns == 63)
        np.testing.assert_array_equal(page.values, OTHER)
        page.subscribe(other=0)
        page.until(lambda p: len(p.heartbeats) > 1)
        eventually(lambda: all(state.other is None for state in consumer.server.connections.values()))


def test_the_second_request_is_not_the_first_that_is_dropped():
    with open_dashboard(requests_max=2) as consumer, Pageless(consumer) as page:
        consumer.on_session("engine-1", make_model())
        for number, request in enumerate(("r1", "r2")):
            consumer.on_frame(frame_of(request, NORMS, seq=number + 1))
            consumer.on_request_done(done(request))
        page.until(lambda p: len(p.requests) == 2)
        page.subscribe(request=0, other=1)
        page.until(lambda p: p.other.columns == 60)
        consumer.on_frame(frame_of("r3", NORMS, seq=3))
        page.until(lambda p: {one["id"] for one in p.requests.values()} == {"r1", "r3"})


def probe_file(tmp_path):
    path = tmp_path / "probes.safetensors"
    Probe.make(Site(1, "post_block"), np.eye(8)[3:4], names=("truth",), threshold=15.0).save(path)
    return (str(path),)


def show_two(consumer):
    """Show two requests whose tokens are the same up to position 24, of prompts with 20 and 22 tokens."""
    consumer.on_session("engine-1", make_model())
    ids = list(range(100, 160))
    consumer.on_frame(with_ids(frame_of("r1", NORMS, prompt=20), ids))
    others = [*ids[:24], 7, *range(125, 170)]
    consumer.on_frame(with_ids(frame_of("r2", OTHER, prompt=22, seq=2), others))
    for request, prompt in (("r1", 20), ("r2", 22)):
        consumer.on_request_done(done(request, prompt=prompt))


def medians(values):
    median = np.median(values, axis=1, keepdims=True)
    return 1.4826 * np.median(np.abs(values - median), axis=1)


@pytest.mark.browser
def test_two_requests_are_beside_each_other(opened, tmp_path):
    with open_dashboard(probes=probe_file(tmp_path)) as consumer:
        window = opened(consumer)
        page = window.page
        show_two(consumer)
        window.choose("r2")
        window.choose("r1")
        window.wait_tokens(60)
        page.keyboard.press("c")
        expect(page).to_have_url(re.compile(r"#/compare/engine-1/r1/engine-1/r2"))
        verdict = page.locator("#compare-verdict")
        expect(verdict).to_contain_text("24 tokens the same, then A has  w124 at position 24 and B  w7 at 24")
        left, right = page.locator(".compare-text").nth(0), page.locator(".compare-text").nth(1)
        expect(left.locator(".t")).to_have_count(60)
        expect(right.locator(".t")).to_have_count(70)
        expect(left.locator(".first")).to_have_text(" w124")
        expect(right.locator(".first")).to_have_text(" w7")
        assert left.locator(".differs").count() == 1
        assert right.locator(".alone").count() == 10
        # The numbers at the cursor, which begins at the first difference, in float64.
        for layer in range(4):
            row = page.locator(".compare-panel tbody tr", has_text=f"post_block:{layer}").last
            a, b = float(NORMS[layer, 24]), float(OTHER[layer, 24])
            shown = [float(cell.replace("\u2212", "-")) for cell in row.locator("td").all_text_contents()]
            np.testing.assert_allclose(shown, [a, b, b - a], rtol=6e-4, atol=1e-3)
        # Cells are differences in spreads of the reference of A, its prompt.
        spread = medians(NORMS[:, :20].astype(np.float64))
        heat = page.locator("#compare .heat")
        heat.focus()
        page.keyboard.press("Home")
        expect(heat).to_have_attribute("aria-valuenow", "0")
        for position in range(3):
            value = (float(OTHER[3, position]) - float(NORMS[3, position])) / spread[3]
            shown = heat.get_attribute("aria-valuetext")
            assert shown.startswith(f"position {position}, post_block:3: ")
            assert abs(float(shown.rsplit(" ", 1)[1].replace("\u2212", "-")) - value) < 2e-3 * max(1, abs(value))
            page.keyboard.press("ArrowRight")
            expect(heat).to_have_attribute("aria-valuenow", str(position + 1))
        page.select_option("#compare-align", "generated")
        expect(verdict).to_contain_text("Different at once: A has  w120 at position 20 and B  w122 at 22")
        expect(page).to_have_url(re.compile("align=generated"))
        address = page.url
        page.goto("about:blank")
        page.goto(address)
        expect(verdict).to_contain_text("A has  w120 at position 20")
        page.locator("#compare-swap").click()
        expect(verdict).to_contain_text("A has  w122 at position 22 and B  w120 at 20")
        page.keyboard.press("End")
        page.keyboard.press("n")
        expect(page.locator("#compare-token")).to_contain_text("w122")
        page.keyboard.press("c")
        expect(page.locator("#request-id")).to_have_text("r2")
        expect(page.locator("#compare")).to_be_hidden()


@pytest.mark.browser
def test_a_request_that_is_not_kept_is_named_and_another_can_be_chosen(opened):
    with open_dashboard() as consumer:
        window = opened(consumer, "#/compare/engine-1/r1/engine-1/%3Cb%3Egone")
        page = window.page
        show_two(consumer)
        expect(page.locator("#compare-verdict")).to_have_text("B, <b>gone, is not kept.")
        page.select_option("#compare-b", value="2")
        expect(page.locator("#compare-verdict")).to_contain_text("24 tokens the same")
        with page.expect_download() as waiting:
            page.keyboard.press("e")
            page.locator("#export [data-name=Differences]").click()
        assert waiting.value.suggested_filename == "capflow-differences.png"


@pytest.mark.browser
@pytest.mark.parametrize(
    ("width", "scheme", "forced"),
    [(320, "light", "none"), (390, "dark", "none"), (1440, "light", "active"), (3840, "dark", "none")],
)
def test_the_comparison_fits_and_axe_finds_nothing_serious(opened, tmp_path, width, scheme, forced):
    with open_dashboard(probes=probe_file(tmp_path)) as consumer:
        settings = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme, "forced_colors": forced}
        window = opened(consumer, "#/compare/engine-1/r1/engine-1/r2", **settings)
        show_two(consumer)
        expect(window.page.locator("#compare-verdict")).to_contain_text("24 tokens the same")
        expect(window.page.locator("#compare .heat")).to_have_attribute("aria-valuemax", "69")
        assert window.overflows() == []
        assert window.findings() == []
