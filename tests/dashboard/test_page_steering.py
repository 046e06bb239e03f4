"""Steering from the page in a real browser: who has controls, how an action is made, and what takes it back."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from playwright.sync_api import expect

from capflow.capture.site import Site
from capflow.steering.action import (
    Abort,
    ActionApplied,
    Answered,
    Freeze,
    Gain,
    Rejected,
    Steer,
    Unfreeze,
    Unsteer,
)
from capflow_dashboard import limits
from tests.kit.dashboards import Pageless, open_dashboard
from tests.kit.frames import make_model
from tests.kit.pages import AXE, LIMIT_MS, done, frame_of
from tests.kit.waiting import eventually

pytestmark = pytest.mark.browser

NORMS = np.random.default_rng(1).uniform(10, 20, (4, 60)).astype(np.float32)
PAGE_NAME = re.compile("^[a-z0-9]{8}$")


class Acted:
    """An open page of a dashboard with running requests, and the actions that reach the hub.

    sent: the messages of the page that act, since it was loaded again with `reload`.
    """

    def __init__(self, opened, consumer, *requests, place="", **settings):
        self.consumer, self.actions, self.sent = consumer, [], []
        consumer.context.act = self.actions.append
        self.window = opened(consumer, place, **settings)
        self.page = self.window.page
        self.page.on("websocket", lambda socket: socket.on("framesent", self._on_sent))
        consumer.on_session("engine-1", make_model())
        requests = requests or ("r1",)
        for number, request in enumerate(requests):
            self.start(request, number + 1)
        # The list of a page that follows no request does not grow by itself.
        expect(self.page.locator("#list-count")).to_have_text(str(len(requests)))

    def _on_sent(self, payload):
        message = json.loads(payload)
        if not message.keys() & {"subscribe", "seen", "lens"}:
            self.sent.append(message)

    def start(self, request, seq=1):
        self.consumer.on_frame(frame_of(request, NORMS, prompt=20, seq=seq, incarnation=f"i-{request}"))

    def reload(self):
        self.page.reload()
        expect(self.page.locator("#link")).to_have_text(re.compile("live|stale"))

    def answer(self, outcome, action=None):
        action = action or self.actions[-1]
        self.consumer.on_action(Answered.of(action, outcome, engine="engine-1", asked_by="dashboard"))

    # What a user does.

    def open_panel(self):
        self.page.keyboard.press("s")
        expect(self.page.locator("#steer-title")).to_be_focused()

    def preview(self, percent=25, *, armed=False):
        """Choose how much, arm unless it is armed already, and open the preview."""
        page = self.page
        page.locator("#steer-ratio").fill(str(percent))
        expect(page.locator("#steer-arm")).to_have_attribute("aria-pressed", "true" if armed else "false")
        if not armed:
            page.locator("#steer-arm").click()
        page.locator("#steer-show").click()
        expect(page.locator("#steer-preview")).to_be_focused()

    def hold(self, button, until):
        """Press a button with the mouse until an element is there."""
        # A notice that comes or goes would move the button away, which ends the press.
        self.consumer.on_idle()
        expect(self.page.locator("#notice")).to_be_hidden()
        self.page.locator(button).hover()
        self.page.mouse.down()
        expect(self.page.locator(until)).to_be_visible()
        self.page.mouse.up()

    def apply(self):
        self.hold("#steer-apply", "#steer-applied")

    @property
    def different(self):
        """The actions without those that renew a lease: an action that is sent again is equal to itself."""
        return list(dict.fromkeys(self.actions))

    def wait_actions(self, count):
        eventually(lambda: len(self.different) >= count)
        assert len(self.different) == count
        return self.different[-1]


def test_without_the_right_there_are_no_controls_and_no_messages(opened):
    with open_dashboard() as consumer:
        acted = Acted(opened, consumer)
        page = acted.page
        acted.reload()
        acted.window.wait_tokens(60)
        for key in ("s", "Shift+K", "l"):
            page.keyboard.press(key)
        for part in ("#controls", "#steer"):
            expect(page.locator(part)).to_be_hidden()
            assert page.locator(f"{part} *").count() == 0
        page.keyboard.press("?")
        expect(page.locator("#help")).to_be_visible()
        assert page.locator("#help .kill").count() == 0
        page.keyboard.press("Shift+K")
        page.keyboard.press("Escape")
        expect(page.locator("#help")).to_be_hidden()
        assert acted.sent == []
        assert acted.actions == []


def test_a_stored_source_has_no_controls(chromium, steerable):
    with open_dashboard(**steerable) as consumer:
        consumer.board.source = ("stored", "rows")
        context = chromium.new_context()
        page = context.new_page()
        page.goto(consumer.link)
        expect(page.locator("#link")).to_have_text("stored")
        expect(page.locator("#controls")).to_be_hidden()
        assert page.locator("#controls *").count() == 0
        context.close()


def test_an_action_is_armed_previewed_and_applied(opened, steerable):
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer)
        page = acted.page
        acted.reload()
        acted.window.wait_tokens(60)
        acted.open_panel()
        expect(page.locator("#steer-show")).to_have_count(0)
        page.locator("#steer-ratio").fill("25")
        expect(page.locator("#steer-amount")).to_have_text("25 % of the stream's norm at post_block:2")
        expect(page.locator("#steer-ratio")).to_have_attribute("aria-valuetext", re.compile("^25 % of the stream"))
        acted.preview(25)
        preview = page.locator("#steer-preview")
        for text in ("r1", "calm", "post_block:2", "25 %", "6 s or 1,024 positions", "Answers to users will change"):
            expect(preview).to_contain_text(text)
        assert acted.actions == []
        acted.apply()
        steer = acted.wait_actions(1)
        assert isinstance(steer, Steer)
        assert (steer.request, steer.incarnation, steer.engine) == ("r1", "i-r1", "engine-1")
        (vector,) = steer.vectors
        assert (vector.site, vector.scale, vector.relative) == (Site(2, "post_block"), 0.25, True)
        assert (steer.lease_s, steer.clamps) == (limits.LEASE_S, ())
        name = acted.sent[0]["alive"]
        assert PAGE_NAME.match(name)
        act = acted.sent[1]["act"]
        assert act == {
            "id": act["id"], "kind": "steer", "request": 1, "name": "calm", "mode": "add", "ratio": 0.25
        }  # fmt: skip
        assert steer.label == f"calm +0.25 by page {name} #{act['id']}"
        log = page.locator("#steer-log li").first
        expect(log).to_contain_text("calm +25 % on r1 pending")
        acted.answer(ActionApplied("", 7, 1234))
        expect(log).to_contain_text("applied in step 7 from position 1,234")
        expect(page.locator("#said")).to_contain_text("applied in step 7")
        expect(page.locator("#kill-state")).to_have_text("1 held, 1 by this page")
        expect(page.locator(".request-head .held")).to_have_text("steering: calm +25 %, by this page")
        expect(page.locator("#requests .row .held")).to_have_text("held")
        expect(page.locator("#steer-ratio")).to_be_focused()


def test_a_quick_click_applies_nothing_and_a_second_slow_one_does(opened, steerable):
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer)
        page = acted.page
        acted.window.wait_tokens(60)
        acted.open_panel()
        acted.preview()
        page.locator("#steer-apply").dblclick()
        expect(page.locator("#steer-apply")).to_have_text("Press again to apply")
        expect(page.locator("#said")).to_have_text("Press again")
        # The label is back once the second press would count as a first one.
        expect(page.locator("#steer-apply")).to_have_text("Hold to apply", timeout=LIMIT_MS)
        assert acted.actions == []
        page.clock.install()
        page.locator("#steer-apply").click()
        expect(page.locator("#steer-apply")).to_have_text("Press again to apply")
        page.clock.run_for(1000)
        page.locator("#steer-apply").click()
        acted.wait_actions(1)


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_the_keyboard_arms_previews_and_applies_by_holding(opened, steerable, key):
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer)
        page = acted.page
        acted.window.wait_tokens(60)
        page.locator("#text").focus()
        acted.open_panel()
        page.locator("#steer-ratio").focus()
        for _ in range(5):
            page.keyboard.press("ArrowRight")
        expect(page.locator("#steer-amount")).to_contain_text("5 % of")
        page.keyboard.press("Tab")
        expect(page.locator("#steer-arm")).to_be_focused()
        page.keyboard.press(key)
        expect(page.locator("#steer-show")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.locator("#steer-show")).to_be_focused()
        page.keyboard.press(key)
        expect(page.locator("#steer-preview")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.locator("#steer-apply")).to_be_focused()
        page.keyboard.press(key)
        expect(page.locator("#steer-apply")).to_have_text("Press again to apply")
        expect(page.locator("#steer-apply")).to_have_text("Hold to apply", timeout=LIMIT_MS)
        assert acted.actions == []
        page.keyboard.down(key)
        expect(page.locator("#steer-applied")).to_be_visible()
        page.keyboard.up(key)
        assert acted.wait_actions(1).vectors[0].scale == 0.05
        expect(page.locator("#steer-ratio")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator("#steer")).to_be_hidden()
        expect(page.locator("#text")).to_be_focused()


def test_the_slider_of_what_is_applied_sends_at_most_four_times_a_second(opened, steerable):
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer)
        page = acted.page
        acted.window.wait_tokens(60)
        acted.open_panel()
        acted.preview(10)
        acted.apply()
        acted.wait_actions(1)
        page.clock.install()
        page.evaluate(
            """() => { const slider = document.getElementById("steer-ratio");
              for (let value = 11; value <= 40; value++) {
                slider.value = value;
                slider.dispatchEvent(new Event("input", { bubbles: true }));
              } }"""
        )
        page.clock.run_for(300)
        eventually(lambda: acted.actions[-1].vectors[0].scale == 0.4)
        assert len(acted.actions) <= 3
        expect(page.locator(".request-head .held")).to_contain_text("calm +40 %")
        expect(page.locator("#steer-log li").first).to_contain_text("calm +40 %")
        # Another vector is not sent before it was previewed.
        sent = len(acted.actions)
        page.select_option("#steer-name", "vector:angry")
        page.locator("#steer-ratio").fill("20")
        expect(page.locator("#steer-amount")).to_have_text("20 % of the stream's norm at post_block:1")
        expect(page.locator("#steer-show")).to_be_visible()
        page.clock.run_for(1000)
        assert {action.vectors[0].site.layer for action in acted.actions[sent:]} <= {2}


def test_a_direction_is_removed_and_a_module_scaled(opened, steerable):
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer)
        page = acted.page
        acted.window.wait_tokens(60)
        acted.open_panel()
        page.get_by_role("button", name="Remove its direction").click()
        expect(page.locator("#steer-ratio")).to_have_attribute("max", "100")
        acted.preview(100)
        expect(page.locator("#steer-preview")).to_contain_text("100 % of the direction removed at post_block:2")
        acted.apply()
        steer = acted.wait_actions(1)
        assert steer.vectors == ()
        assert (steer.clamps[0].strength, steer.clamps[0].site) == (1.0, Site(2, "post_block"))
        page.select_option("#steer-name", "module:glad")
        expect(page.locator("#steer-amount")).to_have_text("100 % of the module's strength")
        acted.preview(50, armed=True)
        acted.apply()
        gain = acted.wait_actions(2)
        assert isinstance(gain, Gain)
        assert (gain.owner, gain.scale) == ("module glad", 0.5)
        page.locator("#steer-back").click()
        acted.wait_actions(4)
        assert [type(action) for action in acted.different[2:]] == [Unsteer, Gain]
        expect(page.locator("#steer-holds")).to_have_text("No page holds anything here.")
        expect(page.locator("#kill-state")).to_have_text("nothing held")


def test_all_requests_need_their_number(opened, steerable):
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer, "r1", "r2", "r3")
        page = acted.page
        acted.window.wait_tokens(60)
        acted.open_panel()
        page.get_by_role("button", name="All requests").click()
        acted.preview()
        expect(page.locator("#steer-preview")).to_contain_text("all 3 that run, and those that come")
        apply = page.locator("#steer-apply")
        expect(apply).to_have_attribute("aria-disabled", "true")
        apply.click(force=True)
        page.fill("#steer-count", "2")
        expect(apply).to_have_attribute("aria-disabled", "true")
        page.fill("#steer-count", "3")
        expect(apply).not_to_have_attribute("aria-disabled", "true")
        # Text fields keep their keys.
        page.locator("#steer-count").press("Shift+K")
        expect(page.locator("#steer-count")).to_have_value("3K")
        page.fill("#steer-count", "3")
        assert acted.actions == []
        acted.apply()
        acted.wait_actions(3)
        assert {action.request for action in acted.different} == {"r1", "r2", "r3"}
        expect(page.locator(".request-head .held")).to_have_text("steering: calm +25 % on all requests, by this page")
        expect(page.locator("#requests .row .held")).to_have_count(3)
        acted.start("r4", 4)
        eventually(lambda: acted.actions[-1].request == "r4")


def test_it_disarms_after_a_minute_and_when_another_request_is_shown(opened, steerable):
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer, "r1", "r2")
        page = acted.page
        acted.window.choose("r1")
        acted.open_panel()
        acted.preview()
        acted.window.choose("r2")
        expect(page.locator("#steer-arm")).to_have_attribute("aria-pressed", "false")
        expect(page.locator("#steer-preview")).to_have_count(0)
        acted.preview()
        # Arming stays with the request: a newer one does not replace it.
        expect(page.locator("#follow")).to_have_attribute("aria-pressed", "false")
        consumer.on_request_done(done("r2", prompt=20))
        expect(page.locator("#steer-arm")).to_have_attribute("aria-pressed", "false")
        expect(page.locator("#steer")).to_contain_text("This request is over.")
        acted.window.choose("r1")
        page.clock.install()
        acted.preview()
        page.clock.run_for(61_000)
        expect(page.locator("#steer-arm")).to_have_attribute("aria-pressed", "false")
        assert acted.actions == []


def test_abort_and_take_back_act_on_the_shown_request(opened, steerable):
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer, "r1", "r2")
        page = acted.page
        acted.window.choose("r1")
        acted.open_panel()
        page.locator("#steer-back").click()
        assert isinstance(acted.wait_actions(1), Unsteer)
        page.locator("#steer-abort").click()
        expect(page.locator("#steer-abort")).to_have_text("Press again to abort")
        expect(page.locator("#steer-abort")).to_have_text("Hold to abort", timeout=LIMIT_MS)
        assert len(acted.actions) == 1
        acted.hold("#steer-abort", "#steer-log :text('Abort r1')")
        abort = acted.wait_actions(2)
        assert isinstance(abort, Abort)
        assert abort.request == "r1"
        acted.answer(Rejected("", "<b>it is over</b>"))
        expect(page.locator("#steer-log li").first).to_contain_text("rejected: <b>it is over</b>")
        assert page.locator("#steer-log b").count() == 0


def test_an_action_without_an_answer_is_given_up(opened, steerable):
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer)
        page = acted.page
        acted.window.wait_tokens(60)
        acted.open_panel()
        page.clock.install()
        acted.hold("#steer-abort", "#steer-log :text('pending')")
        page.clock.run_for(17_000)
        expect(page.locator("#steer-log li").first).to_contain_text("no answer after 15 s")
        acted.answer(ActionApplied("", 9))
        expect(page.locator("#steer-log li").first).to_contain_text("applied in step 9")


@pytest.mark.parametrize("place", ["#/", "#/requests", "#/health"])
def test_the_kill_switch_works_in_every_view_by_mouse_and_by_key(opened, steerable, place):
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer, place=place)
        page = acted.page
        state = page.locator("#kill-state")
        expect(state).to_have_text("nothing held")
        page.locator("#kill").click()
        assert isinstance(acted.wait_actions(1), Freeze)
        expect(state).to_have_text("All steering is off")
        expect(page.locator("#said")).to_contain_text("All steering is off")
        expect(page.locator("#kill")).to_be_focused()
        expect(page.locator("#kill")).to_have_attribute("aria-pressed", "true")
        # Latched: a quick press releases nothing.
        page.locator("#release").click()
        expect(page.locator("#release")).to_have_text("Press again to release")
        expect(page.locator("#release")).to_have_text("Hold to release", timeout=LIMIT_MS)
        assert len(acted.actions) == 1
        page.locator("#release").focus()
        page.keyboard.down("Enter")
        eventually(lambda: len(acted.actions) == 2)
        page.keyboard.up("Enter")
        assert isinstance(acted.actions[-1], Unfreeze)
        expect(state).to_have_text("All steering is off")
        acted.answer(ActionApplied("", 9))
        expect(state).to_have_text("nothing held")
        expect(page.locator("#kill")).to_be_focused()
        for key in ("Shift+K", "Enter", "Space"):
            sent = len(acted.actions)
            page.keyboard.press(key)
            eventually(lambda n=sent: len(acted.actions) > n)
            assert isinstance(acted.actions[-1], Freeze)


def test_the_kill_switch_is_in_dialogs_and_ends_what_is_armed(opened, steerable):
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer)
        page = acted.page
        acted.window.wait_tokens(60)
        acted.open_panel()
        acted.preview()
        acted.apply()
        acted.wait_actions(1)
        expect(page.locator("#kill-state")).to_have_text("1 held, 1 by this page")
        page.locator("#steer-ratio").press("Shift+K")
        expect(page.locator("#kill-state")).to_have_text("All steering is off")
        assert isinstance(acted.wait_actions(2), Freeze)
        expect(page.locator("#steer-arm")).to_have_attribute("aria-pressed", "false")
        expect(page.locator("#steer")).to_contain_text("Release the kill switch to steer again")
        expect(page.locator(".held")).to_have_count(0)
        page.locator("#steer-arm").click(force=True)
        expect(page.locator("#steer-arm")).to_have_attribute("aria-pressed", "false")
        page.locator("#help-open").click()
        expect(page.locator("#help [aria-label=Close]")).to_be_focused()
        page.keyboard.press("Shift+K")
        assert isinstance(acted.wait_actions(3), Freeze)
        page.locator("#dialog-kill").click()
        assert isinstance(acted.wait_actions(4), Freeze)
        expect(page.locator("#dialog-kill-state")).to_have_text("All steering is off")
        page.locator("#dialog-release").focus()
        page.keyboard.down("Space")
        eventually(lambda: isinstance(acted.actions[-1], Unfreeze))
        page.keyboard.up("Space")
        acted.answer(ActionApplied("", 9))
        expect(page.locator("#dialog-kill-state")).to_have_text("nothing held")
        expect(page.locator("#dialog-kill")).to_be_focused()


def test_the_kill_switch_of_others_and_what_they_hold_is_shown(opened, steerable):
    with open_dashboard(**steerable) as consumer, Pageless(consumer) as other:
        acted = Acted(opened, consumer)
        page = acted.page
        acted.window.wait_tokens(60)
        other.send(alive="otherone")
        other.send(act={"id": 1, "kind": "steer", "request": 1, "name": "angry", "ratio": -0.1})
        expect(page.locator("#kill-state")).to_have_text("1 held, 0 by this page")
        expect(page.locator(".request-head .held")).to_have_text("steering: angry \u221210 %, by another page")
        acted.answer(ActionApplied("", 3), Freeze(label="by hand"))
        expect(page.locator("#kill-state")).to_have_text("All steering is off")
        expect(page.locator("#said")).to_have_text("All steering is off")


def test_leases_are_renewed_while_the_page_is_open_and_then_cease(opened, steerable, monkeypatch):
    monkeypatch.setattr(limits, "RENEW_S", 0.5)
    with open_dashboard(**steerable) as consumer, Pageless(consumer) as other:
        acted = Acted(opened, consumer)
        acted.reload()
        acted.window.wait_tokens(60)
        acted.open_panel()
        acted.preview()
        acted.apply()
        eventually(lambda: len(acted.actions) >= 8)
        assert set(acted.actions) == {acted.actions[0]}
        name = acted.sent[0]["alive"]
        assert acted.sent[2:] == [{"alive": name}] * len(acted.sent[2:])
        # It goes on over a reload, as the same page, with higher numbers.
        number = acted.sent[1]["act"]["id"]
        acted.reload()
        expect(acted.page.locator("#kill-state")).to_have_text("1 held, 1 by this page")
        before = len(acted.actions)
        eventually(lambda: len(acted.actions) >= before + 8)
        acted.page.keyboard.press("Shift+K")
        eventually(lambda: "act" in acted.sent[-1])
        assert acted.sent[-1]["act"]["id"] > number
        expect(acted.page.locator("#kill-state")).to_have_text("All steering is off")
        acted.answer(ActionApplied("", 9), Unfreeze())
        expect(acted.page.locator("#kill-state")).to_have_text("nothing held")
        acted.open_panel()
        acted.preview()
        acted.apply()
        other.until(lambda p: p.steering and p.steering["holds"])
        acted.page.close()
        other.until(lambda p: not p.steering["holds"])


@pytest.mark.parametrize(
    ("scheme", "forced"),
    [
        ("light", "none"),
        ("dark", "none"),
        pytest.param("light", "active", marks=pytest.mark.long),
        pytest.param("dark", "active", marks=pytest.mark.long),
    ],
)
def test_axe_finds_nothing_serious(opened, steerable, scheme, forced):
    if not AXE.exists():
        pytest.fail(f"{AXE} is not there: run `make page-tools`")
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer, "r1", "r2", color_scheme=scheme, forced_colors=forced)
        page, window = acted.page, acted.window
        acted.window.wait_tokens(60)
        assert window.findings() == []
        acted.open_panel()
        assert window.findings() == []
        acted.preview()
        assert window.findings() == []
        acted.apply()
        acted.wait_actions(1)
        expect(page.locator(".request-head .held")).to_have_count(1)
        assert window.findings() == []
        page.get_by_role("button", name="All requests").click()
        acted.preview(-10)
        assert window.findings() == []
        page.locator("#steer-cancel").press("Shift+K")
        expect(page.locator("#kill-state")).to_have_text("All steering is off")
        assert window.findings() == []
        page.locator("#help-open").click()
        assert window.findings() == []


@pytest.mark.parametrize("width", [320, 390, 720, 1440])
def test_every_state_fits_and_the_kill_switch_is_always_in_sight(opened, steerable, width):
    name = "cmpl-0123456789abcdef0123456789abcdef"
    with open_dashboard(**steerable) as consumer:
        acted = Acted(opened, consumer, name, viewport={"width": width, "height": 800}, has_touch=width < 720)
        page, window = acted.page, acted.window
        acted.window.wait_tokens(60)

        def check():
            assert window.overflows() == []
            for top in (0, 1_000_000):
                # In one step: parts that are still being loaded may move it.
                left, above, right, below, on_top = page.evaluate(
                    """(top) => {
                      scrollTo(0, top);
                      const { x, y, right, bottom, width, height } =
                        document.getElementById("kill").getBoundingClientRect();
                      const on_top = document.elementFromPoint(x + width / 2, y + height / 2)?.closest("#kill");
                      return [x, y, right, bottom, Boolean(on_top)];
                    }""",
                    top,
                )
                assert left >= 0
                assert right <= width
                assert above >= 0
                assert below <= 800
                assert on_top

        check()
        acted.open_panel()
        acted.preview()
        check()
        acted.apply()
        acted.wait_actions(1)
        expect(page.locator(".request-head .held")).to_have_count(1)
        check()
        for place in ("#/requests", "#/health", "#/"):
            page.evaluate("place => { location.hash = place; }", place)
            expect(page.locator("body")).to_have_attribute("data-view", place[2:] or "request")
            check()
        page.locator("#kill").click()
        expect(page.locator("#kill-state")).to_have_text("All steering is off")
        check()
        page.locator("#help-open").click()
        expect(page.locator("#dialog-kill")).to_be_visible()
        assert window.overflows() == []
