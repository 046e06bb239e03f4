"""Steering from a page with a real engine: what is steered, what takes it back, and who need not live for that."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from capflow import Consumer
from capflow.capture.site import Site
from capflow.probes.probe import save_vector
from capflow_dashboard import limits
from tests.kit.dashboards import Pageless, dashboard
from tests.kit.engines import GREEDY, engine, environment, prompts, vector
from tests.kit.hubs import EVERYTHING, address, configured, running_hub
from tests.kit.waiting import eventually

__all__ = ["address"]

pytestmark = pytest.mark.engine

SITE = Site(1, "post_block")


class Keeper(Consumer):
    """Keeps the rows, and of each step which positions were steered and when."""

    name = "keeper"

    def __init__(self):
        super().__init__(None)
        # By request and position.
        self.rows = {}
        # (step, time in s, request, whether any position was steered), for each request of each step.
        self.steps = []
        self.steered = {}

    def spec(self):
        return EVERYTHING

    def on_frame(self, frame):
        header = frame.header
        for request in header.requests:
            self.steps.append((header.step, header.time_ns / 1e9, request.id, bool(request.steered)))
        for chunk in frame.chunks():
            mask = chunk.steered
            for at in range(chunk.rows.shape[1]):
                self.rows[chunk.request.id, chunk.start + at] = chunk.rows[:, at].tobytes()
                self.steered[chunk.request.id, chunk.start + at] = bool(mask[at])

    def of(self, request):
        """Return the rows and the steered positions of a request."""
        rows = {position: row for (name, position), row in self.rows.items() if name == request}
        return rows, {position for (name, position), mask in self.steered.items() if name == request and mask}


@pytest.fixture
def calm(tmp_path):
    path = tmp_path / "calm.safetensors"
    save_vector(path, SITE, vector(5))
    return f"calm={path}"


@contextlib.contextmanager
def generating(llm, names, tokens):
    """Answer prompts in a thread; the block has its outputs once it is over."""
    import capflow

    result = SimpleNamespace(outputs=None)

    def run():
        params = [capflow.sampling_params(id=name, max_tokens=tokens, **GREEDY) for name in names]
        asked = prompts([8] * len(names))
        result.outputs = llm.generate(asked, params, use_tqdm=False)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield result
    finally:
        thread.join(300)


def keys_of(page, names):
    """Wait until a page has the requests; return their keys."""
    page.until(lambda p: {r["id"] for r in p.requests.values()} >= set(names), 60)
    return {r["id"]: key for key, r in page.requests.items()}


def test_a_page_steers_requests_and_the_kill_switch_stops_all_within_a_step(tiny, calm, address):
    keeper = Keeper()
    with (
        dashboard(allow_steering=True, vectors=(calm,)) as shown,
        running_hub(address, configured(shown, "block"), keeper),
        engine(tiny, hub=address, max_model_len=512, max_num_seqs=64, max_num_batched_tokens=1024) as llm,
        Pageless(shown) as page,
    ):
        page.send(alive="abcd")
        with generating(llm, ["plain"], 200):
            pass
        with generating(llm, ["plain2"], 200):
            key = keys_of(page, ["plain2"])["plain2"]
            page.subscribe(request=key)
            page.send(act={"id": 1, "kind": "steer", "request": key, "name": "calm", "ratio": 0.5})
            page.until(lambda p: p.acks, 60)
        (ack,) = page.acks
        assert ack["state"] == "applied", ack
        eventually(lambda: len(keeper.of("plain2")[0]) == len(keeper.of("plain")[0]))
        plain, nothing = keeper.of("plain")
        rows, steered = keeper.of("plain2")
        assert nothing == set()
        assert steered == set(range(ack["position"], max(rows) + 1))
        # The rows of layers behind the site differ exactly where the page shows that it was steered.
        assert {position for position in rows if rows[position] != plain[position]} == steered
        page.until(lambda p: p.steered == steered, 30)
        assert page.events[0]["label"] == "calm +0.5 by page abcd #1"

        names = [f"r{number}" for number in range(64)]
        with generating(llm, names, 400):
            keys_of(page, names)
            page.send(alive="abcd")
            page.send(act={"id": 2, "kind": "steer", "name": "calm", "ratio": 0.5})
            eventually(lambda: len({name for *_, name, mask in list(keeper.steps) if mask}) == 65, 60)
            page.send(act={"id": 3, "kind": "kill"})
            page.until(lambda p: any(ack["id"] == 3 for ack in p.acks), 60)
            assert page.steering == {"frozen": True, "holds": []}
        (killed,) = (ack for ack in page.acks if ack["id"] == 3)
        assert killed["state"] == "applied", killed
        later = [
            (step, name) for step, _, name, mask in keeper.steps if mask and name != "plain2" and step > killed["step"]
        ]
        assert later == []
        went_on = {name for step, _, name, _ in keeper.steps if step > killed["step"]}
        assert went_on >= set(names)
        page.send(act={"id": 4, "kind": "release"})
        page.until(lambda p: not p.steering["frozen"], 60)


@pytest.mark.long
def test_a_lease_ends_when_the_page_and_the_hub_are_killed(tiny, calm, address, tmp_path):
    command = [sys.executable, "-m", "capflow", "run", "--address", address]
    command += ["--consumer", f"dashboard:port=0,allow_steering=true,vectors={calm}"]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as hub,
        environment(VLLM_ALLOW_LONG_MAX_MODEL_LEN="1"),
        engine(tiny, hub=address, max_model_len=8192, kv_cache_memory_bytes=256 << 20) as llm,
    ):
        try:
            lines = []
            while not (path := re.search(r"the link is in (\S+)", "".join(lines))):
                lines.append(hub.stderr.readline())
                assert lines[-1], lines
            link = re.search(r'href="([^"]+)"', Path(path[1]).read_text())[1]
            shown = SimpleNamespace(link=link, address=link.partition("#")[0])
            with generating(llm, ["r"], 6000):
                with Pageless(shown) as page:
                    key = keys_of(page, ["r"])["r"]
                    page.send(alive="abcd")
                    page.send(act={"id": 1, "kind": "steer", "request": key, "name": "calm", "ratio": 0.5})
                    page.until(lambda p: p.acks, 60)
                    assert page.acks[0]["state"] == "applied"
                    page.until(lambda p: p.requests[key]["steered"] > 10, 60)
                    killed_s = time.time()
                    os.kill(hub.pid, signal.SIGKILL)
                keeper = Keeper()
                with running_hub(address, keeper):
                    eventually(lambda: any(mask for *_, mask in list(keeper.steps)), 60)
                    eventually(lambda: list(keeper.steps)[-1][1] > killed_s + limits.LEASE_S + 2, 60)
                    times = [time_s for _, time_s, _, mask in list(keeper.steps) if mask]
                    assert killed_s < max(times) < killed_s + limits.LEASE_S + 0.5
        finally:
            hub.kill()
