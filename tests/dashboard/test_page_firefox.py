"""The page in Firefox: it shows a request, opens its views and sheets, and stops all steering."""

from __future__ import annotations

import re

import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.probes.probe import Probe, save_vector
from capflow.steering.action import Freeze
from tests.kit.dashboards import open_dashboard
from tests.kit.firefox import firefox, firefox_path
from tests.kit.frames import make_model
from tests.kit.pages import done, frame_of
from tests.kit.waiting import eventually

FIREFOX = firefox_path()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(FIREFOX is None, reason="there is no Firefox; `apt-get install firefox-esr` has one"),
]

NORMS = np.random.default_rng(1).uniform(10, 20, (4, 60)).astype(np.float32)
ESCAPE, SHIFT = "\ue00c", "\ue008"
# Which part of the pixels of a canvas have a colour.
INKED = """(() => {
  const canvas = document.querySelector(%r);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((value, i) => i %% 4 === 3 && value > 0).length / (data.length / 4);
})()"""


@pytest.fixture
def shown(tmp_path):
    """Return a dashboard that may steer, with two requests and a probe; `actions` is what reaches its hub."""
    vector, probe = tmp_path / "calm.safetensors", tmp_path / "code.safetensors"
    save_vector(vector, Site(2, "post_block"), np.arange(8))
    Probe.make(Site(2, "post_block"), np.eye(1, 8, 3), names=("code",), threshold=15.0).save(probe)
    with open_dashboard(allow_steering=True, vectors=(f"calm={vector}",), probes=(str(probe),)) as consumer:
        consumer.actions = []
        consumer.context.act = consumer.actions.append
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", NORMS, prompt=20))
        consumer.on_frame(frame_of("r2", NORMS[:, ::-1], prompt=20, seq=2))
        consumer.on_request_done(done("r1", prompt=20))
        yield consumer


def test_a_request_its_views_and_the_kill_switch(shown):
    with firefox(FIREFOX, reduced_motion=True) as page:
        page.size(1440, 900)
        page.go(shown.link)
        page.until("document.querySelectorAll('#text .t').length === 60")
        page.until("document.querySelectorAll('#text .t[class*=\" c\"]').length === 60")
        assert page.evaluate("matchMedia('(prefers-reduced-motion: reduce)').matches")
        for canvas in (".heat-canvas", ".track-plot canvas", ".over-canvas"):
            page.until(f"{INKED % canvas} > 0.005")
        # A token, by pointer and by keys.
        page.click("#text .t:nth-child(13)")
        page.until("document.querySelector('#token-facts')?.textContent.includes('12, prompt')")
        page.press("\ue014")
        page.until("document.querySelector('#token-facts').textContent.includes('13, prompt')")
        assert page.evaluate("document.querySelectorAll('#token-layers tbody tr').length") == 4
        # Views and sheets, which are loaded now.
        for view, part in (("health", ".tiles"), ("population", ".hist canvas"), ("requests", ".wide .row")):
            page.evaluate(f"void (location.hash = '#/{view}')")
            page.until(f"document.querySelector('{part}')?.checkVisibility()")
        page.evaluate("void (location.hash = '#/compare/engine-1/r1/engine-1/r2')")
        page.until("document.querySelectorAll('.compare-text .t').length > 60")
        for key, sheet in (("?", "#help"), ("e", "#export")):
            page.press(key)
            page.until(f"document.querySelector('{sheet}')?.open")
            page.press(ESCAPE)
            page.until(f"!document.querySelector('{sheet}').open")
        # Steering.
        page.evaluate("void (location.hash = '#/')")
        page.press("s")
        page.until("document.activeElement.id === 'steer-title'")
        assert page.evaluate("document.querySelector('#steer-ratio').checkVisibility()")
        page.press(SHIFT, "K")
        eventually(lambda: shown.actions)
        assert isinstance(shown.actions[-1], Freeze)
        page.until("document.querySelector('.kill').dataset.state !== 'on'")
        for width in (1440, 390, 320):
            page.size(width, 800)
            page.until(f"innerWidth === {width}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.complaints == []


def test_a_view_that_could_not_be_loaded_is_loaded_at_the_next_try(shown):
    with firefox(FIREFOX) as page:
        page.go(shown.link)
        page.until("document.querySelectorAll('#text .t').length === 60")
        page.cut("/health.js")
        page.evaluate("void (location.hash = '#/health')")
        page.until("document.querySelector('main .stead')?.textContent.includes('could not be loaded')")
        page.mend()
        page.until("performance.now() > 5000")
        # Firefox remembers the failure, so that the page is loaded again.
        page.click("main .stead button")
        page.until("document.querySelector('#health .tiles')?.checkVisibility()")
        assert all(re.search("NetworkError|error loading", text) for text in page.complaints), page.complaints
