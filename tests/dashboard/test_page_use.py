"""The dashboard's page in a real browser: keys, the list, addresses, states, window sizes and accessibility."""

from __future__ import annotations

import os
import re
import signal
import time
from urllib.parse import quote

import msgspec
import numpy as np
import pytest
from playwright.sync_api import expect

from capflow.capture.frame import Frame
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from tests.kit.dashboards import open_dashboard
from tests.kit.frames import make_frame, make_model
from tests.kit.pages import AXE, LIMIT_MS, SITES, done, frame_of, with_texts
from tests.kit.waiting import eventually

pytestmark = pytest.mark.browser

NORMS = np.random.default_rng(1).uniform(10, 20, (4, 120)).astype(np.float32)


def show(consumer, *requests, norms=NORMS, **more):
    """Let an engine compute requests, one after another."""
    consumer.on_session("engine-1", make_model())
    for number, request in enumerate(requests):
        consumer.on_frame(frame_of(request, norms, prompt=40, seq=number + 1, **more))


def test_the_arrow_keys_move_by_tokens_and_by_lines_of_text(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        show(consumer, "r1")
        window.wait_tokens(120)
        facts = page.locator("#token-facts")
        page.locator("#text").focus()
        for key, position in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 119), ("Home", 0)):
            page.keyboard.press(key)
            expect(facts).to_contain_text(re.compile(f"position{position}, "))
        page.keyboard.press("ArrowRight")
        place = (
            "(column) => { const { left, top, height } = column.getBoundingClientRect(); return [left, top, height]; }"
        )
        left, top, height = page.locator("#text .at").evaluate(place)
        page.keyboard.press("ArrowDown")
        eventually(lambda: page.locator("#text .at").evaluate(place)[1] > top)
        below = page.locator("#text .at").evaluate(place)
        assert abs(below[0] - left) < 60
        assert below[1] - top < 2.5 * height
        page.keyboard.press("ArrowUp")
        expect(facts).to_contain_text(re.compile("position1, "))
        active = page.locator("#text").get_attribute("aria-activedescendant")
        assert page.locator(f"#{active}").text_content() == page.locator("#text .at").text_content()
        page.keyboard.press("Escape")
        expect(facts).to_have_count(0)


def test_text_that_moves_below_a_pointer_at_rest_leaves_the_facts_of_the_token_that_it_clicked(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        show(consumer, "r1")
        window.wait_tokens(120)
        window.click_token(55)
        facts = page.locator("#token-facts")
        expect(facts).to_contain_text("position55, ")
        pointed = """() => new Promise((done) => {
          const box = document.getElementById("text");
          const seen = (event) => event.target.matches(".t:not(.at)") && done(event.target.textContent);
          box.addEventListener("pointerover", seen);
          box.style.paddingTop = "1.6em";
        })"""
        assert page.evaluate(pointed)
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        expect(facts).to_contain_text("position55, ")
        window.tokens().nth(60).hover()
        expect(facts).to_contain_text("position60, ")


def test_keys_reach_everything_from_anywhere(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        show(consumer, "r1", "r2", "r3")
        shown = page.locator("#request-id")
        window.choose("r3")
        for key, request in (("j", "r2"), ("j", "r1"), ("j", "r1"), ("k", "r2")):
            page.keyboard.press(key)
            expect(shown).to_have_text(request)
        expect(page.locator("#announce")).to_contain_text("Request r2, live")
        window.wait_tokens(120)
        page.keyboard.press("ArrowRight")
        expect(page.locator("#token-facts")).to_contain_text("0, prompt")
        page.keyboard.press("[")
        expect(page.locator("#token-layers [aria-current]")).to_contain_text("post_block:2")
        expect(page.locator("#by")).to_have_value("post_block:2")
        page.keyboard.press("]")
        expect(page.locator("#token-layers [aria-current]")).to_contain_text("post_block:3")
        page.keyboard.press("p")
        expect(page.locator(".request-head .pin")).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("+")
        expect(page).to_have_url(re.compile("from="))
        page.keyboard.press("0")
        page.keyboard.press("f")
        expect(page.locator("#follow")).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("/")
        expect(page.locator("#filter")).to_be_focused()
        page.keyboard.type("j?")
        expect(page.locator("#filter")).to_have_value("j?")
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        expect(page.locator("#help")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#help")).to_be_hidden()


# Each subscription waits long enough for `k`, and the page has left the request when its tokens come.
LEAVE_AND_RETURN = """() => {
  const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const [later, send] = [setTimeout, WebSocket.prototype.send];
  let left = false;
  setTimeout = (work, ms, ...more) => later(work, ms === 60 && left ? 2000 : ms, ...more);
  WebSocket.prototype.send = function (message) {
    send.call(this, message);
    if (left || !JSON.parse(message).subscribe?.request) return;
    left = true;
    later(() => press("j"));
    this.addEventListener("message", async () => {
      for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
      press("k");
      window.returned = true;
    }, { once: true });
  };
}"""


def test_a_request_that_is_left_and_shown_again_while_its_tokens_come_has_them(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        show(consumer, "r1", "r2", "r3")
        window.choose("r3")
        window.wait_tokens(120)
        window.page.evaluate(LEAVE_AND_RETURN)
        window.page.keyboard.press("j")
        eventually(lambda: window.page.evaluate("window.returned"))
        expect(window.page.locator("#request-id")).to_have_text("r2")
        window.wait_tokens(120)


def test_the_heatmap_has_keys_and_says_what_a_cell_holds(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        show(consumer, "r1")
        window.wait_tokens(120)
        heat = page.locator("#heat")
        heat.focus()
        for key, position, layer in (("ArrowRight", 1, 3), ("ArrowDown", 1, 2), ("End", 119, 2), ("ArrowUp", 119, 3)):
            page.keyboard.press(key)
            value = f"{NORMS[layer, position]:.4g}"
            expect(heat).to_have_attribute(
                "aria-valuetext", re.compile(f"^position {position}, post_block:{layer}: {value}")
            )
            expect(heat).to_have_attribute("aria-valuenow", str(position))


def test_thousands_of_requests_have_only_the_rows_in_view(opened):
    with open_dashboard() as consumer:
        window = opened(consumer, "#/requests")
        page = window.page
        consumer.on_session("engine-1", make_model())
        for first in range(0, 3000, 100):
            requests = [(f"r{number}", 2, 0, 2) for number in range(first, first + 100)]
            consumer.on_frame(make_frame(requests, SITES[:1], seq=first + 1))
        expect(page.locator("#list-count")).to_have_text("3,000", timeout=LIMIT_MS)
        assert page.locator("#requests .row:not(.head)").count() < 100
        expect(page.locator("#requests .row:not(.head)").first).to_contain_text("r2999")
        page.locator("#requests").focus()
        page.keyboard.press("End")
        expect(page.locator("#request-id, #requests .row[aria-rowindex='3001']").last).to_contain_text("r0")
        page.fill("#filter", "id:r17")
        expect(page.locator("#list-count")).to_have_text("111 of 3,000")
        page.fill("#filter", "id:r17 tokens:many")
        expect(page.locator("#filter-error")).to_contain_text("expected yes, no or a comparison")


def test_the_list_shows_scores_and_filters_by_them(opened, tmp_path):
    path = tmp_path / "probes.safetensors"
    Probe.make(Site(1, "post_block"), np.eye(8)[3:4], names=("truth",), threshold=12.5).save(path)
    with open_dashboard(probes=(str(path),)) as consumer:
        window = opened(consumer, "#/requests")
        page = window.page
        show(consumer, "low", norms=np.full((4, 30), 10.0))
        show(consumer, "high", norms=np.full((4, 30), 17.5))
        row = page.locator("#requests .row", has_text="high")
        expect(row.locator(".fired")).to_have_text("17.5")
        expect(row).to_contain_text("30")
        expect(row.locator("path")).to_have_attribute("d", re.compile("^M0.0 "))
        page.fill("#filter", "probe:truth>12")
        expect(page.locator("#requests .row:not(.head)")).to_have_count(1)
        page.fill("#filter", "")
        page.locator("#requests .head button", has_text="truth max").click()
        expect(page.locator("#requests .row:not(.head)").first).to_contain_text("high")
        page.locator("#requests .head button", has_text="truth max").click()
        expect(page.locator("#requests .row:not(.head)").first).to_contain_text("low")
        expect(page.locator('[aria-sort="ascending"]')).to_contain_text("truth max")


def test_the_address_brings_back_all_that_is_shown(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        show(consumer, "r1", "r/2 ?#&")
        window.choose("r1")
        window.wait_tokens(120)
        page.select_option("#by", "post_block:1")
        window.choose_scale("log")
        window.tokens().nth(7).click()
        page.keyboard.press("+")
        page.fill("#filter", "r1")
        page.locator(".request-head .pin").click()
        expect(page).to_have_url(re.compile("pin=engine-1"))
        address = page.url
        assert "/r/engine-1/r1?" in address
        page.goto("about:blank")
        page.goto(address)
        window.wait_tokens(120)
        expect(page.locator("#token-facts")).to_contain_text("7, prompt")
        assert page.locator("#by").input_value() == "post_block:1"
        assert page.locator("#scale").input_value() == "log"
        assert page.locator("#filter").input_value() == "r1"
        expect(page.locator(".request-head .pin")).to_have_attribute("aria-pressed", "true")
        expect(page.locator(".zoom button", has_text="All")).to_be_enabled()
        assert page.url == address
        page.fill("#filter", "")
        window.choose("r/2 ?#&")
        page.go_back()
        expect(page.locator("#request-id")).to_have_text("r1")
        page.evaluate("location.hash = '#/r/engine-1/unknown?hold=1'")
        expect(page.locator("#empty h2")).to_have_text("This request is not kept")
        page.locator("#empty button").click()
        expect(page.locator("#request-id")).to_have_text("r/2 ?#&")


def test_a_drag_zooms_the_strip_above_moves_that_and_a_double_click_shows_all(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        show(consumer, "r1")
        window.wait_tokens(120)
        box, strip = page.locator("#heat").bounding_box(), page.locator(".over-canvas").bounding_box()
        x = lambda column: box["x"] + 60 + (column + 0.5) * (box["width"] - 74) / 120  # noqa: E731

        def drag(first, last, y):
            page.mouse.move(x(first), y)
            page.mouse.down()
            page.mouse.move(x(last), y, steps=4)
            page.mouse.up()

        drag(30, 59, box["y"] + 40)
        expect(page).to_have_url(re.compile("from=30&to=60"))
        middle = strip["y"] + strip["height"] / 2
        drag(40, 60, middle)
        expect(page).to_have_url(re.compile("from=50&to=80"))
        edge = page.locator(".brush .right").bounding_box()
        page.mouse.move(edge["x"] + edge["width"] / 2, middle)
        page.mouse.down()
        page.mouse.move(edge["x"] + edge["width"] / 2 + x(20) - x(0), middle, steps=4)
        page.mouse.up()
        expect(page).to_have_url(re.compile("from=50&to=100"))
        page.keyboard.press(",")
        expect(page).to_have_url(re.compile("from=37&to=87"))
        page.keyboard.press(".")
        expect(page).to_have_url(re.compile("from=50&to=100"))
        # Elsewhere in the strip: the part goes there.
        page.mouse.click(x(20), middle)
        expect(page).to_have_url(re.compile("from=0&to=50"))
        drag(0, 10, box["y"] + 40)
        page.mouse.dblclick(x(60), box["y"] + 40)
        expect(page).not_to_have_url(re.compile("from="))


def test_a_page_notices_by_itself_that_the_dashboard_hangs(opened):
    with open_dashboard(near=False) as consumer:
        window = opened(consumer)
        page = window.page
        pid = consumer._process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            expect(page.locator("#link")).to_have_text("silent", timeout=LIMIT_MS)
            expect(page.locator("#notice")).to_contain_text("What is shown is old")
            expect(page.locator("#announce")).to_contain_text("has sent nothing")
        finally:
            os.kill(pid, signal.SIGCONT)
        expect(page.locator("#link")).to_have_text(re.compile("live|stale"), timeout=LIMIT_MS)


def test_a_hub_that_says_nothing_makes_the_page_stale(opened):
    with open_dashboard() as consumer:
        page = opened(consumer).page
        expect(page.locator("#link")).to_have_text("stale", timeout=LIMIT_MS)
        expect(page.locator("#notice")).to_contain_text("The hub has said nothing for")
        expect(page.locator("#announce")).to_contain_text("The hub has said nothing for")


def test_rows_that_come_late_say_how_old_they_are(opened):
    with open_dashboard() as consumer:
        page = opened(consumer).page
        consumer.on_session("engine-1", make_model())
        frame = frame_of("r1", NORMS, prompt=40)

        def come(age_s):
            header = msgspec.structs.replace(frame.header, time_ns=time.time_ns() - int(age_s * 1e9))
            consumer.on_frame(Frame.seal(header, frame.payload))

        come(0.02)
        expect(page.locator("#lag")).to_have_text(re.compile("ms$"))
        expect(page.locator(".lag.bad")).to_have_count(0)
        come(12)
        expect(page.locator("#lag")).to_have_text("12 s")
        expect(page.locator(".lag.bad")).to_be_visible()
        consumer.on_idle()
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#notice")).to_be_hidden()
        expect(page.locator("#announce")).to_have_text("The page is live")
        live = page.locator(
            "[aria-live]:not([aria-live=off]), [role=status], [role=alert], output:not([aria-live=off])"
        )
        expect(live).to_have_count(1)


def test_a_server_that_goes_away_is_seen_and_found_again(opened):
    token = "t" * 24
    with open_dashboard(token=token) as consumer:
        window = opened(consumer)
        page, port = window.page, consumer.server.port
        show(consumer, "r1")
        window.wait_tokens(120)
    expect(page.locator("#link")).to_have_text("ended", timeout=LIMIT_MS)
    expect(page.locator("#notice")).to_contain_text("This is its last state")
    assert window.tokens().count() == 120
    with open_dashboard(token=token, port=port) as consumer:
        expect(page.locator("#link")).to_have_text(re.compile("live|stale"), timeout=LIMIT_MS)
        show(consumer, "r2", norms=NORMS[:, :30])
        window.wait_tokens(30)
    with open_dashboard(port=port):
        expect(page.locator("#link")).to_have_text("refused", timeout=LIMIT_MS)
        expect(page.locator("#notice")).to_contain_text("Open the link that capflow prints")
    window.complaints = [
        one for one in window.complaints if "Failed to load resource" not in one and "WebSocket" not in one
    ]


def test_a_view_is_shown_again_after_a_restart_though_no_engine_has_come(opened):
    token = "t" * 24
    with open_dashboard(token=token) as consumer:
        consumer.context.status = status_of("duckdb", "engine-1")
        window, port = opened(consumer, "#/health"), consumer.server.port
        eventually(lambda: consumer._process.health_wanted)
    window.excused = "net::ERR_CONNECTION_REFUSED"
    expect(window.page.locator("#link")).to_have_text("ended", timeout=LIMIT_MS)
    with open_dashboard(token=token, port=port) as consumer:
        eventually(lambda: consumer._process.health_wanted)


def test_a_browser_without_a_session_is_told_how_to_get_one(chromium):
    with open_dashboard() as consumer:
        context = chromium.new_context()
        page = context.new_page()
        page.goto(consumer.address)
        expect(page.locator("#link")).to_have_text("refused", timeout=LIMIT_MS)
        expect(page.locator("#empty")).to_contain_text("Open the link that capflow prints")
        page.goto(f"{consumer.address}#token={'x' * 24}")
        expect(page.locator("#empty")).to_contain_text("The link is old")
        page.goto(consumer.link)
        expect(page.locator("#link")).to_have_text(re.compile("live|stale"))
        context.close()


def status_of(name, engine):
    """Return the status of a hub with one consumer and one worker."""
    lane = {
        "policy": "skip", "queued_bytes": 95, "queue_bytes_max": 100, "lag_s": 3.5, "busy_s": 0, "rows": 7,
        "dropped_rows": {"skipped": 9}, "errors": 1, "trouble": "it is behind", "retrying": None,
    }  # fmt: skip
    worker = {
        "role": "worker", "engine": engine, "rank": [0, 0, 0], "credit_bytes": 75, "held_bytes": 25, "rows": 5,
        "bytes": 50, "last_frame_age_s": 0.5, "worker": {"dropped_rows": {"x": 2}},
    }  # fmt: skip
    return {
        "version": "9", "problems": ["<b>trouble</b>"], "consumers": {name: lane}, "sessions": [worker],
        "dropped_rows": {"consumer_queue_full": 5}, "memory": {"parts": {"frames": {"bytes": 5, "bytes_max": 10}}},
    }  # fmt: skip


def test_health_shows_consumers_workers_and_this_page(opened):
    with open_dashboard() as consumer:
        consumer.context.status = status_of("duckdb", "engine-1")
        window = opened(consumer)
        page = window.page
        page.locator(".tab", has_text="Health").click()
        eventually(lambda: consumer._process.health_wanted)

        def shown():
            consumer.on_idle()
            return page.locator("#health-consumers").count()

        eventually(shown)
        expect(page.locator("#health-consumers tbody tr")).to_have_text(
            re.compile(r"duckdb\s*skip\s*95 % of 100 B\s*3.5 s.*9 skipped\s*1\s*it is behind", re.DOTALL)
        )
        expect(page.locator("#health-workers tbody tr")).to_have_text(
            re.compile(r"engine-1\s*0/0/0\s*25 % of 100 B", re.DOTALL)
        )
        expect(page.locator("#problems li")).to_have_text("<b>trouble</b>")
        expect(page.locator("#health-page")).to_contain_text("frame time, p95")
        page.keyboard.press("/")
        expect(page.locator("#filter")).to_be_focused()


def test_tokens_that_came_while_something_else_was_shown_are_there(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        show(consumer, "r1", norms=NORMS[:, :40])
        window.wait_tokens(40)
        window.tokens().nth(3).click()
        steps = window.wait_coloured()
        page.locator(".tab", has_text="Health").click()
        expect(page.locator("#health")).to_be_visible()
        eventually(lambda: consumer._process.health_wanted)
        consumer.on_frame(frame_of("r1", NORMS[:, 40:80], prompt=40, start=40, seq=2))
        consumer.on_frame(frame_of("r2", NORMS[:, :40], prompt=40, seq=3))
        expect(page.locator("#health-page")).to_contain_text("requests here2")
        page.locator(".tab", has_text="Requests").click()
        window.wait_tokens(80)
        assert window.steps()[:40] == steps
        expect(page.locator("#token-facts")).to_contain_text("3, prompt")


LONG_IDS = {
    "hash": "cmpl-4f6a1c0e9b7d4e52a8c3d1f09e6b7a25-0",
    "letters": "a" * 300,
    "words": "long " * 60,
    "right to left": "مرحبا-بالعالم-" * 21,
    "override": "\u202e" + "b" * 299,
    "zero width": "\u200b" * 300,
    "marks": "x\u0301" * 150,
}


@pytest.mark.parametrize(
    ("width", "height"), [(320, 640), (390, 844), (720, 450), (800, 700), (1440, 900), (3840, 2160)]
)
def test_nothing_overflows_whatever_the_names_are(opened, tmp_path, width, height):
    path = tmp_path / "probe.safetensors"
    Probe.make(Site(1, "post_block"), np.eye(8)[3:4], names=("p" * 100,), threshold=12.5).save(path)
    with open_dashboard(probes=(str(path),)) as consumer:
        window = opened(consumer, viewport={"width": width, "height": height})
        page = window.page
        consumer.on_session("e" * 300, make_model())
        for number, name in enumerate(LONG_IDS.values()):
            more = {"engine": "e" * 300, "steered": {name: (50, 60)}}
            consumer.on_frame(frame_of(name, NORMS, prompt=40, seq=number + 1, **more))
            consumer.on_request_done(done(name, "length", engine="e" * 300))
        for name in LONG_IDS.values():
            page.evaluate("id => { location.hash = `#/r/${'e'.repeat(300)}/${encodeURIComponent(id)}?hold=1`; }", name)
            eventually(lambda name=name: page.title().split() == f"{name[:60]} · capflow".split())
            window.wait_tokens(120)
            expect(page.locator("#heat")).to_have_attribute("aria-valuemax", "119")
            window.click_token(55)
            expect(page.locator("#token-facts")).to_contain_text("55, generated")
            assert window.overflows() == []
        two = "/".join(f"{'e' * 300}/{quote(LONG_IDS[name], safe='')}" for name in ("letters", "override"))
        page.evaluate("address => { location.hash = address; }", f"#/compare/{two}")
        expect(page.locator("#compare-verdict")).to_contain_text("Different at once")
        assert window.overflows() == []
        page.evaluate("location.hash = '#/population'")
        expect(page.locator("#population-threshold")).to_have_text("12.5")
        assert window.overflows() == []
        page.evaluate("location.hash = '#/requests'")
        expect(page.locator("body")).to_have_attribute("data-view", "requests")
        assert window.overflows() == []
        consumer.context.status = status_of("d" * 300, "e" * 300)
        page.evaluate("location.hash = '#/health'")
        eventually(lambda: consumer._process.health_wanted)
        eventually(lambda: [consumer.on_idle(), page.locator("#health-memory").count()][1])
        assert window.overflows() == []
        page.keyboard.press("?")
        assert window.overflows() == []


@pytest.mark.parametrize(
    ("scheme", "forced"), [("light", "none"), ("dark", "none"), ("light", "active")], ids=["light", "dark", "forced"]
)
def test_axe_finds_nothing_serious(opened, tmp_path, scheme, forced):
    if not AXE.exists():
        pytest.fail(f"{AXE} is not there: run `make page-tools`")
    path = tmp_path / "probes.safetensors"
    Probe.make(Site(1, "post_block"), np.eye(8)[3:4], names=("truth",), threshold=12.5).save(path)
    norms = NORMS.copy()
    norms[:, 70], norms[:, 71] = np.nan, np.inf
    with open_dashboard(probes=(str(path),)) as consumer:
        window = opened(consumer, color_scheme=scheme, forced_colors=forced)
        page = window.page
        consumer.on_idle()
        assert window.findings() == []
        consumer.on_session("engine-1", make_model())
        frame = frame_of("r1", norms, prompt=40, steered={"r1": (50, 60)})
        consumer.on_frame(with_texts(frame, {"r1": ["word", " ", "  ", "\n", "\t", "\u200b", ""] * 20}))
        window.wait_tokens(120)
        window.click_token(55)
        expect(page.locator("#token-facts")).to_contain_text("55, generated")
        for scale in ("z", "raw"):
            page.select_option("#by", "post_block:2")
            window.choose_scale(scale)
            assert window.findings() == []
        for place in ("#/requests", "#/health"):
            page.evaluate("place => { location.hash = place; }", place)
            expect(page.locator("body")).to_have_attribute("data-view", place[2:])
            assert window.findings() == []
        page.keyboard.press("?")
        assert window.findings() == []


def test_forced_colours_keep_the_colours_of_tokens_and_cells(opened):
    with open_dashboard() as consumer:
        window = opened(consumer, forced_colors="active")
        show(consumer, "r1")
        window.wait_coloured()
        backs = window.page.evaluate(
            "[...document.querySelectorAll('#text .t')].map((token) => getComputedStyle(token).backgroundColor)"
        )
        assert len(set(backs)) > 20


def test_reduced_motion_and_narrow_pages_keep_everything(opened):
    with open_dashboard() as consumer:
        window = opened(consumer, viewport={"width": 390, "height": 844}, reduced_motion="reduce", has_touch=True)
        page = window.page
        show(consumer, "r1", "r2")
        window.wait_tokens(120)
        page.locator(".back").click()
        page.locator("#requests .row", has_text="r1").tap()
        expect(page.locator("#request-id")).to_have_text("r1")
        window.tokens().nth(3).tap()
        expect(page.locator("#token-facts")).to_contain_text("3, prompt")
