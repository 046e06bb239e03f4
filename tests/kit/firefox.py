"""Firefox for tests of the page: started without a window and led by WebDriver BiDi, which it speaks itself.

Neither a driver nor a build of Playwright's is needed. https://www.w3.org/TR/webdriver-bidi/
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from websockets.sync.client import connect

from tests.kit.waiting import eventually

NAMES = ("firefox-esr", "firefox")
LIMIT_S = 60.0


def firefox_path():
    """Return the path of Firefox; None if it is not there."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class FirefoxPage:
    """A window of Firefox.

    complaints: errors and warnings of its console.
    """

    def __init__(self, socket):
        self._socket = socket
        self._ids = itertools.count(1)
        # Calls whose results nobody waits for.
        self._unread = set()
        self._cut = ""
        self.complaints = []
        self.call("session.new", capabilities={})
        self.call("session.subscribe", events=["log.entryAdded", "network.beforeRequestSent"])
        self.context = self.call("browsingContext.getTree")["contexts"][0]["context"]

    def call(self, method, **parameters):
        """Call a method of the protocol; return its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=LIMIT_S))
            if message["type"] == "event":
                self._take(message["params"])
            elif message["id"] in self._unread:
                self._unread.remove(message["id"])
            elif message["id"] == number:
                assert message["type"] == "success", message
                return message["result"]

    def _take(self, entry):
        if entry.get("isBlocked"):
            number = next(self._ids)
            self._unread.add(number)
            request = {"request": entry["request"]["request"]}
            self._socket.send(json.dumps({"id": number, "method": "network.failRequest", "params": request}))
        elif entry.get("level") in ("error", "warn"):
            self.complaints.append(f"{entry.get('text')} {entry.get('stackTrace')}")

    def cut(self, path):
        """Let no file at a path be loaded, until `mend`."""
        pattern = {"type": "pattern", "pathname": path}
        self._cut = self.call("network.addIntercept", phases=["beforeRequestSent"], urlPatterns=[pattern])["intercept"]

    def mend(self):
        """Let every file be loaded again."""
        self.call("network.removeIntercept", intercept=self._cut)

    def size(self, width, height):
        self.call("browsingContext.setViewport", context=self.context, viewport={"width": width, "height": height})

    def go(self, address):
        self.call("browsingContext.navigate", context=self.context, url=address, wait="complete")

    def evaluate(self, script):
        """Return the value of an expression of JavaScript, as JSON has it."""
        result = self.call(
            "script.evaluate",
            expression=f"(async () => JSON.stringify(await ({script}) ?? null))()",
            target={"context": self.context},
            awaitPromise=True,
        )
        assert result["type"] == "success", result
        return json.loads(result["result"]["value"])

    def until(self, script, limit_s=20.0):
        """Wait until an expression is true."""
        eventually(lambda: self.evaluate(f"!!({script})"), limit_s)

    def press(self, *keys):
        """Press keys together, and let them go."""
        actions = [{"type": "keyDown", "value": key} for key in keys]
        actions += [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self.act({"type": "key", "id": "keys", "actions": actions})

    def click(self, selector):
        """Click the middle of the first line of an element."""
        x, y = self.evaluate(
            f"""(() => {{ const part = document.querySelector({json.dumps(selector)});
            part.scrollIntoView({{ block: "center" }}); const {{ x, y, width, height }} = part.getClientRects()[0];
            return [Math.round(x + width / 2), Math.round(y + height / 2)]; }})()"""
        )
        move = {"type": "pointerMove", "x": x, "y": y}
        presses = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self.act({"type": "pointer", "id": "mouse", "actions": [move, *presses]})

    def act(self, source):
        self.call("input.performActions", context=self.context, actions=[source])

    def picture(self):
        """Return what it shows, as a PNG."""
        return base64.b64decode(self.call("browsingContext.captureScreenshot", context=self.context)["data"])


@contextlib.contextmanager
def firefox(path, *, reduced_motion=False):
    """Run Firefox with a profile of its own; yield its window."""
    with tempfile.TemporaryDirectory(prefix="cf") as profile:
        settings = {"ui.prefersReducedMotion": int(reduced_motion), "remote.active-protocols": 1}
        lines = [f'user_pref("{name}", {json.dumps(value)});' for name, value in settings.items()]
        Path(profile, "user.js").write_text("\n".join(lines), encoding="utf-8")
        command = [path, "--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "0"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                for line in process.stderr:
                    if match := re.search(r"WebDriver BiDi listening on (ws://\S+)", line):
                        break
                else:
                    raise AssertionError("Firefox ended without a port")
                with connect(f"{match[1]}/session", max_size=None, open_timeout=LIMIT_S) as socket:
                    yield FirefoxPage(socket)
            finally:
                process.kill()
