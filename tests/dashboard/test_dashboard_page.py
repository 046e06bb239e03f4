"""The dashboard's page in a real browser, fed with real frames."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from playwright.sync_api import expect, sync_playwright

from capflow.capture.frame import Dropped, Frame, RequestRows
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from tests.kit.dashboards import norm_of, open_dashboard
from tests.kit.frames import make_frame, make_model, token_of
from tests.kit.waiting import eventually

pytestmark = pytest.mark.browser

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SITES = tuple(Site(layer, "post_block") for layer in range(4))
LIMIT_MS = 20_000


@pytest.fixture(scope="module")
def chromium():
    """Return a browser; without one these tests fail, for a page that nobody looks at is not tested."""
    path = shutil.which(CHROMIUM) or shutil.which("chromium")
    if path is None:
        pytest.fail(f"{CHROMIUM} is not there and the dashboard's page cannot be tested: run `make system`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


class Opened:
    """A page that is open on a dashboard.

    complaints: warnings and errors of its console.
    """

    def __init__(self, page, consumer):
        self.page = page
        self.consumer = consumer
        self.complaints = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        page.set_default_timeout(LIMIT_MS)
        # Requests to anywhere else.
        self.foreign = []
        page.on("request", self._asked)
        page.goto(consumer.address)
        expect(page.locator("#link")).to_have_text("connected", timeout=LIMIT_MS)

    def _on_console(self, message):
        gone = self.consumer.closed and "ERR_CONNECTION_REFUSED" in message.text
        if message.type in ("error", "warning") and not gone:
            self.complaints.append(message.text)

    def _asked(self, request):
        if not request.url.startswith((f"http://{self.host}", f"ws://{self.host}", "data:")):
            self.foreign.append(request.url)

    @property
    def host(self):
        return re.match(r"http://([^/]+)/", self.consumer.address)[1]

    def tokens(self):
        return self.page.locator(".token")

    def wait_tokens(self, count):
        expect(self.tokens()).to_have_count(count, timeout=LIMIT_MS)

    def heat(self):
        """Return what the heatmap shows, `[layers, tokens]`."""
        return self.page.evaluate("document.getElementById('heat').data?.[0].z ?? []")

    def wait_heat(self, columns):
        eventually(lambda: self.heat() and len(self.heat()[0]) == columns)

    def colours(self):
        """Return the tokens' colours, as their places in the legend: 0 to 1, by which colour is nearest."""
        bar, backs = self.page.evaluate(
            """() => [
              getComputedStyle(document.getElementById("legend-bar")).backgroundImage,
              [...document.querySelectorAll(".token")].map((token) => token.style.backgroundColor),
            ]"""
        )
        stops = np.array([numbers(stop) for stop in re.findall(r"rgb\([^)]*\)", bar)])
        places = np.linspace(0, 1, 500)
        ramp = np.stack([np.interp(places, np.linspace(0, 1, len(stops)), channel) for channel in stops.T], axis=1)
        return [places[np.abs(ramp - numbers(back)).sum(axis=1).argmin()] if back else np.nan for back in backs]


def numbers(colour):
    return [int(number) for number in re.findall(r"\d+", colour)]


@pytest.fixture
def opened(chromium, tmp_path):
    """Return a function that opens a dashboard with a page; whatever the console complained of fails the test."""
    contexts, pages = [], []

    def make(consumer, **settings):
        context = chromium.new_context(viewport={"width": 1280, "height": 800}, **settings)
        contexts.append(context)
        pages.append(Opened(context.new_page(), consumer))
        return pages[-1]

    yield make
    for context in contexts:
        context.close()
    assert [(page.complaints, page.foreign) for page in pages] == [([], [])] * len(pages)


def with_texts(frame, texts):
    """Return the frame with other texts for its tokens, request by request."""
    requests = tuple(
        RequestRows(r.id, r.prompt_length, r.start, r.token_ids, tuple(texts[r.id][r.start :][: len(r.token_ids)]))
        for r in frame.header.requests
    )
    header = type(frame.header)(
        **{name: getattr(frame.header, name) for name in frame.header.__struct_fields__} | {"requests": requests}
    )
    return Frame.seal(header, frame.payload)


def with_rows(frame, rows):
    return Frame.seal(frame.header, np.ascontiguousarray(rows, np.float32).view(np.uint8))


def rows_with_norms(values, hidden=8):
    """Return rows `[sites, tokens, hidden]` that have the norms `[sites, tokens]`."""
    rows = np.zeros((*np.shape(values), hidden), np.float32)
    rows[..., 3] = values
    return rows


def done(request, status="stop", dropped=()):
    return RequestDone("engine-1", request, status, 4, 6, 24, 24, tuple(dropped))


WORDS = {"r1": ["<bos>", "The", " capital", " of", " France", " is", " Paris", "."]}


def test_the_empty_page_says_what_to_do(opened):
    with open_dashboard() as consumer:
        page = opened(consumer).page
        expect(page.locator("#empty-engine")).to_contain_text("capflow serve MODEL")
        expect(page.locator("#view")).to_be_hidden()
        consumer.on_session("engine-1", make_model())
        expect(page.locator("#empty-request")).to_contain_text("Waiting for a request")
        expect(page.locator("#engine")).to_contain_text(
            "test-model 4 layers \u00d7 8, float32, 4 sites · engine engine-1"
        )


def test_a_request_is_shown_while_it_runs(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(with_texts(make_frame([("r1", 4, 0, 4)], SITES), WORDS))
        window.wait_tokens(4)
        expect(page.locator("#shown-status")).to_have_text("● live")
        for position in range(4, 7):
            frame = make_frame([("r1", 4, position, 1)], SITES, seq=position)
            consumer.on_frame(with_texts(frame, WORDS))
            window.wait_tokens(position + 1)
        assert page.locator("#tokens-prompt .token").all_text_contents() == WORDS["r1"][:4]
        assert page.locator("#tokens-generated .token").all_text_contents() == WORDS["r1"][4:7]
        expect(page.locator("#shown-facts")).to_have_text("4 prompt tokens, 3 generated")
        consumer.on_request_done(done("r1", "length", [Dropped(5, "consumer_queue_full")]))
        expect(page.locator("#shown-status")).to_have_text("✓ done, at its length limit")
        expect(page.locator("#count-done")).to_have_text("1")
        expect(page.locator("#count-dropped")).to_have_text("5")
        expect(page.locator("#measure option")).to_have_count(1)


def test_the_heatmap_holds_the_norms(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 6)], SITES, dtype="bfloat16"))
        window.wait_tokens(6)
        norms = np.array([[norm_of("r1", site, position, "bfloat16") for position in range(6)] for site in SITES])
        median = np.median(norms, axis=1, keepdims=True)
        spread = 1.4826 * np.median(np.abs(norms - median), axis=1, keepdims=True)
        expected = {"raw": norms, "log": np.log10(norms), "ratio": norms / median, "z": (norms - median) / spread}
        assert window.page.locator("#scale").input_value() == "z"
        for scale in ("z", "raw", "log", "ratio"):
            window.page.select_option("#scale", scale)
            eventually(
                lambda s=scale: (
                    np.shape(window.heat()) == (4, 6) and np.allclose(window.heat(), expected[s], rtol=1e-5, atol=1e-5)
                )
            )
        assert window.page.locator("#heat .hm image").count() == 1


def test_tokens_have_the_colours_of_their_norms(opened):
    norms = np.array([[10.0, 11, 12, 13, 14, 15]] * 3 + [[15.0, 14, 13, 12, 11, 10]])
    with open_dashboard() as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(with_rows(make_frame([("r1", 4, 0, 6)], SITES), rows_with_norms(norms)))
        window.wait_tokens(6)
        for site, order in (("post_block:3", -1), ("post_block:0", 1)):
            window.page.select_option("#site", site)
            for scale in ("z", "ratio", "log", "raw"):
                window.page.select_option("#scale", scale)

                eventually(lambda o=order: np.all(np.diff(window.colours()[::o]) > 0))
        window.page.select_option("#scale", "raw")
        expect(window.page.locator("#legend-low")).to_have_text("≤ 10")
        expect(window.page.locator("#legend-high")).to_have_text("≥ 15")


def test_one_outlier_does_not_take_all_the_colours(opened):
    norms = np.array([[1000.0, 10, 11, 12, 13, 14, 15, 16]] * 4)
    with open_dashboard() as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(with_rows(make_frame([("r1", 8, 0, 8)], SITES), rows_with_norms(norms)))
        window.wait_tokens(8)
        window.page.select_option("#scale", "raw")
        eventually(lambda: window.colours()[0] > 0.98 and len(set(window.colours())) == 8)


def test_pointing_at_a_token_says_what_it_is(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(with_texts(make_frame([("r1", 4, 0, 6)], SITES), WORDS))
        window.wait_tokens(6)
        window.page.select_option("#site", "post_block:2")
        window.tokens().nth(4).hover()
        tip = window.page.locator("#tip")
        expect(tip).to_be_visible()
        expect(tip).to_contain_text("token  France")
        expect(tip).to_contain_text("position 4, generated")
        expect(tip).to_contain_text(f"token id {token_of('r1', 4)}")
        norm = re.search(r"norm at post_block:2 ([\d.]+)", tip.inner_text())[1]
        assert float(norm) == pytest.approx(norm_of("r1", SITES[2], 4), rel=1e-3)
        window.page.locator("#shown-id").hover()
        expect(tip).to_be_hidden()


def test_the_heatmap_says_values_and_chooses_a_site(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 20, 0, 20)], SITES, texts=True))
        window.wait_heat(20)
        place = window.page.locator("#heat .nsewdrag").bounding_box()
        at = (place["x"] + place["width"] * 7.5 / 20, place["y"] + place["height"] * 2.5 / 4)
        window.page.mouse.move(*at)
        tip = window.page.locator("#tip")
        expect(tip).to_contain_text("position 7, prompt")
        expect(tip).to_contain_text("norm at post_block:1")
        window.page.mouse.click(*at)
        expect(window.page.locator("#site")).to_have_value("post_block:1")
        expect(window.tokens().nth(7)).to_be_focused()


def test_the_page_works_by_keyboard(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 6)], SITES, texts=True))
        window.wait_tokens(6)
        consumer.on_frame(make_frame([("r2", 4, 0, 6)], SITES, seq=2, texts=True))
        expect(page.locator(".request")).to_have_count(2)
        expect(page.locator("#shown-id")).to_have_text("r1")  # it runs, so it stays
        page.locator("body").press("Tab")
        expect(page.locator("#follow")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.locator(".request:focus")).to_contain_text("r1")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        expect(page.locator("#shown-id")).to_have_text("r2")
        expect(page.locator("#follow")).not_to_be_checked()
        eventually(lambda: window.tokens().all_text_contents() == [f" {token_of('r2', p)}" for p in range(6)])
        for name in ("measure", "site", "scale"):
            page.keyboard.press("Tab")
            expect(page.locator(f"#{name}")).to_be_focused()
        page.keyboard.press("Tab")
        expect(window.tokens().nth(0)).to_be_focused()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(window.tokens().nth(2)).to_be_focused()
        expect(page.locator("#tip")).to_contain_text("position 2, prompt")
        assert window.tokens().nth(2).get_attribute("aria-describedby") == "tip"
        page.keyboard.press("End")
        expect(page.locator("#tip")).to_contain_text("position 5, generated")
        page.keyboard.press("Escape")
        expect(page.locator("#tip")).to_be_hidden()


def test_probes_colour_the_tokens_and_mark_where_they_fire(opened, tmp_path):
    path = tmp_path / "probes.safetensors"
    Probe.make(Site(1, "post_block"), np.eye(8)[3:4], names=("truth",), threshold=12.5).save(path)
    norms = np.array([[10.0, 11, 12, 13, 14, 15]] * 4)
    with open_dashboard(probes=(str(path),)) as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(with_rows(make_frame([("r1", 4, 0, 6)], SITES), rows_with_norms(norms)))
        window.wait_tokens(6)
        page.select_option("#measure", "probe:truth")
        eventually(lambda: page.locator(".token.fires").count() == 3)
        expect(page.locator("#site")).to_be_disabled()
        colours = window.colours()
        assert np.all(np.diff(colours) > 0)
        assert colours[2] < 0.5 < colours[3]
        window.tokens().nth(3).hover()
        expect(page.locator("#tip")).to_contain_text("truth at post_block:1 13")
        expect(page.locator("#tip")).to_contain_text("fires yes, from 12.5 on")
        page.select_option("#measure", "norm")
        eventually(lambda: page.locator(".token.fires").count() == 0)


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
        shown = window.tokens().all_text_contents()
        assert shown == [*evil[:4], "⏎\n", f"#{token_of(request, 5)}"]
        expect(page.locator("#shown-id")).to_have_text(request)
        expect(page.locator(".request .name")).to_have_text(request)
        expect(page.locator("#engine")).to_contain_text("engine <i>engine</i>")
        window.tokens().nth(0).hover()
        expect(page.locator("#tip")).to_contain_text(evil[0])
        assert page.locator(".tokens img, .tokens script, .tokens b, #engine i, #tip img, .requests b").count() == 0


def test_nan_infinity_and_missing_rows_are_said_to_be(opened):
    norms = np.array([[np.nan, np.inf, 12, 13]] * 4)
    with open_dashboard() as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(with_rows(make_frame([("r1", 6, 0, 4)], SITES), rows_with_norms(norms)))
        consumer.on_frame(make_frame([("r1", 6, 5, 1)], SITES, seq=3))
        window.wait_tokens(6)
        for place, text in ((0, "NaN"), (1, "infinite"), (4, "no row")):
            window.tokens().nth(place).hover()
            expect(window.page.locator("#tip")).to_contain_text(f"norm at post_block:3 {text}")
        assert window.page.locator(".token.odd").count() == 2
        assert window.page.locator(".token.missing").all_text_contents() == ["·"]
        expect(window.page.locator("#tip")).to_contain_text("token id unknown")


def test_rates_move(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        rate = window.page.locator("#rate-tokens")
        seq = 0

        def moves():
            nonlocal seq
            seq += 1
            consumer.on_frame(make_frame([("r1", 4, seq, 1)], SITES, seq=seq, step_tokens=3))
            return rate.inner_text() != "0"

        eventually(moves)
        values = window.page.evaluate("document.getElementById('chart-tokens').data[0].y")
        assert max(values) > 0
        assert max(values) % 3 == 0
        for name in ("rows", "bytes"):
            assert max(window.page.evaluate(f"document.getElementById('chart-{name}').data[0].y")) > 0


def test_the_newest_live_request_is_followed_and_a_chosen_one_kept(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))
        expect(page.locator("#shown-id")).to_have_text("r1")
        consumer.on_frame(make_frame([("r2", 4, 0, 4)], SITES, seq=2))
        consumer.on_request_done(done("r1"))
        expect(page.locator("#shown-id")).to_have_text("r2")
        page.locator(".request", has_text="r1").click()
        consumer.on_request_done(done("r2"))
        consumer.on_frame(make_frame([("r3", 4, 0, 4)], SITES, seq=3))
        expect(page.locator(".request").first).to_contain_text("r3")
        expect(page.locator("#shown-id")).to_have_text("r1")
        page.locator("#follow").check()
        expect(page.locator("#shown-id")).to_have_text("r3")
        assert page.locator('.request[aria-selected="true"]').count() == 1


def test_a_server_that_goes_away_is_seen_and_found_again(chromium):
    token = "t" * 24
    with open_dashboard(token=token) as consumer:
        context = chromium.new_context()
        window = Opened(context.new_page(), consumer)
        page, port = window.page, consumer._server.port
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))
        window.wait_tokens(4)
    expect(page.locator("#link")).to_have_text("stopped", timeout=LIMIT_MS)
    expect(page.locator("#notice")).to_contain_text("This is its last state")
    assert window.tokens().count() == 4
    with open_dashboard(token=token, port=port) as consumer:
        expect(page.locator("#link")).to_have_text("connected", timeout=LIMIT_MS)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r2", 4, 0, 2)], SITES))
        window.wait_tokens(2)
        expect(page.locator("#notice")).to_be_hidden()
    with open_dashboard(port=port):
        expect(page.locator("#link")).to_have_text("disconnected", timeout=LIMIT_MS)
        expect(page.locator("#notice")).to_contain_text("Open the address that it prints")
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_colour_can_be_read(opened, scheme):
    norms = np.array([np.linspace(10, 20, 40)] * 4)
    with open_dashboard() as consumer:
        window = opened(consumer, color_scheme=scheme)
        consumer.on_session("engine-1", make_model())
        frame = make_frame([("r1", 40, 0, 40)], SITES, texts=True)
        consumer.on_frame(with_rows(frame, rows_with_norms(norms)))
        window.wait_tokens(40)
        for scale in ("raw", "z"):
            window.page.select_option("#scale", scale)
            eventually(lambda: len(set(window.colours())) > 20)
            contrasts = window.page.evaluate(
                """() => [...document.querySelectorAll(".token")].map((element) => {
                  const light = (colour) => colour.match(/\\d+/g).map(Number).map((v) =>
                    v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4
                  ).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0.05);
                  const both = [light(element.style.backgroundColor), light(element.style.color)];
                  return Math.max(...both) / Math.min(...both);
                })"""
            )
            assert min(contrasts) >= 4.5


def test_a_long_request_keeps_its_latest_tokens(opened):
    with open_dashboard(tokens_max=64) as consumer:
        window = opened(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 60, 0, 60)], SITES))
        window.wait_tokens(60)
        consumer.on_frame(make_frame([("r1", 60, 60, 20)], SITES, seq=2))
        expect(window.page.locator("#tokens-before")).to_have_text("Positions 0 to 15 are not kept.")
        window.wait_tokens(64)
        assert window.tokens().first.get_attribute("data-position") == "16"
        window.wait_heat(64)


LONG_IDS = ["cmpl-4f6a1c0e9b7d4e52a8c3d1f09e6b7a25-0", "a" * 300, "long " * 60]


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1920, 1080), (800, 600), (390, 844)])
def test_the_page_fits_its_window_whatever_the_names_are(opened, width, height):
    with open_dashboard() as consumer:
        window = opened(consumer)
        window.page.set_viewport_size({"width": width, "height": height})
        consumer.on_session("engine-1", make_model())
        consumer.on_session("e" * 300, make_model())
        for name in ["r1", *LONG_IDS]:
            consumer.on_frame(make_frame([(name, 300, 0, 300)], SITES, texts=True))
            window.page.locator(".request", has_text=name[:30]).click()
            expect(window.page.locator("#shown-id")).to_have_attribute("title", name, timeout=LIMIT_MS)
            window.wait_heat(300)
            assert window.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert width < 900 or window.page.evaluate("document.documentElement.scrollHeight <= innerHeight")
            outside = """() => [...document.querySelectorAll("main *, aside *, header *")].filter((part) => {
                const { width, right } = part.getBoundingClientRect();
                return width && right > innerWidth + 1 && !part.closest(".request-list, .tokens, .heat, .engine");
            }).map((part) => part.id || part.className)"""
            assert window.page.evaluate(outside) == []
            eventually(
                lambda: window.page.evaluate(
                    """() => Math.abs(document.querySelector("#heat .main-svg").getBoundingClientRect().height
                       - document.getElementById("heat").clientHeight) < 2"""
                )
            )
