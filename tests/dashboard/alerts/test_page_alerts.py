"""Alerts on the page: what fires, where, since when, and mutes."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from playwright.sync_api import expect

from capflow.capture.frame import Dropped
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from tests.kit.dashboards import open_dashboard
from tests.kit.frames import make_model
from tests.kit.pages import done, frame_of
from tests.kit.waiting import eventually

pytestmark = pytest.mark.browser

RULES = (
    "leak: share(code > 50) > 20% over 1h, clear < 10%",
    "high: max(code) > 50 over 1h",
    "lost: lost > 0 over 1h",
    "slow: share(code > 50) > 20% over 1h, for 30m",
)
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def alerting(tmp_path):
    """Yield a dashboard with rules of a probe; its score is the norm of a row of `frame_of`."""
    path = tmp_path / "code.safetensors"
    Probe.make(Site(1, "post_block"), np.eye(8)[3:4], names=("code",), threshold=15.0).save(path)
    with open_dashboard(probes=(str(path),), alerts=RULES) as consumer:
        consumer.on_session("engine-1", make_model())
        yield consumer


def show(consumer, request, norm, seq):
    consumer.on_frame(frame_of(request, np.full((4, 8), norm), seq=seq))


def line(page):
    return page.locator("#alarm [role=status]")


def rule(page, name):
    return page.locator(".rule").filter(has=page.get_by_role("heading", name=name, exact=True))


def test_what_fires_is_said_listed_and_leads_to_its_request(alerting, opened):
    window = opened(alerting)
    page = window.page
    expect(page.locator(".tab", has_text="Alerts")).to_be_visible()
    expect(line(page)).to_be_empty()
    assert page.locator("#alarm").bounding_box()["height"] <= 1
    show(alerting, "calm", 1.0, 1)
    show(alerting, EVIL, 60.0, 2)
    show(alerting, "later", 2.0, 3)
    alerting.on_request_done(done("calm", dropped=[Dropped(3, "queue_full")]))
    expect(line(page)).to_have_text("▲ 3 alerts fire: leak on engine-1, high on engine-1, lost on engine-1")
    expect(page).to_have_title(re.compile(r"^\(3\) "))
    expect(page.locator(".tab", has_text="Alerts")).to_have_text("Alerts 3 firing")
    page.get_by_role("button", name="Show").press("Enter")
    expect(page.locator("#alarm-show")).to_have_count(0)
    assert page.url.endswith("#/alerts")
    for name, value in (("leak", "33.33 %"), ("high", "60"), ("lost", "3")):
        expect(rule(page, name).locator(".states .value")).to_have_text(value)
        state = rule(page, name).locator(".states .state")
        expect(state).to_have_text(re.compile(r"▲ firing since \d\d:\d\d:\d\d"))
        hours, minutes, seconds = map(int, state.inner_text().split()[-1].split(":"))
        now = time.localtime()
        ago_s = (now.tm_hour - hours) * 3600 + (now.tm_min - minutes) * 60 + now.tm_sec - seconds
        assert -2 <= ago_s % 86_400 - (86_400 if ago_s % 86_400 > 43_200 else 0) < 60
    expect(rule(page, "slow").locator(".state")).to_contain_text("pending since")
    expect(rule(page, "leak")).to_contain_text("fires > 20 %, over < 10 %")
    # The value follows, and the rule stays until it is clear.
    show(alerting, "more", 1.0, 4)
    show(alerting, "and more", 1.0, 5)
    show(alerting, "more yet", 1.0, 6)
    expect(rule(page, "leak").locator(".value")).to_have_text("16.67 %")
    expect(rule(page, "leak").locator(".state")).to_contain_text("firing")
    for number in range(7, 14):
        show(alerting, f"r{number}", 1.0, number)
    expect(rule(page, "leak").locator(".state")).to_contain_text("inactive")
    expect(page.locator(".changes li").first).to_contain_text("leak is over after")
    expect(page.locator(".changes li")).to_have_count(4)
    # It leads to a request that is over, though others run.
    alerting.on_request_done(done(EVIL))
    link = rule(page, "high").get_by_role("link", name=EVIL)
    link.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#request-head .chip")).to_contain_text("done")
    expect(page.locator("#request-id")).to_have_text(EVIL)
    window.wait_tokens(8)
    page.go_back()
    rule(page, "leak").get_by_role("button", name="Population of code on engine-1").click()
    expect(page.locator("#population-tokens")).to_contain_text("8 of ")


def test_a_page_that_is_opened_later_has_the_history(alerting, opened):
    show(alerting, "hot", 60.0, 1)
    eventually(lambda: alerting.board.alerts.firing == {"leak", "high"})
    page = opened(alerting, "#/alerts").page
    expect(page.locator(".changes li")).to_have_count(2)
    expect(page.locator(".changes li").first).to_contain_text("high fires")
    assert alerting.counted["alert_high"] == 1
    assert [event["event"] for _, event in alerting._process.troubles] == ["alert_firing"] * 2


def test_a_mute_silences_this_browser_and_survives_a_reload(alerting, opened):
    window, other = opened(alerting, "#/alerts"), opened(alerting)
    page = window.page
    show(alerting, "hot", 60.0, 1)
    expect(line(page)).to_contain_text("2 alerts fire")
    page.locator("#mute-high").select_option("1 hour")
    expect(page.locator("#mute-high")).to_have_text(re.compile(r"^Muted until \d\d:\d\d:\d\d · Unmute high$"))
    assert page.evaluate("document.activeElement.id") == "mute-high"
    expect(line(page)).to_have_text("▲ 1 alert fires: leak on engine-1")
    page.get_by_role("combobox", name="Mute leak").select_option("until unmuted")
    expect(line(page)).to_be_empty()
    expect(page).to_have_title("Alerts · capflow")
    expect(rule(page, "leak").locator(".state")).to_contain_text("firing")
    page.reload()
    expect(rule(page, "leak").locator(".state")).to_contain_text("firing")
    expect(page.locator("#mute-leak")).to_have_text("Muted · Unmute leak")
    expect(line(page)).to_be_empty()
    # Not in another browser, the log or the metrics.
    expect(line(other.page)).to_contain_text("2 alerts fire")
    before = alerting.counted["alert_leak_seconds"]
    eventually(lambda: alerting.counted["alert_leak_seconds"] > before)
    page.get_by_role("button", name="Unmute leak").press("Enter")
    expect(line(page)).to_contain_text("1 alert fires: leak")
    # An hour later the other one is heard again.
    page.evaluate("() => { const now = Date.now; Date.now = () => now() + 3_600_000; }")
    expect(line(page)).to_contain_text("2 alerts fire")


def test_a_browser_without_storage_still_mutes(alerting, opened):
    window = opened(alerting)
    page = window.page
    page.evaluate(
        """() => {
          for (const name of ["getItem", "setItem"]) Storage.prototype[name] = () => { throw Error("denied"); };
        }"""
    )
    page.evaluate("location.hash = '#/alerts'")
    show(alerting, "hot", 60.0, 1)
    page.locator("#mute-high").select_option("10 minutes")
    expect(line(page)).to_have_text("▲ 1 alert fires: leak on engine-1")


def test_a_dashboard_without_rules_has_no_alerts(opened):
    with open_dashboard() as consumer:
        page = opened(consumer).page
        expect(page.locator(".tab", has_text="Health")).to_be_visible()
        expect(page.locator(".tab", has_text="Alerts")).to_have_count(0)
        page.evaluate("location.hash = '#/alerts'")
        expect(page.locator("#alerts")).to_contain_text("There are no rules.")
        loaded = page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert not [name for name in loaded if name.endswith("alertbar.js") and "alerts" not in page.url]


@pytest.mark.parametrize(
    "settings",
    [
        {"viewport": {"width": 1280, "height": 800}},
        {"viewport": {"width": 320, "height": 640}},
        {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
        {"viewport": {"width": 390, "height": 800}, "forced_colors": "active"},
    ],
    ids=["wide", "narrow", "dark", "forced"],
)
def test_it_has_no_finding_of_axe_and_fits(alerting, opened, settings):
    window = opened(alerting, "#/alerts", reduced_motion="reduce", **settings)
    show(alerting, "a-request-with-a-name-" + "x" * 200, 60.0, 1)
    expect(line(window.page)).to_contain_text("2 alerts fire")
    window.page.locator("#mute-leak").select_option("1 hour")
    expect(window.page.locator(".changes li")).to_have_count(2)
    assert window.overflows() == []
    assert window.findings() == []
