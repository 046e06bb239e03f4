"""Where rows are stored: the line that the page shows returns, in a fresh Python, the row that was captured."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
from playwright.sync_api import expect

import capflow
from capflow.capture.frame import Block, Frame, Span
from capflow.capture.site import Site
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from capflow_dashboard.consumer import Dashboard, DashboardConfig
from capflow_dashboard.views.stored import _is_shown
from tests.dashboard.test_command import dashboard_of
from tests.kit.dashboards import Pageless, open_dashboard, served_near
from tests.kit.frames import BOOT, make_finished, make_frame, make_hello, make_model, row_of
from tests.kit.hubs import address, configured, running_hub, worker_link
from tests.kit.recordings import record
from tests.kit.stored import done
from tests.kit.stored import opened as opened_files
from tests.kit.stored_layouts import LAYOUTS
from tests.kit.waiting import eventually

__all__ = ["address"]

SITES = tuple(Site(layer, "post_block") for layer in range(4))
REQUEST = """it's "ü" 50%"""
PROMPT, END = 20, 42
# Each layout with other positions.
POSITIONS = {
    "per_file": ("all", range(END)),
    "packed": ("every:8", range(0, END, 8)),
    "sharded": ("all_generated", range(PROMPT, END)),
    "zstd": ("last:4+every:16", [*range(0, END, 16), *range(PROMPT - 4, PROMPT)]),
}
NUMBERS = itertools.count(1)
READ = """() => Object.fromEntries([...document.querySelectorAll("#stored .store")].map((store) => [
  store.querySelector("h4 bdi").textContent,
  { line: store.querySelector("pre")?.textContent ?? null, path: store.querySelector(".path").textContent,
    row: store.querySelector(".stored-row")?.textContent ?? null,
    notes: [...store.querySelectorAll(".stored-note")].map((note) => note.textContent).join(" ") }]))"""


@pytest.mark.parametrize("quantization", ["none", "int8", "float8_e4m3"])
def test_rounded_rows_are_those_that_are_shown(tmp_path, quantization):
    site, hidden = Site(0, "post_block"), 64
    consumer = opened_files(tmp_path, (site,), layout="sharded", quantization=quantization)
    frame = make_frame([("r", 4, 0, 4)], (site,), hidden=hidden)
    rows = np.ones((4, hidden), np.float32)
    rows[:, 0] = 400  # as rows of the stream are: one number is most of the norm
    rows[:, 1] = 412
    consumer.on_frame(Frame.seal(frame.header, rows.tobytes()))
    consumer.on_request_done(done("r"))
    consumer.close()
    capture = capflow.open(tmp_path)["r"]
    norm = float(np.linalg.norm(rows[2]))
    assert _is_shown(capture, {site: 2}, {site: norm})
    assert not _is_shown(capture, {site: 2}, {site: norm * 1.13})
    assert _is_shown(capture, {site: 2}, {site: norm * 1.02}) == (quantization != "none")


class Engine:
    """A worker whose frames have the rows of `row_of`, times a factor."""

    def __init__(self, link, name="engine-1", factor=1, boot=BOOT):
        self.link, self.name, self.factor, self.boot, self.seq = link, name, factor, boot, 0

    def send(self, request, start, count, *, incarnation="i-1", ends=False, rows_from=0):
        """Send the tokens from `start` on, and their rows from `rows_from` on: each row is sent once."""
        self.seq += 1
        end = start + count
        finished = [make_finished(request, PROMPT, end, rows=4 * end, incarnation=incarnation)] if ends else ()
        frame = make_frame(
            [(request, PROMPT, start, count)],
            SITES,
            seq=self.seq,
            finished=finished,
            texts=True,
            engine=self.name,
            boot=self.boot,
            incarnation=incarnation,
        )
        rows = np.frombuffer(frame.payload, np.float32).reshape(len(SITES), count, -1) * np.float32(self.factor)
        if rows_from > start:
            span = Span(0, rows_from, end - rows_from, 0)
            blocks = (Block(SITES, end - rows_from, (span,)),)
            frame = Frame(msgspec.structs.replace(frame.header, blocks=blocks), b"")
            rows = np.ascontiguousarray(rows[:, rows_from - start :])
        frame = Frame.seal(frame.header, rows.reshape(-1).view(np.uint8))
        assert self.link.send(frame.header, frame.payload) is None

    def run(self, request, *, incarnation="i-1", begun=False):
        """Send a request whose prompt comes in chunks, and which is preempted and computed again."""
        if not begun:
            self.send(request, 0, 7, incarnation=incarnation)
        self.send(request, 7, 13, incarnation=incarnation)
        for position in range(20, 30):
            self.send(request, position, 1, incarnation=incarnation)
        self.send(request, 0, 31, incarnation=incarnation, rows_from=30)
        for position in range(31, END):
            self.send(request, position, 1, incarnation=incarnation, ends=position == END - 1)


def files_in(tmp_path, name, **options):
    """Return a consumer that writes below a path whose name needs quoting."""
    root = tmp_path / f"da ta's “{name}”"
    consumer = FilesystemConsumer(FilesystemConfig(root=str(root), fsync=False, on_collision="suffix", **options))
    consumer.instance = f"filesystem@{name}"
    return configured(consumer)


def files_of(hub):
    return [one for one in hub.status()["consumers"].values() if one["kind"] == "filesystem"]


def pasted(lines):
    """Return the row that each piece of Python returns that is pasted into a fresh process."""
    program = "import json\nresults = []\n"
    for line in lines:
        *before, last = line.split("\n")
        program += "\n".join([*before, f"results.append({last})"]) + "\n"
    program += "print(json.dumps([[str(row.dtype), row.tobytes().hex()] for row in results]))\n"
    ran = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, timeout=60, check=True)
    return [np.frombuffer(bytes.fromhex(text), dtype) for dtype, text in json.loads(ran.stdout)]


def stored(page, request, position, condition=bool, limit_s=20.0):
    """Ask until the stores of a token are as wanted; return them."""
    deadline = time.monotonic() + limit_s
    while True:
        number = next(NUMBERS)
        page.send(stored={"id": number, "request": request, "position": position})
        answer = page.until(lambda p, number=number: p.stored if p.stored.get("id") == number else None)
        if not answer["error"] and condition(answer["stores"]):
            return answer["stores"]
        assert time.monotonic() < deadline, answer


class Panel:
    """The part of the token's panel that says where rows are stored."""

    def __init__(self, window):
        self.window, self.page = window, window.page

    def choose(self, column):
        self.window.click_token(column)
        expect(self.page.locator("#token-facts dd").first).to_contain_text(f"{column},")

    def open(self):
        self.page.locator("#stored summary").focus()
        self.page.keyboard.press("Enter")

    def stores(self, condition):
        """Return the stores by the name of their consumer, once there are some and the notes of all are as wanted."""
        seen = {}

        def there():
            seen.update(self.page.evaluate(READ))
            return seen and all(condition(store["notes"]) for store in seen.values())

        eventually(there)
        return seen


@pytest.mark.browser
def test_the_line_of_each_layout_returns_the_row_that_the_page_shows(opened, address, tmp_path):
    stores = [files_in(tmp_path, name, positions=POSITIONS[name][0], **options) for name, options in LAYOUTS.items()]
    shown = Dashboard(DashboardConfig(port=0))
    shown.closed = False
    with (
        served_near(),
        running_hub(address, *stores, configured(shown, policy="block")) as hub,
        worker_link(address) as first,
        worker_link(address, make_hello(engine="engine-2", boot="boot-2")) as second,
    ):
        engines = [Engine(first), Engine(second, "engine-2", 3, "boot-2")]
        window = opened(shown)
        window.excused = "ERR_CONNECTION_REFUSED"
        panel = Panel(window)
        for engine in engines:
            engine.send(REQUEST, 0, 7)
        window.wait_tokens(7)
        panel.choose(0)
        panel.open()
        assert len(panel.stores(lambda notes: "written when the request is over" in notes)) == 4
        for engine in engines:
            engine.run(REQUEST, begun=True)
        window.wait_tokens(END)
        eventually(lambda: all(sum(one["results"].values()) == 2 for one in files_of(hub)))
        for engine in engines:
            place = [engine.name, REQUEST]
            window.page.evaluate(
                "(place) => { location.hash = `#/r/${place.map(encodeURIComponent).join('/')}?hold=1`; }", place
            )
            expect(window.page.locator("#request-facts bdi")).to_have_text(engine.name)
            window.wait_tokens(END)
            for column in (0, 16, 24, 41):
                panel.choose(column)
                window.page.locator("#stored-again").click()
                answer = panel.stores(lambda notes: "is over" not in notes)
                lines, expected = [], []
                for name, (_, positions) in POSITIONS.items():
                    store = answer[f"filesystem@{name}"]
                    if column in positions:
                        assert store["row"].startswith(f"{sorted(positions).index(column)} of post_block:3")
                        assert store["path"].startswith(str(tmp_path))
                        lines.append(store["line"])
                        expected.append(row_of(REQUEST, SITES[3], column) * np.float32(engine.factor))
                    else:
                        assert store["line"] is None
                        assert "no row of this position" in store["notes"]
                for row, right in zip(pasted(lines), expected, strict=True):
                    assert row.tobytes() == right.tobytes()
        assert not window.findings()


def test_captures_of_the_same_id_are_told_apart_by_their_rows(address, tmp_path):
    shown = Dashboard(DashboardConfig(port=0))
    with (
        served_near(),
        running_hub(address, files_in(tmp_path, "packed"), configured(shown, policy="block")),
        worker_link(address) as link,
        Pageless(shown) as page,
    ):
        for number, factor in enumerate((1, 5, 2)):
            engine = Engine(link, factor=factor)
            engine.seq = 100 * number
            engine.run(REQUEST, incarnation=f"i-{number}")
        page.until(lambda p: len(p.requests) == 3 and all(r["status"] != "live" for r in p.requests.values()))
        for key, factor in ((1, 1), (2, 5), (3, 2)):
            (store,) = stored(page, key, 24, lambda stores: "rows" in stores[0])
            (index,) = (index for name, index, _ in store["rows"] if name == "post_block:2")
            (row,) = pasted([f"import capflow\n{store['expression']}['post_block:2'].rows[{index}]"])
            assert row.tobytes() == (row_of(REQUEST, SITES[2], 24) * np.float32(factor)).tobytes()
            assert (".captures(" in store["expression"]) == (key != 3)


def test_a_data_set_that_is_shown_names_its_rows(tmp_path):
    root = tmp_path / "da ta"
    files = opened_files(root, SITES, layout="packed")
    files.on_frame(make_frame([("r1", 4, 0, 6)], SITES, texts=True))
    files.on_request_done(done("r1", 4, 6, rows=24))
    files.close()
    with dashboard_of(root) as shown, Pageless(shown) as page:
        page.until(lambda p: p.requests and p.requests[1]["status"] != "live")
        assert page.hello["stored"] is True
        (store,) = stored(page, 1, 5)
        assert store["path"] == str(root)
        assert store["rows"][3] == ["post_block:3", 5, str(root / "r1" / "rows.safetensors")]
        (row,) = pasted([f"import capflow\n{store['expression']}['post_block:3'].rows[5]"])
        assert row.tobytes() == row_of("r1", SITES[3], 5).tobytes()


def test_a_recording_that_is_shown_has_no_store(address, tmp_path):
    path = tmp_path / "recording"
    with running_hub(address, record(path)) as hub, worker_link(address) as link:
        Engine(link).send("r1", 0, 4)
        eventually(lambda: hub.status()["consumers"]["record"]["frames"])
    with dashboard_of(path) as shown, Pageless(shown) as page:
        page.until(lambda p: p.hello)
        assert page.hello["stored"] is False


def test_without_a_store_or_its_directory_it_says_so(tmp_path):
    gone = str(tmp_path / "gone")
    with open_dashboard() as consumer:

        def beat(consumers):
            consumer.context.status = {"consumers": consumers}
            consumer._beat_at = 0
            consumer.on_idle()

        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 6)], SITES))
        with Pageless(consumer) as page:
            page.until(lambda p: p.requests)
            assert not consumer._process.health_wanted
            number = next(NUMBERS)
            page.send(stored={"id": number, "request": 1, "position": 2})
            eventually(lambda: consumer._process.health_wanted)
            beat({"dashboard": {"kind": "dashboard", "claim": None}, "log": {}})
            assert page.until(lambda p: p.stored)["stores"] == []
            beat(
                {
                    "files": {"kind": "filesystem", "claim": ["root", gone]},
                    "duckdb": {"kind": "duckdb", "claim": ["path", "/x/it's.duckdb"]},
                }
            )
            elsewhere, database = stored(page, 1, 2, lambda stores: len(stores) == 2)
            assert elsewhere["expression"] == f"capflow.open({gone!r})['engine-1', 'r1']"
            assert "not on the dashboard's machine" in elsewhere["note"]
            assert "rows" not in elsewhere
            assert database["command"].endswith("""--path '/x/it'"'"'s.duckdb'""")
            page.send(stored={"id": 9_000_000, "request": 7, "position": 2})
            assert "request 7" in page.until(lambda p: p.stored if p.stored["id"] == 9_000_000 else None)["error"]
