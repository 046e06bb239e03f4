"""A browser for the tests of the dashboard's page, and what a page may steer with."""

from __future__ import annotations

import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.probes.probe import save_vector
from tests.kit.pages import ARGUMENTS, CHROMIUM, OpenPage, browser_path


@pytest.fixture(scope="module")
def chromium():
    """Return a browser; without one these tests fail, for a page that nobody looks at is not tested."""
    from playwright.sync_api import sync_playwright

    path = browser_path()
    if path is None:
        pytest.fail(f"{CHROMIUM} is not there and the dashboard's page cannot be tested: run `make system`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Return a function that opens a dashboard's page; whatever its console complains of fails the test."""
    contexts, pages = [], []

    def make(consumer, place="", answer=None, **settings):
        context = chromium.new_context(**({"viewport": {"width": 1280, "height": 800}} | settings))
        contexts.append(context)
        pages.append(OpenPage(context.new_page(), consumer, place, answer))
        return pages[-1]

    yield make
    for context in contexts:
        context.close()
    assert [page.complaints for page in pages] == [[]] * len(pages)


@pytest.fixture
def steerable(tmp_path):
    """Return the options of a dashboard that may steer with two vectors and a module."""
    files = []
    for name, layer in (("calm", 2), ("angry", 1)):
        path = tmp_path / f"{name}.safetensors"
        save_vector(path, Site(layer, "post_block"), np.arange(8))
        files.append(f"{name}={path}")
    return {"allow_steering": True, "vectors": tuple(files), "modules": ("glad",)}
