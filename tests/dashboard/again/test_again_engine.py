"""Requests that are run again at a real `capflow serve`, whose hub the dashboard watches."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
from playwright.sync_api import expect

from capflow.capture.site import Site
from capflow.probes.probe import load_vector, save_vector
from capflow_dashboard.access import KEY_VARIABLE
from tests.kit.dashboards import Pageless, dashboard
from tests.kit.engines import environment as variables
from tests.kit.engines import vector
from tests.kit.hubs import address, configured, free_port, running_hub
from tests.kit.servers import environment, healthy, post, process, wait_until
from tests.kit.waiting import eventually

__all__ = ["address"]

pytestmark = [pytest.mark.engine, pytest.mark.browser, pytest.mark.timeout(500)]

KEY = "of-the-server"
PROMPT = "w5 w77 w123 w9 w250"
TOKENS = 24
SITE = Site(1, "post_block")
NUMBERS = itertools.count()


def asked(port, **more):
    """Return the token ids of an answer that is asked for directly, and the request's id."""
    name = f"direct-{next(NUMBERS)}"
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, "capture_id": name}
    answer = post(port, body | more, Authorization=f"Bearer {KEY}")
    return answer["choices"][0]["token_ids"], name


def run(page, **ask):
    """Run until both sides are over; return the token ids of each, and its last news."""
    count = len(page.again)
    page.send(again={"name": "calm", "tokens": TOKENS} | ask)
    sides = {}
    for name in ("plain", "steered"):
        page.until(lambda p, name=name: any(one.get(name, {}).get("over") for one in p.again[count:]), 60)
    for name in ("plain", "steered"):
        news = [one[name] for one in page.again[count:] if name in one]
        sides[name] = [token for part in news for ids, _ in part["pieces"] for token in ids], news[-1]
    return sides


def key_of(page, request):
    """Wait until a page has a finished request; return its key."""
    keys = page.until(lambda p: [k for k, r in p.requests.items() if r["id"] == request and r["status"] != "live"], 60)
    return keys[0]


@pytest.fixture(scope="module")
def served(tiny_with_words, tmp_path_factory):
    """Return a dashboard and the port of the server at which it runs requests again."""
    home, port = tmp_path_factory.mktemp("home"), free_port()
    hub = f"ipc://{home}/hub.sock"
    save_vector(home / "calm.safetensors", SITE, vector(5))
    save_vector(home / "wide.safetensors", SITE, np.ones(65))
    (home / "one.json").write_text(json.dumps({"vectors": {"post_block": {"1": (3 * vector(6)).tolist()}}}))
    command = [
        "serve", tiny_with_words, "--port", str(port), "--hub", hub, "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "512", "--served-model-name", "tiny", "--api-key", KEY,
        "--steering-modules", f"one={home}/one.json",
    ]  # fmt: skip
    options = {
        "allow_steering": True,
        "vectors": tuple(f"{name}={home}/{name}.safetensors" for name in ("calm", "wide")),
        "modules": ("one", "unknown"),
        "server": f"http://127.0.0.1:{port}/v1",
    }
    with (
        variables(**{KEY_VARIABLE: KEY}),
        dashboard(**options) as shown,
        running_hub(hub, configured(shown, "block")),
        process(*command, environment=environment(home)) as (server, _),
    ):
        shown.closed, shown.home = False, home
        try:
            wait_until(lambda: healthy(port), 400, server)
            yield shown, port
        finally:
            shown.closed = True
            server.terminate()


def fields_of(shown, name, **how):
    numbers = load_vector(shown.home / "calm.safetensors").array().tolist()
    return {name: {"post_block": {"1": {"vector": numbers, **how}}}}


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        ({"ratio": 0.5}, ("decode_steering_vectors", {"scale": 0.5, "relative": True})),
        ({"ratio": -0.5, "everywhere": True}, ("steering_vectors", {"scale": -0.5, "relative": True})),
        ({"mode": "remove", "ratio": 1.0, "everywhere": True}, ("steering_clamps", {"value": 0.0, "strength": 1.0})),
        ({"kind": "gain", "name": "one", "ratio": 1.0}, None),
    ],
)
def test_plain_is_the_original_and_steered_is_what_a_direct_request_gives(served, ask, fields):
    shown, port = served
    original, name = asked(port)
    with Pageless(shown) as page:
        key = key_of(page, name)
        sides = run(page, id=1, request=key, **ask)
        assert [last["error"] for _, last in sides.values()] == ["", ""]
        assert sides["plain"][0] == original
        more = {"steering_name": "one"} if fields is None else fields_of(shown, fields[0], **fields[1])
        direct, _ = asked(port, **more)
        assert sides["steered"][0] == direct
        assert direct != original
        plain, steered = (page.requests[key_of(page, last["request"])] for _, last in sides.values())
        assert plain["text"] == steered["text"] == page.requests[key]["text"]
        assert plain["steered"] == 0
        everywhere = ask.get("everywhere") or ask.get("kind") == "gain"
        # The last token of an answer is never an input.
        assert steered["steered"] == TOKENS - 1 + (5 if everywhere else 0)


def test_what_the_engine_refuses_is_said_in_its_words(served):
    shown, port = served
    _, name = asked(port)
    with Pageless(shown) as page:
        key = key_of(page, name)
        wide = run(page, id=1, request=key, name="wide", ratio=0.5)
        assert "HTTP 400: decode_steering_vectors.post_block.1" in wide["steered"][1]["error"]
        assert wide["plain"][1]["error"] == ""
        unknown = run(page, id=2, request=key, kind="gain", name="unknown", ratio=1.0)
        assert re.search("HTTP 4..: .*unknown", unknown["steered"][1]["error"])
        long = run(page, id=3, request=key, ratio=0.5, tokens=2048)
        assert "HTTP 400: " in long["plain"][1]["error"]
        assert "512" in long["plain"][1]["error"]


@pytest.mark.parametrize("by", ["stop", "page", "kill"])
def test_the_engine_aborts_what_is_stopped(served, by):
    shown, port = served
    _, name = asked(port)
    with Pageless(shown) as watching:
        key = key_of(watching, name)
        with Pageless(shown) as page:
            page.send(again={"id": 1, "request": key, "name": "calm", "ratio": 0.5, "tokens": 500})
            page.until(lambda p: all(any(side in one for one in p.again) for side in ("plain", "steered")), 60)
            names = {one[side]["request"] for one in page.again for side in ("plain", "steered") if side in one}
            if by == "stop":
                page.send(again={"id": 2, "stop": True})
            elif by == "kill":
                page.send(act={"id": 3, "kind": "kill"})
            if by != "page":
                page.until(lambda p: any(one.get("steered", {}).get("over") for one in p.again), 20)
                assert not any(one["steered"]["finish"] for one in page.again if "steered" in one)
        assert len(names) == 2
        for one in names:
            assert watching.requests[key_of(watching, one)]["status"] == "abort"
        if by == "kill":
            watching.send(act={"id": 4, "kind": "release"})
            watching.until(lambda p: not p.steering["frozen"], 60)


def test_a_browser_shows_both_and_compares_them(served, opened):
    shown, port = served
    _, name = asked(port)
    with Pageless(shown) as watching:
        key_of(watching, name)
    page = opened(shown, f"#/r/{next(iter(watching.requests.values()))['engine']}/{name}?hold=1").page
    expect(page.locator("#request-id")).to_have_text(name)
    page.keyboard.press("r")
    page.locator("#again-ratio").fill("50")
    page.locator("#again-tokens").fill(str(TOKENS))
    page.locator("#again-tokens").blur()
    page.locator("#again-run").click()
    expect(page.locator("#again-state")).to_contain_text("The first token that differs is number", timeout=60_000)
    for side in ("plain", "steered"):
        expect(page.locator(f"#again [data-side={side}]")).to_contain_text(f"{TOKENS} tokens, at its limit of tokens")
    page.locator("#again-compare").click(timeout=60_000)
    expect(page.locator("#compare")).to_be_visible()
    expect(page.locator("#compare .t.first").first).to_be_visible()
    eventually(lambda: re.search(r"#/compare/[^/]+/again-\w+-plain/[^/]+/again-\w+-steered", page.url))
