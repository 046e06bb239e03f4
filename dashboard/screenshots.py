"""Takes the pictures of docs/dashboard.md: `python dashboard/screenshots.py`.

It serves the demo model with a dashboard, sends it the prompts of `make demo` and others that a vector steers, opens
the views in Chromium, and writes docs/images/dashboard_*.png. It takes some minutes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
CAPFLOW = [sys.executable, "-m", "capflow"]
WIDTH, HEIGHT = 1280, 800
START_S = 300
# How many prompts run at once.
TOGETHER = 8
ALERTS = [
    "code: share(code, generated) > 20% over 1h, clear < 10%",
    "worst: max(code) > 2 over 1h",
    "lost: lost > 0 over 5m",
]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def prompts(name: str) -> list[dict[str, Any]]:
    """Return the prompts of an example."""
    return [json.loads(line) for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines()]


def make_vector(path: Path) -> None:
    """Make a vector from pairs of glad and sad prompts."""
    pairs = ["--pairs", str(EXAMPLES / "glad_pairs.jsonl"), "--layers", "9", "--out", str(path)]
    subprocess.run([*CAPFLOW, "vectors", "fit", "--model", "demo", "--backend", "transformers", *pairs], check=True)


@contextlib.contextmanager
def served(home: Path) -> Iterator[tuple[str, str]]:
    """Yield the address of a server of the demo model, and the link of its dashboard."""
    server, port, token = free_port(), free_port(), secrets.token_urlsafe(24)
    address = f"http://127.0.0.1:{server}"
    make_vector(home / "glad.safetensors")
    (home / "token").touch(mode=0o600)
    (home / "token").write_text(token, encoding="utf-8")
    options = {
        "port": port,
        "token_file": str(home / "token"),
        "probes": [str(EXAMPLES / "code.safetensors")],
        "alerts": ALERTS,
        "allow_steering": True,
        "vectors": [f"glad={home / 'glad.safetensors'}"],
        "server": address,
    }
    lines = ["[[consumer]]", 'name = "dashboard"', *(f"{name} = {json.dumps(it)}" for name, it in options.items())]
    (home / "consumers.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = ["serve", "demo", "--host", "127.0.0.1", "--port", str(server), "--enforce-eager"]
    consumers = ["--consumer-config", str(home / "consumers.toml")]
    with subprocess.Popen([*CAPFLOW, *command, *consumers]) as process:
        try:
            wait(f"{address}/health", process)
            yield address, f"http://127.0.0.1:{port}/#token={token}"
        finally:
            process.send_signal(signal.SIGINT)


def wait(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url).raise_for_status()
            return
        time.sleep(1)
    raise SystemExit("the server did not start")


def complete(server: httpx.Client, model: str, asked: dict[str, Any]) -> None:
    """Have a prompt answered."""
    body = {"model": model, "capture_id": asked["id"], "prompt": asked["prompt"], "temperature": 0}
    body["max_tokens"] = asked.get("max_tokens", 48)
    server.post("/v1/completions", json=body).raise_for_status()


def complete_all(address: str) -> None:
    """Have all prompts answered, several at once."""
    with httpx.Client(base_url=address, timeout=300) as server, concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        model = server.get("/v1/models").json()["data"][0]["id"]
        asked = [*prompts("prompts.jsonl"), *prompts("glad_prompts.jsonl")[:6]]
        list(pool.map(functools.partial(complete, server, model), asked))


def shoot(page: Page, name: str) -> None:
    """Write a picture of a page once it has drawn everything."""
    page.wait_for_timeout(1500)
    page.screenshot(path=str(ROOT / "docs" / "images" / f"dashboard_{name}.png"))


def choose(page: Page, request: str) -> None:
    """Open a request."""
    # The list draws only the rows in view.
    page.locator("#filter").fill(f"id:{request}")
    page.locator("#requests").get_by_text(request).first.click()
    page.locator("#filter").fill("")


def take(page: Page) -> None:
    """Take the pictures."""
    choose(page, "code-review")
    page.locator(".prompt .t").nth(12).click()
    shoot(page, "request")
    page.get_by_role("button", name="Table").click()
    shoot(page, "list")
    page.locator(".tab", has_text="Alerts").click()
    shoot(page, "alerts")
    page.locator(".tab", has_text="Requests").click()
    choose(page, "held-out-1")
    page.get_by_role("button", name="Run again, steered").click()
    page.locator("#again-ratio").fill("30")
    page.locator("#again-tokens").fill("32")
    page.locator("#again-run").click()
    expect(page.locator("#again-compare")).to_be_visible(timeout=60_000)
    shoot(page, "again")
    page.locator("#again-compare").click()
    expect(page.locator("body")).to_have_attribute("data-view", "compare")
    shoot(page, "compare")


def main() -> None:
    """Serve the model and take the pictures."""
    with tempfile.TemporaryDirectory() as home, served(Path(home)) as (address, link), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(link)
        expect(page.locator("#link")).to_have_text(re.compile("live|stale"))
        complete_all(address)
        take(page)
        browser.close()


if __name__ == "__main__":
    main()
