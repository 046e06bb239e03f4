"""Takes the pictures of docs/dashboard.md: `python dashboard/screenshots.py RECORDING`.

It shows a recording in the dashboard, opens its views in Chromium, and writes docs/images/dashboard_*.png.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parent.parent
WIDTH, HEIGHT = 1280, 800


def link_of(process: subprocess.Popen[str]) -> str:
    """Return the link that a starting dashboard writes into its file."""
    assert process.stderr is not None
    for line in process.stderr:
        if (path := re.search(r"the link is in (\S+)", line)) is not None:
            link = re.search(r'href="([^"]+)"', Path(path[1]).read_text(encoding="utf-8"))
            assert link is not None
            return link[1]
    raise SystemExit("the dashboard ended without a link")


def shoot(page: Page, name: str) -> None:
    """Write a picture of a page once it has drawn everything."""
    page.wait_for_timeout(1500)
    page.screenshot(path=str(ROOT / "docs" / "images" / f"dashboard_{name}.png"))


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording")
    parser.add_argument("--probe", default=str(ROOT / "examples" / "code.safetensors"))
    parser.add_argument("--request", default="code-review")
    asked = parser.parse_args()
    command = [sys.executable, "-m", "capflow", "dashboard", asked.recording, "--port", "0", "--probe", asked.probe]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.goto(link_of(process))
            # The list draws only the rows in view.
            page.locator("#filter").fill(f"id:{asked.request}")
            page.locator("#requests").get_by_text(asked.request).first.click()
            page.locator("#filter").fill("")
            page.locator(".prompt .t").nth(12).click()
            shoot(page, "request")
            page.get_by_role("button", name="Table").click()
            shoot(page, "list")
            browser.close()
        finally:
            process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
