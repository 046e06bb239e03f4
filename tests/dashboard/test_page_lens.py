"""The lens in the page, in a real browser. The answers are those that `capflow_dashboard.wire` describes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from playwright.sync_api import expect

from capflow_dashboard import wire
from tests.kit.dashboards import open_dashboard
from tests.kit.frames import make_model
from tests.kit.pages import AXE, frame_of
from tests.kit.waiting import eventually

pytestmark = pytest.mark.browser

NORMS = np.random.default_rng(1).uniform(10, 20, (4, 30)).astype(np.float32)
LAYERS = [
    {"layer": 0, "site": "post_block:0", "tokens": [[5, " the", 0.02], [6, " a", 0.01]]},
    {"layer": 1, "site": "post_block:1", "tokens": []},
    {"layer": 2, "site": "post_block:2", "tokens": [[7, " Paris", 0.4], [8, None, 0.3], [9, "<b>x</b>", 0.0001]]},
    {"layer": 3, "site": "post_block:3", "tokens": [[7, " Paris", 0.9], [6, " a", 0.05]]},
]


class LensServer:
    """Stands between the page and its server: keeps the page's questions until the test answers them."""

    def __init__(self, context, consumer, *, offers=True):
        self.asks, self.consumer = [], consumer
        self.page = context.new_page()
        self.complaints = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self._offers, self._route = offers, None
        self.page.route_web_socket("**/live", self._join)

    def _on_console(self, message):
        if message.type in ("error", "warning") and not self.consumer.closed:
            self.complaints.append(message.text)

    def _join(self, route):
        self._route, server = route, route.connect_to_server()
        route.on_message(lambda message: self._ask(message) or server.send(message))
        server.on_message(lambda message: route.send(self._offered(message)))

    def _ask(self, message):
        """Keep a question; return whether the message was one."""
        ask = json.loads(message).get("lens")
        if ask is not None:
            self.asks.append(ask)
        return ask is not None

    def _offered(self, message):
        length = int.from_bytes(message[:4], "little")
        head = json.loads(message[4 : 4 + length])
        if "hello" not in head:
            return message
        head["hello"]["lens"] = self._offers
        return wire.encode(head)

    def answer(self, layers=(), error=""):
        self._route.send(wire.encode({"lens": {**self.asks[-1], "layers": list(layers), "error": error}}))


@pytest.fixture
def lens(chromium):
    """Return a function that opens a dashboard's page behind a `LensServer`, with a running request."""
    contexts, servers = [], []

    def make(consumer, *, offers=True, **settings):
        contexts.append(chromium.new_context(**({"viewport": {"width": 1280, "height": 900}} | settings)))
        server = LensServer(contexts[-1], consumer, offers=offers)
        servers.append(server)
        server.page.goto(consumer.link)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", NORMS, prompt=20))
        expect(server.page.locator("#text .t")).to_have_count(30)
        server.page.locator("#text .t").nth(3).click()
        expect(server.page.locator("#token-facts")).to_contain_text("3, prompt")
        return server

    yield make
    for context in contexts:
        context.close()
    assert [server.complaints for server in servers] == [[]] * len(servers)


def test_without_a_lens_there_is_no_button(lens):
    with open_dashboard() as consumer:
        server = lens(consumer, offers=False)
        server.page.keyboard.press("l")
        expect(server.page.locator("#token-layers")).to_be_visible()
        expect(server.page.locator("#lens-title, #lens-ask, #lens")).to_have_count(0)
        assert server.asks == []


def test_the_dashboard_answers_a_question_of_the_page(chromium):
    """Without anything between them; the files of this model are nowhere."""
    with open_dashboard() as consumer:
        page = chromium.new_context().new_page()
        page.goto(consumer.link)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", NORMS, prompt=20))
        page.locator(".prompt .t").first.click()
        page.keyboard.press("l")
        page.locator("#lens-ask").click()
        expect(page.locator("#lens")).to_contain_text("test-model")
        page.context.close()


def test_the_lens_of_the_kept_token_is_asked_for_and_shown(lens):
    with open_dashboard() as consumer:
        server = lens(consumer)
        page = server.page
        page.locator("#lens-ask").click()
        expect(page.locator("#lens-waits")).to_have_text("Computing…")
        expect(page.locator("#lens")).to_have_attribute("aria-busy", "true")
        eventually(lambda: server.page.evaluate("1") and server.asks)
        assert server.asks == [{"id": 1, "request": 1, "position": 3}]
        server.answer(LAYERS)
        rows = page.locator("#lens-layers tbody tr")
        expect(rows).to_have_count(4)
        sites = ["post_block:3", "post_block:2 changes", "post_block:1", "post_block:0"]
        assert rows.locator("th").all_text_contents() == sites
        expect(rows.nth(0).locator("td").first).to_contain_text("Paris")
        expect(rows.nth(0).locator("td").first).to_contain_text("90 %")
        expect(rows.nth(1)).to_contain_text("#8")
        expect(rows.nth(1)).to_contain_text("<b>x</b>")
        expect(rows.nth(1)).to_contain_text("< 0.1 %")
        expect(rows.nth(2)).to_contain_text("the row holds NaN or infinity")
        assert page.locator("#lens b").count() == 0
        changed = [row.get_attribute("class") for row in rows.all()]
        assert changed == ["", "changed", "", ""]
        bars = rows.locator("td:nth-child(2) .part").evaluate_all("bars => bars.map((bar) => bar.width.baseVal.value)")
        assert bars == pytest.approx([30.6, 13.6, 0.7], abs=0.06)
        # Another token has another lens, which the key asks for.
        page.locator("#text").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#lens-layers")).to_have_count(0)
        page.keyboard.press("l")
        expect(page.locator("#lens-waits")).to_be_visible()
        server.answer(error="lens: got position 4, whose rows are not kept")
        expect(page.locator("#lens-error")).to_have_text("lens: got position 4, whose rows are not kept")
        assert server.asks[-1] == {"id": 2, "request": 1, "position": 4}


@pytest.mark.parametrize(("scheme", "forced"), [("light", "none"), ("dark", "none"), ("dark", "active")])
@pytest.mark.parametrize("width", [320, 1280])
def test_the_lens_fits_and_is_accessible(lens, scheme, forced, width):
    if not AXE.exists():
        pytest.fail(f"{AXE} is not there: run `make page-tools`")
    with open_dashboard() as consumer:
        viewport = {"width": width, "height": 900}
        server = lens(consumer, color_scheme=scheme, forced_colors=forced, viewport=viewport)
        page = server.page
        page.locator("#lens-ask").click()
        expect(page.locator("#lens-waits")).to_be_visible()
        server.answer(LAYERS)
        expect(page.locator("#lens-layers")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.evaluate(AXE.read_text(encoding="utf-8"))
        report = page.evaluate("axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice'] })")
        serious = [one["id"] for one in report["violations"] if one["impact"] in ("serious", "critical")]
        assert serious == []
