"""The dashboard's page in a real browser: opens it, and reads what it shows."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import numpy as np
from playwright.sync_api import expect

from capflow.capture.frame import Frame
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from tests.kit.frames import make_frame
from tests.kit.waiting import eventually

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
LIMIT_MS = 20_000
# A machine that runs two more lanes of tests draws a page late.
expect.set_options(timeout=LIMIT_MS)
SITES = tuple(Site(layer, "post_block") for layer in range(4))
AXE = Path(__file__).parents[2] / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"


def browser_path():
    """Return the path of Chromium; None if it is not there."""
    return shutil.which(CHROMIUM) or shutil.which("chromium")


class OpenPage:
    """A page that is open on a dashboard.

    complaints: warnings and errors of its console, and requests to anywhere else.
    answer: called with the route of each file that it asks for, to answer it.
    excused: a text of its console that is no complaint: what a test does itself.
    """

    excused = "\0"

    def __init__(self, page, consumer, place="", answer=None):
        self.page = page
        self.consumer = consumer
        self.complaints = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", self._on_request)
        page.set_default_timeout(LIMIT_MS)
        if answer:
            page.route("**/*", answer)
        page.goto(consumer.link)
        expect(page.locator("#link")).to_have_text(re.compile("live|stale"), timeout=LIMIT_MS)
        if place:
            page.evaluate("place => { location.hash = place; }", place)

    def _on_console(self, message):
        # A page asks for its session again; while the dashboard closes, that is reset or cut, and then refused.
        gone = self.consumer.closed and re.search("ERR_(CONNECTION_(REFUSED|RESET)|SOCKET_NOT_CONNECTED)", message.text)
        if message.type in ("error", "warning") and not gone and self.excused not in message.text:
            self.complaints.append(message.text)

    def _on_request(self, request):
        host = re.match(r"http://([^/]+)/", self.consumer.address)[1]
        if not request.url.startswith((f"http://{host}", f"ws://{host}", "data:")):
            self.complaints.append(request.url)

    # What it shows.

    def shows_cursor(self):
        """Return whether the token of the cursor is in view in the text."""
        return self.page.evaluate(
            """() => {
              const token = document.querySelector("#text .at")?.getBoundingClientRect();
              const text = document.getElementById("text").getBoundingClientRect();
              return Boolean(token) && token.top >= text.top && token.bottom <= text.bottom + 1;
            }"""
        )

    def tokens(self):
        return self.page.locator("#text .t")

    def wait_tokens(self, count):
        expect(self.tokens()).to_have_count(count, timeout=LIMIT_MS)

    def steps(self):
        """Return the step of colour of each token in view, 0 to 63; None where it has no colour."""
        names = self.page.evaluate("[...document.querySelectorAll('#text .t')].map((token) => token.className)")
        return [int(match[1]) if (match := re.search(r"\bc(\d+)\b", name)) else None for name in names]

    def wait_coloured(self):
        """Wait until all tokens have colours, and return their steps."""
        eventually(lambda: self.steps() and None not in self.steps())
        return self.steps()

    def click_token(self, number):
        """Click a token; one that is broken over two lines in its last part."""
        token = self.tokens().nth(number)
        token.scroll_into_view_if_needed()
        # Parts of the page that are still being loaded may move it, or break it elsewhere.
        x, y = token.evaluate(
            """async (token) => {
              for (let last = ""; ; ) {
                const box = token.getBoundingClientRect();
                const part = [...token.getClientRects()].at(-1);
                const place = [part.x + part.width / 2 - box.x, part.y + 4 - box.y];
                if (`${place} ${box.x} ${box.y}` === last) return place;
                last = `${place} ${box.x} ${box.y}`;
                await new Promise((done) => setTimeout(done, 100));
              }
            }"""
        )
        # Playwright waits until a click there is one on the token.
        token.click(position={"x": x, "y": y})

    def cells(self, rows, columns, width=None):
        """Return the colour of the middle of each cell of the heatmap, [rows from the bottom, columns, rgb].

        width: how many columns the heatmap shows, by default 24 or more.
        """
        pixels = self.page.evaluate(
            """([rows, columns, width]) => {
              const box = document.getElementById("heat");
              const canvas = box.querySelector("canvas");
              const ratio = devicePixelRatio;
              const left = innerWidth < 520 ? 44 : 60;
              const plot = box.clientWidth - left - 14;
              const height = box.clientHeight - 20;
              const copy = new OffscreenCanvas(canvas.width, canvas.height);
              const context = copy.getContext("2d", { willReadFrequently: true });
              context.drawImage(canvas, 0, 0);
              return Array.from({ length: rows }, (_, row) => Array.from({ length: columns }, (_, column) => {
                const x = (left + ((column + 0.5) / width) * plot) * ratio;
                const y = (height * (1 - (row + 0.5) / rows)) * ratio;
                return [...context.getImageData(x, y, 1, 1).data];
              }));
            }""",
            [rows, columns, width or max(24, columns)],
        )
        return np.array(pixels)

    def inked(self, column, width):
        """Return which part of a column of the heatmap has a colour: 1 for values, less for patterns.

        width: how many columns the heatmap shows.
        """
        return self.page.evaluate(
            """([column, width]) => {
              const box = document.getElementById("heat");
              const canvas = box.querySelector("canvas");
              const plot = (box.clientWidth - 74) / width;
              const [x, size] = [Math.ceil(60 + column * plot) + 1, Math.floor(plot) - 2];
              const height = Math.floor(box.clientHeight - 20);
              const copy = new OffscreenCanvas(size, height).getContext("2d");
              copy.drawImage(canvas, x, 0, size, height, 0, 0, size, height);
              const { data } = copy.getImageData(0, 0, size, height);
              return data.filter((value, i) => i % 4 === 3 && value > 0).length / (data.length / 4);
            }""",
            [column, width],
        )

    def choose_scale(self, name):
        """Choose how norms are shown, and wait until they are."""
        self.page.select_option("#scale", name)
        expect(self.page.locator("#heat")).to_have_attribute("data-kind", name)

    def choose(self, request):
        """Open a request of the list, and wait until it is shown."""
        self.page.locator("#requests .row", has_text=request).first.click()
        expect(self.page.locator("#request-id")).to_have_text(request)

    def overflows(self):
        """Return what is wider than the window: the page itself, or parts that do not scroll."""
        return self.page.evaluate(
            """() => [...document.querySelectorAll("body, main *, header *, #list *")].filter((part) => {
                const { width, right, left } = part.getBoundingClientRect();
                const scrolls = part.closest(".grid, .text, .scroll, .over-box, .heat, .unseen, .engines, .threshold");
                const clipped = part.parentElement?.closest("bdi, h2, .engine, .words, svg, .track-plot");
                return width && (right > innerWidth + 1 || left < -1) && !scrolls && !clipped;
            }).map((part) => part.id || part.className || part.tagName)
              .concat(document.documentElement.scrollWidth > innerWidth ? ["page"] : [])"""
        )

    def findings(self):
        """Return the serious findings of axe-core."""
        # The policy of the page refuses scripts in the page itself, not those of a debugger.
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
        result = self.page.evaluate("(rules) => axe.run(document, { runOnly: rules })", rules)
        return [
            (one["id"], node["target"], node["failureSummary"])
            for one in result["violations"]
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]


def with_texts(frame, texts):
    """Return the frame with other texts for its tokens, request by request."""
    requests = tuple(
        msgspec.structs.replace(request, texts=tuple(texts[request.id][request.start :][: len(request.token_ids)]))
        for request in frame.header.requests
    )
    return Frame.seal(msgspec.structs.replace(frame.header, requests=requests), frame.payload)


def with_norms(frame, norms, hidden=8):
    """Return the frame with rows that have the norms `[sites, tokens]`; only their fourth number is not 0."""
    rows = np.zeros((*np.shape(norms), hidden), np.float32)
    rows[..., 3] = norms
    return Frame.seal(frame.header, np.ascontiguousarray(rows).view(np.uint8))


def frame_of(request, norms, *, prompt=None, start=0, seq=1, texts=True, **more):
    """Return a frame with the norms `[sites, tokens]` of a request's tokens from `start` on."""
    count = np.shape(norms)[1]
    sites = SITES[: np.shape(norms)[0]]
    frame = make_frame([(request, prompt or count, start, count)], sites, seq=seq, texts=texts, **more)
    return with_norms(frame, norms)


def done(request, status="stop", dropped=(), *, prompt=4, engine="engine-1"):
    """Return the end of a request."""
    return RequestDone(engine, request, status, prompt, 6, 24, 24, tuple(dropped))
