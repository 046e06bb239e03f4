"""The dashboard under load: how far behind it shows, what it costs, and what it does to another consumer.

A process sends the frames of 64 requests, 18 sites of width 64 in bfloat16, at a fixed number of tokens a second. A hub
gives them to the dashboard, with two probes, and to a consumer that counts its rows. A page in real Chromium follows
one request and the list. The engine's part is left out: nothing of the dashboard runs in it.

    PYTHONPATH=. python3 benchmarks/dashboard.py [--seconds 30] [--tokens-per-s 10000] [--minutes 30]

It prints the lag of the rows, the messages and bytes to the page, the time between two frames of the page and the CPU
time of its main thread for each update, the CPU time of the hub, of the page's process and of both without a
dashboard, and the growth of the page's heap. With `--minutes` there is one run of so long, with a page, for the growth:
the heap is measured each minute after a collection, and the slope is that of the second half, when the list is full.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from capflow import CaptureResult, CaptureSpec, Consumer
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Block, Finished, Frame, FrameHeader, Rank, RequestRows, Span
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.hub.hub import Hub
from capflow.plugins.configure import ConfiguredConsumer
from capflow.probes.probe import Probe
from capflow.protocol.message import Hello
from capflow.transport.links.worker import WorkerLink
from capflow_dashboard.consumer import Dashboard, DashboardConfig

REQUESTS = 64
HIDDEN = 64
SITES = tuple(Site(layer, "post_block") for layer in range(18))
PROMPT, ANSWER = 32, 480
PROBES = 2


class Counting(Consumer):
    """Counts the rows that it gets."""

    name = "counting"

    def __init__(self) -> None:
        super().__init__(None)
        self.rows = 0

    def spec(self) -> CaptureSpec:
        """Return all sites."""
        return CaptureSpec({"post_block": "all"})

    def on_frame(self, frame: Frame) -> None:
        """Count the rows."""
        self.rows += sum(frame.counts)

    def on_request_done(self, _: Any) -> CaptureResult:
        """Take the end."""
        return CaptureResult("ok")


def steps(seed: int) -> Iterator[tuple[FrameHeader, Any]]:
    """Yield the frames of requests that follow one another in 64 places, for ever."""
    rng = np.random.default_rng(seed)
    pool = rng.normal(0, 8, (len(SITES), 4 * REQUESTS * PROMPT, HIDDEN)).astype(DTYPES["bfloat16"])
    words = [f" word{number}" for number in range(1000)]
    places = [PROMPT + int(ANSWER * number / REQUESTS) for number in range(REQUESTS)]
    names = [f"cmpl-{number:04d}" for number in range(REQUESTS)]
    fresh = [True] * REQUESTS
    begun = REQUESTS
    for step in range(1, sys.maxsize):
        spans, parts, finished, row = [], [], [], 0
        for number in range(REQUESTS):
            start, length = (0, places[number]) if fresh[number] else (places[number], 1)
            fresh[number] = False
            ids = tuple(int(one) for one in rng.integers(0, 1000, length))
            parts.append(RequestRows(names[number], PROMPT, start, ids, tuple(words[one] for one in ids), steered=()))
            spans.append(Span(number, start, length, row))
            row += length
            places[number] = start + length
            if places[number] >= PROMPT + ANSWER:
                finished.append(Finished(names[number], "length", PROMPT, places[number], places[number] * len(SITES)))
                names[number], places[number], fresh[number] = f"cmpl-{begun:04d}", PROMPT, True
                begun += 1
        first = int(rng.integers(0, pool.shape[1] - row)) if row < pool.shape[1] else 0
        rows = np.resize(pool[:, first : first + row], (len(SITES), row, HIDDEN))
        header = FrameHeader(
            engine="engine-1",
            boot="boot",
            rank=Rank(0, 0, 0),
            seq=step,
            step=step,
            time_ns=time.time_ns(),
            dtype="bfloat16",
            hidden_size=HIDDEN,
            requests=tuple(parts),
            blocks=(Block(SITES, row, tuple(spans)),),
            finished=tuple(finished),
            step_tokens=row,
            step_requests=REQUESTS,
        )
        frame = Frame.seal(header, np.ascontiguousarray(rows).view(np.uint8))
        yield frame.header, frame.payload


def generate(address: str, tokens_per_s: float, seconds: float, report: Any) -> None:
    """Send frames at a pace; report the tokens that were sent and the seconds that it took."""
    model = ModelInfo("benchmark", len(SITES), HIDDEN, "bfloat16", SITES)
    link = WorkerLink(address, Hello("worker", "engine-1", "boot", Rank(0, 0, 0), model))
    link.start()
    link.wait_welcome(20)
    sent, begun = 0, time.monotonic()
    for header, payload in steps(7):
        link.send(msgspec.structs.replace(header, time_ns=time.time_ns()), payload)
        sent += header.step_tokens
        if (early := begun + sent / tokens_per_s - time.monotonic()) > 0:
            time.sleep(early)
        if time.monotonic() - begun > seconds:
            break
    report.send((sent, time.monotonic() - begun))
    link.close(5)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Run:
    """One run: a hub, with or without a dashboard and a page, under load."""

    def __init__(self, tokens_per_s: float, seconds: float, *, dashboard: bool, page: bool) -> None:
        self.figures: dict[str, float] = {}
        with tempfile.TemporaryDirectory(prefix="cf") as directory:
            Path(directory).chmod(0o700)
            probes = Path(directory) / "probes.safetensors"
            rng = np.random.default_rng(3)
            names = tuple(f"probe{number}" for number in range(PROBES))
            Probe.make(SITES[9], rng.normal(0, 0.02, (PROBES, HIDDEN)), names=names, threshold=0.5).save(probes)
            counting = Counting()
            made = [ConfiguredConsumer.of(counting)]
            shown = Dashboard(DashboardConfig(port=0, probes=(str(probes),)))
            if dashboard:
                made.append(ConfiguredConsumer.of(shown))
            with Hub(f"ipc://{directory}/hub.sock", made) as hub:
                ours, theirs = multiprocessing.get_context("spawn").Pipe()
                sending = multiprocessing.get_context("spawn").Process(
                    target=generate, args=(hub.address, tokens_per_s, seconds, theirs)
                )
                before = {name: cpu_s(pid) for name, pid in self._processes(shown, dashboard).items()}
                with following(shown) if page else contextlib.nullcontext() as follower:
                    sending.start()
                    if follower is not None and seconds > 120:
                        self.figures["heap slope, MB/min"] = follower.slope(seconds - 30)
                    sent, took = ours.recv()
                    if follower is not None:
                        self.figures |= follower.figures()
                after = {name: cpu_s(pid) for name, pid in self._processes(shown, dashboard).items()}
                sending.join()
                deadline = time.monotonic() + 10
                while counting.rows < sent * len(SITES) and time.monotonic() < deadline:
                    time.sleep(0.05)
                self.figures["tokens/s"] = sent / took
                self.figures["rows lost of the other consumer"] = sent * len(SITES) - counting.rows
                for name, at_end in after.items():
                    self.figures[f"CPU of the {name}, % of a core"] = 100 * (at_end - before[name]) / took
                if dashboard:
                    status = hub.status()["consumers"]["dashboard"]
                    self.figures["rows skipped, %"] = 100 * sum(status["dropped_rows"].values()) / (sent * len(SITES))

    def _processes(self, shown: Dashboard, dashboard: bool) -> dict[str, int]:
        processes = {"hub": os.getpid()}
        if dashboard:
            assert shown._process is not None  # noqa: SLF001
            processes["page's process"] = shown._process.pid  # noqa: SLF001
        return processes


class Follower:
    """A page in Chromium that is measured from within."""

    def __init__(self, page: Any, session: Any) -> None:
        self._page = page
        self._session = session
        before = self._metrics()
        page.wait_for_timeout(_IDLE_MS)
        after = self._metrics()
        # Seconds of work in each second of a page that gets nothing.
        self._idle = {name: (after[name] - before[name]) / (_IDLE_MS / 1000) for name in _WORK}
        self._begun = time.monotonic()
        self._before = self._metrics()

    def _metrics(self) -> dict[str, float]:
        return {m["name"]: m["value"] for m in self._session.send("Performance.getMetrics")["metrics"]}

    def figures(self) -> dict[str, float]:
        """Return what was measured since the page was opened."""
        now, seconds = self._metrics(), time.monotonic() - self._begun
        seen = json.loads(self._page.evaluate("JSON.stringify(window.__seen)"))
        frames = sorted(seen["frames"])
        lags = seen["lags"][2:] or [0.0]
        updates = max(1, seen["updates"])
        work = {
            name: max(0.0, 1000 * (now[name] - self._before[name] - seconds * self._idle[name]) / updates)
            for name in _WORK
        }
        return {
            "lag of the rows, median s": statistics.median(lags),
            "lag of the rows, worst s": max(lags),
            "messages/s": seen["messages"] / seconds,
            "KiB/s": seen["bytes"] / 1024 / seconds,
            "frame, median ms": frames[len(frames) // 2],
            "frame, p95 ms": frames[int(len(frames) * 0.95)],
            "script, ms an update": work["ScriptDuration"],
            "style and layout, ms an update": work["RecalcStyleDuration"] + work["LayoutDuration"],
            "main thread with painting, ms an update": work["TaskDuration"],
            "heap, MB": now["JSHeapUsedSize"] / 1e6,
        }

    def slope(self, seconds: float) -> float:
        """Return the growth of the page's heap in MB a minute, over the second half of so many seconds."""
        heaps = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._page.wait_for_timeout(60_000)
            self._session.send("HeapProfiler.collectGarbage")
            heaps.append(self._metrics()["JSHeapUsedSize"] / 1e6)
            print(f"  minute {len(heaps)}: {heaps[-1]:.2f} MB", flush=True)
        later = heaps[len(heaps) // 2 :]
        return float(np.polyfit(range(len(later)), later, 1)[0])


_IDLE_MS = 3000
# Of the metrics of Chromium: the time that scripts, style, layout, and all tasks of the main thread took.
_WORK = ("ScriptDuration", "RecalcStyleDuration", "LayoutDuration", "TaskDuration")
_WATCH = """
window.__seen = { frames: [], lags: [], messages: 0, bytes: 0, updates: 0 };
(() => {
  let last = 0;
  const frame = (now) => {
    if (last) window.__seen.frames.push(now - last);
    if (window.__seen.frames.length > 20000) window.__seen.frames.splice(0, 10000);
    last = now;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
  const Plain = window.WebSocket;
  window.WebSocket = class extends Plain {
    constructor(...given) {
      super(...given);
      this.addEventListener("message", (event) => {
        const length = new DataView(event.data).getUint32(0, true);
        const head = JSON.parse(new TextDecoder().decode(new Uint8Array(event.data, 4, length)));
        window.__seen.messages += 1;
        window.__seen.bytes += event.data.byteLength;
        if (head.seq) window.__seen.updates += 1;
        if (head.heartbeat && head.heartbeat.lag_s !== null) window.__seen.lags.push(head.heartbeat.lag_s);
      });
    }
  };
})();
"""


@contextlib.contextmanager
def following(shown: Dashboard) -> Iterator[Follower]:
    """Open the page in Chromium and follow the newest request."""
    import shutil

    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.add_init_script(_WATCH)
        page.goto(shown.link)
        session = page.context.new_cdp_session(page)
        # The time of the thread, not of the clock: other programs on the same cores do not count.
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.wait_for_timeout(1000)
        yield Follower(page, session)
        browser.close()


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--tokens-per-s", type=float, default=10_000)
    parser.add_argument("--minutes", type=float)
    asked = parser.parse_args()
    kinds = {
        "no dashboard": {"dashboard": False, "page": False},
        "no page": {"dashboard": True, "page": False},
        "one page": {"dashboard": True, "page": True},
    }
    if asked.minutes is not None:
        asked.seconds, kinds = 60 * asked.minutes, {"one page": kinds["one page"]}
    for name, kind in kinds.items():
        figures = Run(asked.tokens_per_s, asked.seconds, **kind).figures
        print(f"{name}:")
        for figure, value in figures.items():
            print(f"  {figure:40} {value:10.2f}")


if __name__ == "__main__":
    main()
