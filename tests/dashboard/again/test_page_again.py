"""A request that is run again from the page, in a real browser."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from playwright.sync_api import expect

from capflow.steering.action import ActionApplied, Answered, Freeze
from tests.kit.completions import DONE, broken, chunk, completions, held, usual
from tests.kit.dashboards import open_dashboard
from tests.kit.frames import make_model
from tests.kit.pages import done, frame_of
from tests.kit.waiting import eventually

pytestmark = pytest.mark.browser

NORMS = np.random.default_rng(1).uniform(10, 20, (4, 60)).astype(np.float32)
WORDS = {"plain": ["It ", "was ", "a ", "day"], "steered": ["It ", "was ", "<b>calm</b> ", "there", "!"]}


def show(opened, consumer, **settings):
    """Open a page on a dashboard with one finished request; return it, and what it sends for runs."""
    consumer.context.act = lambda _: None
    window = opened(consumer, **settings)
    window.sent = []

    def note(payload):
        message = json.loads(payload)
        if "again" in message:
            window.sent.append(message["again"])

    window.page.on("websocket", lambda socket: socket.on("framesent", note))
    consumer.on_session("engine-1", make_model())
    consumer.on_frame(frame_of("r1", NORMS, prompt=20))
    consumer.on_request_done(done("r1", prompt=20))
    window.page.reload()
    expect(window.page.locator("#link")).to_have_text(re.compile("live|stale"))
    window.page.evaluate("location.hash = '#/r/engine-1/r1?hold=1'")
    expect(window.page.locator("#request-id")).to_have_text("r1")
    return window


def answer_in(page, side):
    return page.locator(f"#again [data-side={side}]")


def begun(opened, consumer):
    """Open a page on which both answers of a run have begun."""
    page = show(opened, consumer).page
    page.keyboard.press("r")
    page.locator("#again-run").click()
    for side in WORDS:
        expect(answer_in(page, side)).to_contain_text("one")
    return page


def test_both_answers_stream_side_by_side_and_lead_to_the_compare_view(opened, steerable):
    with completions(usual(WORDS)) as server, open_dashboard(**steerable, server=server.url) as consumer:
        window = show(opened, consumer)
        page = window.page
        page.keyboard.press("r")
        expect(page.locator("#again-title")).to_be_visible()
        expect(page.locator("#again-run")).to_be_visible()
        page.locator("#again-name").select_option("vector:angry")
        page.locator("#again-ratio").fill("-30")
        page.locator("#again-tokens").fill("12")
        page.get_by_role("button", name="Run both").press("Enter")
        expect(page.locator("#again-state")).to_have_text("The first token that differs is number 3 of the answers.")
        for side, words in WORDS.items():
            box = answer_in(page, side)
            expect(box.locator(".again-text")).to_contain_text(words[-1])
            expect(box.locator("mark")).to_have_text(f"first that differs: {words[2]}")
            expect(box).to_contain_text(f"{len(words)} tokens, at its limit of tokens")
        expect(answer_in(page, "steered").locator("h3")).to_have_text("Steered: angry \u221230 %")
        assert page.locator("#again b", has_text="calm").count() == 0
        (sent,) = window.sent
        assert {name: value for name, value in sent.items() if name != "id"} == {
            "request": 1, "kind": "steer", "name": "angry", "mode": "add", "ratio": -0.3, "everywhere": False,
            "tokens": 12, "temperature": 0,
        }  # fmt: skip
        expect(page.locator("#again-absent")).to_be_visible()
        names = [body["capture_id"] for *_, body in server.asked if body]
        for number, name in enumerate(sorted(names)):
            consumer.on_frame(frame_of(name, NORMS, prompt=20, seq=number + 2))
        page.locator("#again-compare").click()
        expect(page.locator("#again")).to_be_hidden()
        expect(page.locator("#compare")).to_be_visible()
        plain, steered = sorted(names)
        expect(page).to_have_url(re.compile(f"#/compare/engine-1/{plain}/engine-1/{steered}"))


def test_a_module_and_the_whole_prompt_can_be_chosen_by_keys(opened, steerable):
    with completions(usual(WORDS)) as server, open_dashboard(**steerable, server=server.url) as consumer:
        window = show(opened, consumer)
        page = window.page
        page.locator("#again-open").press("Enter")
        page.get_by_role("button", name="Prompt and answer").press("Space")
        page.get_by_role("button", name="Remove its direction").press("Enter")
        page.locator("#again-run").press("Enter")
        expect(answer_in(page, "steered")).to_contain_text("there")
        expect(page.locator("#again-run")).not_to_have_attribute("aria-disabled", "true")
        page.locator("#again-name").select_option("module:glad")
        page.locator("#again-ratio").press("ArrowLeft")
        page.locator("#again-run").press("Enter")
        expect(answer_in(page, "steered").locator("h3")).to_have_text("Steered: glad at 99 %")
        expect(answer_in(page, "steered")).to_contain_text("there")
        first, second = window.sent
        assert (first["mode"], first["everywhere"], first["ratio"]) == ("remove", True, 1)
        assert (second["kind"], second["name"], second["ratio"]) == ("gain", "glad", 0.99)
        assert "mode" not in second


@pytest.mark.parametrize("by", ["stop", "close", "kill switch", "freeze", "reload"])
def test_a_run_is_stopped(opened, steerable, by):
    with completions(held) as server, open_dashboard(**steerable, server=server.url) as consumer:
        page = begun(opened, consumer)
        assert server.gone == []
        match by:
            case "stop":
                page.locator("#again-stop").click()
            case "close":
                page.keyboard.press("Escape")
                expect(page.locator("#again")).to_be_hidden()
            case "kill switch":
                page.locator("#again-kill").click()
            case "freeze":
                consumer.on_action(Answered.of(Freeze(), ActionApplied("1", 5), engine="engine-1", asked_by="client"))
            case "reload":
                page.reload()
                expect(page.locator("#link")).to_have_text(re.compile("live|stale"))
        eventually(lambda: len(server.gone) == 2)
        if by in ("stop", "kill switch", "freeze"):
            reason = "stopped" if by == "stop" else "stopped: the kill switch is pressed"
            for side in WORDS:
                expect(answer_in(page, side).locator(".bad")).to_have_text(reason)
        if by in ("kill switch", "freeze"):
            expect(page.locator("#again-kill-state")).to_contain_text("All steering is off")
            expect(page.locator("#again-run")).to_have_attribute("aria-disabled", "true")
            count = len(server.asked)
            page.locator("#again-run").click(force=True)
            page.wait_for_timeout(300)
            assert len(server.asked) == count


def test_the_servers_message_is_shown(opened, steerable):
    refusal = b'{"error": {"message": "module glad: <i>unknown</i>", "code": 404}}'
    with completions(broken(404, refusal)) as server, open_dashboard(**steerable, server=server.url) as consumer:
        page = show(opened, consumer).page
        page.keyboard.press("r")
        page.locator("#again-run").click()
        for side in WORDS:
            expect(answer_in(page, side).locator(".bad")).to_contain_text("HTTP 404: module glad: <i>unknown</i>")
        expect(page.locator("#again-state")).to_have_text("Over.")


def test_the_way_to_the_compare_view_which_would_stop_the_run_is_there_once_it_is_over(opened, steerable):
    with completions(held) as server, open_dashboard(**steerable, server=server.url) as consumer:
        page = begun(opened, consumer)
        names = [body["capture_id"] for *_, body in server.asked if body]
        for number, name in enumerate(sorted(names)):
            consumer.on_frame(frame_of(name, NORMS, prompt=20, seq=number + 2))
        expect(page.locator("#list")).to_contain_text("2 new requests")
        expect(page.locator("#again-compare")).to_have_count(0)
        page.locator("#again-stop").click()
        expect(page.locator("#again-compare")).to_be_visible()


def test_a_lost_connection_ends_the_run_on_the_page(opened, steerable):
    with completions(held) as server, open_dashboard(**steerable, server=server.url) as consumer:
        page = begun(opened, consumer)
        for connection in list(consumer.server.connections):
            consumer.server._loop.call_soon_threadsafe(connection.transport.abort)
        expect(page.locator("#again-state")).to_have_text("The connection to capflow was lost, which ends the run.")
        eventually(lambda: len(server.gone) == 2)
        server.answer = usual(WORDS)
        page.locator("#again-run").click()
        expect(answer_in(page, "steered")).to_contain_text("there")


def test_a_dashboard_that_began_anew_runs_no_other_request(opened, steerable):
    """It numbers requests from one again."""
    token = "t" * 24
    with completions(usual(WORDS)) as server:
        with open_dashboard(**steerable, server=server.url, token=token) as consumer:
            window, port = show(opened, consumer), consumer.server.port
            page = window.page
            page.keyboard.press("r")
            expect(page.locator("#again")).to_contain_text("The prompt of r1, 20 tokens, runs twice")
            window.excused = "net::ERR_CONNECTION_REFUSED"
        expect(page.locator("#link")).to_have_text("ended")
        with open_dashboard(**steerable, server=server.url, token=token, port=port) as consumer:
            consumer.on_session("engine-1", make_model())
            consumer.on_frame(frame_of("r0", NORMS, prompt=20))
            expect(page.locator("#again")).to_contain_text("The prompt of r1, which the dashboard does not have now")
            expect(page.locator("#again-run")).to_have_attribute("aria-disabled", "true")
            consumer.on_frame(frame_of("r1", NORMS, prompt=20, seq=2))
            expect(page.locator("#again")).to_contain_text("The prompt of r1, 20 tokens, runs twice")
            page.locator("#again-run").click()
            expect(answer_in(page, "steered")).to_contain_text("there")
            assert len(window.sent) == 1


@pytest.mark.parametrize("without", ["the right", "a server"])
def test_without_the_right_or_a_server_there_is_no_button_and_nothing_is_loaded(opened, steerable, without):
    more = steerable if without == "a server" else {}
    with open_dashboard(**more) as consumer:
        window = show(opened, consumer)
        loaded = []
        window.page.on("request", lambda request: loaded.append(request.url))
        expect(window.page.locator("#compare-open")).to_be_visible()
        assert window.page.locator("#again-open").count() == 0
        window.page.keyboard.press("r")
        window.page.wait_for_timeout(300)
        assert window.page.locator("#again").count() == 0
        assert [address for address in loaded if "again" in address] == []
        assert window.sent == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1440])
def test_it_fits_and_has_no_serious_findings(opened, steerable, width, scheme):
    with completions(usual(WORDS)) as server, open_dashboard(**steerable, server=server.url) as consumer:
        settings = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
        window = show(opened, consumer, **settings)
        page = window.page
        assert window.overflows() == []
        page.locator("#again-open").click()
        page.locator("#again-run").click()
        expect(answer_in(page, "steered")).to_contain_text("there")
        assert page.evaluate(
            "document.getElementById('again').scrollWidth <= document.getElementById('again').clientWidth"
        )
        boxes = [answer_in(page, side).bounding_box() for side in WORDS]
        assert (boxes[0]["y"] == boxes[1]["y"]) == (width > 1000)
        assert answer_in(page, "plain").bounding_box()["width"] > min(500, width - 80)
        assert window.findings() == []


def test_a_long_answer_is_bounded_in_height_and_keeps_its_spaces(opened, steerable):
    def answer(handler, _):
        handler.begin()
        for number in range(400):
            handler.part(chunk(f"word {number}\n  ", [number % 7]))
        handler.part(DONE)
        handler.end()

    with completions(answer) as server, open_dashboard(**steerable, server=server.url) as consumer:
        page = show(opened, consumer).page
        page.keyboard.press("r")
        page.locator("#again-run").click()
        expect(page.locator("#again-state")).to_have_text("Over. The answers are equal.")
        text = answer_in(page, "plain").locator(".again-text")
        assert text.evaluate("box => box.scrollHeight > box.clientHeight && box.clientHeight < innerHeight / 2")
        assert "word 1\n  word 2" in text.inner_text()
