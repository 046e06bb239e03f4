"""What the page loads when it is first needed: it waits for nothing that it shows, and a failure can be tried again."""

from __future__ import annotations

import re

import numpy as np
import pytest
from playwright.sync_api import expect

from capflow.steering.action import Freeze
from tests.kit.dashboards import open_dashboard
from tests.kit.frames import make_model
from tests.kit.pages import frame_of
from tests.kit.waiting import eventually

pytestmark = pytest.mark.browser

NORMS = np.random.default_rng(1).uniform(10, 20, (4, 60)).astype(np.float32)
# The places of what is shown at first: nothing that is loaded later may move them.
PLACES = """() => ["#top", "#list", "#request-head", "#text", "#plots", "#heat", "#token"].map((name) => {
  const { x, y, width, height } = document.querySelector(name).getBoundingClientRect();
  return [name, x, y, width, height].join(" ");
})"""


class Loaded:
    """An open page of a dashboard with a running request, and the names of the files that it asks for.

    actions: what reaches the hub.
    held: names of files that wait for an answer, in `waiting`.
    """

    def __init__(self, opened, consumer, place="", **settings):
        self.actions, self.files, self.waiting = [], [], []
        self.cut_off, self.held = set(), set()
        consumer.context.act = self.actions.append
        # From before it is opened: an open page may still ask past a route that is new.
        self.window = opened(consumer, answer=self._answer, **settings)
        self.page = self.window.page
        self.page.on("request", lambda request: self.files.append(request.url.rpartition("/")[2]))
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", NORMS, prompt=20))
        self.window.wait_coloured()
        if place:
            self.page.evaluate("place => { location.hash = place; }", place)

    def _answer(self, route):
        name = route.request.url.rpartition("/")[2]
        if name in self.cut_off:
            route.abort()
        elif name in self.held:
            self.waiting.append(route)
        else:
            route.continue_()

    def cut(self, *names):
        """Let no such file be loaded."""
        self.window.excused = "net::ERR_FAILED"
        self.cut_off.update(names)

    def mend(self, *names):
        """Let these files be loaded again; without names, every file."""
        self.cut_off.difference_update(names or set(self.cut_off))

    def reload(self):
        self.page.reload()
        expect(self.page.locator("#link")).to_have_text(re.compile("live|stale"))


def test_a_page_without_the_right_loads_nothing_of_steering(opened):
    with open_dashboard() as consumer:
        loaded = Loaded(opened, consumer)
        loaded.reload()
        loaded.window.wait_coloured()
        expect(loaded.page.locator("#token")).not_to_be_empty()
        assert "app.js" in loaded.files
        assert {"token.js", "token.css"} <= set(loaded.files)
        steering = {"controls.js", "desk.js", "killswitch.js", "kill.css", "steering.js", "steerpanel.js", "steer.css"}
        assert not steering & set(loaded.files)
        assert not {"health.js", "help.js", "export.js", "compare.js", "population.js", "extra.css"} & set(loaded.files)


def test_the_kill_switch_comes_with_the_page_and_needs_nothing_that_is_loaded_later(opened, steerable):
    with open_dashboard(**steerable) as consumer:
        loaded = Loaded(opened, consumer)
        page = loaded.page
        loaded.cut("steering.js", "steerpanel.js", "steer.css", "help.js", "extra.css", "token.js")
        loaded.reload()
        expect(page.locator("#kill")).to_be_visible()
        assert loaded.files.index("controls.js") < loaded.files.index("app.js")
        assert loaded.files.count("controls.js") == 1
        page.locator("#steer-open").click()
        expect(page.locator("#steer")).to_contain_text("Steering could not be loaded")
        page.locator("#kill").click()
        eventually(lambda: loaded.actions)
        assert isinstance(loaded.actions[-1], Freeze)
        expect(page.locator("#kill-state")).to_contain_text(re.compile("off", re.IGNORECASE))
        loaded.mend()
        page.locator("#steer").get_by_role("button", name="Try again").click()
        expect(page.locator("#steer-title")).to_be_focused()
        expect(page.locator("#steer-ratio")).to_be_visible()


def test_the_key_of_the_kill_switch_works_before_the_kill_switch_is_loaded(opened, steerable):
    with open_dashboard(**steerable) as consumer:
        loaded = Loaded(opened, consumer)
        page = loaded.page
        loaded.cut("controls.js", "desk.js", "kill.css")
        loaded.reload()
        expect(page.locator("#notice")).to_contain_text("The kill switch could not be loaded")
        assert page.locator("#controls *").count() == 0
        page.keyboard.press("Shift+K")
        eventually(lambda: loaded.actions)
        assert isinstance(loaded.actions[0], Freeze)
        loaded.mend()
        # With the next heartbeat it is loaded, and says what it did.
        expect(page.locator("#kill")).to_be_visible()
        expect(page.locator("#kill-state")).to_contain_text(re.compile("off", re.IGNORECASE))
        expect(page.locator("#notice")).not_to_contain_text("could not be loaded")


def test_a_page_whose_dashboard_gets_the_right_later_loads_the_kill_switch_then(opened, steerable):
    with open_dashboard(token="t" * 32) as consumer:
        loaded = Loaded(opened, consumer)
        port = consumer._process.port
        assert "controls.js" not in loaded.files
        loaded.window.excused = "net::ERR_CONNECTION_REFUSED"
    with open_dashboard(token="t" * 32, port=port, **steerable) as consumer:
        expect(loaded.page.locator("#kill")).to_be_visible(timeout=30_000)
        assert "controls.js" in loaded.files


@pytest.mark.parametrize(
    ("view", "module", "title"),
    [("health", "health.js", "Health"), ("population", "population.js", "Population"), ("compare", "compare.js", None)],
)
def test_a_view_that_cannot_be_loaded_says_so_and_can_be_tried_again(opened, view, module, title):
    with open_dashboard() as consumer:
        loaded = Loaded(opened, consumer)
        page = loaded.page
        # A page that is some seconds old, as on a busy machine, would be loaded again if its session were answered.
        loaded.cut(module, "session")
        page.evaluate("view => { location.hash = `#/${view}`; }", view if title else "compare/engine-1/r1/engine-1/r1")
        stead = page.locator("#main > section > .stead")
        expect(stead).to_have_text(re.compile("could not be loaded.*Try again", re.DOTALL))
        expect(page.locator("#list")).to_be_hidden()
        # The rest of the page works.
        page.keyboard.press("?")
        expect(page.locator("#help")).to_be_visible()
        page.keyboard.press("Escape")
        with page.expect_event("requestfailed", lambda request: request.url.endswith(module)):
            stead.get_by_role("button").click()
        loaded.mend(module)
        stead.get_by_role("button").focus()
        page.keyboard.press("Enter")
        expect(page.locator(f"#{view} :is(h2, select)").first).to_be_visible()
        expect(stead).to_be_hidden()


@pytest.mark.parametrize(
    ("key", "module", "name", "sheet"), [("?", "help.js", "Help", "#help"), ("e", "extra.css", "Export", "#export")]
)
def test_a_sheet_that_cannot_be_loaded_is_named_and_opens_at_the_next_try(opened, key, module, name, sheet):
    with open_dashboard() as consumer:
        loaded = Loaded(opened, consumer)
        page = loaded.page
        loaded.cut(module)
        page.keyboard.press(key)
        expect(page.locator("#notice")).to_contain_text(f"{name} could not be loaded")
        loaded.mend()
        page.keyboard.press(key)
        expect(page.locator(sheet)).to_be_visible()
        expect(page.locator("#notice")).not_to_contain_text(name)


def test_what_is_loaded_later_moves_nothing_that_is_shown(opened):
    with open_dashboard() as consumer:
        loaded = Loaded(opened, consumer)
        page = loaded.page
        waiting = loaded.waiting
        loaded.held = {"token.js", "token.css"}
        loaded.reload()
        loaded.window.wait_coloured()
        eventually(lambda: len(waiting) == 2 or page.wait_for_timeout(20))
        before = page.evaluate(PLACES)
        for route in waiting:
            route.continue_()
        expect(page.locator("#token h2")).to_have_text("Token")
        assert page.evaluate(PLACES) == before
        # Views come with their sheet, and the list is away before.
        waiting.clear()
        loaded.held = {"extra.css"}
        page.evaluate("() => { location.hash = '#/health'; }")
        expect(page.locator("#main > section > .stead")).to_have_text("Loading…")
        eventually(lambda: waiting or page.wait_for_timeout(20))
        expect(page.locator("#list")).to_be_hidden()
        expect(page.locator("#health")).to_be_hidden()
        waiting[0].continue_()
        expect(page.locator("#health .tiles").first).to_be_visible()
        assert page.locator("#health .tiles").first.evaluate("tiles => getComputedStyle(tiles).display") == "grid"
