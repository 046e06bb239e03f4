"""The files of the page: its weight, what it takes from elsewhere, and the tests of its pure modules."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

DASHBOARD = Path(__file__).parents[2] / "dashboard"
WEB = DASHBOARD / "capflow_dashboard" / "web"
OWN = sorted(path for path in WEB.iterdir() if path.suffix in (".js", ".css", ".html"))
# What the first view loads as it is sent, which is compressed, and as it is; then with the kill switch, and everything.
SENT_MAX = 90_000
WEIGHT_MAX = 250_000
STEERING_WEIGHT_MAX = 290_000
WHOLE_WEIGHT_MAX = 440_000
RIGHT = 'data-right="steer"'
# The names of files that a file loads.
LOADS = {
    ".html": re.compile(r'(?:href|src)="([\w.]+)"'),
    ".js": re.compile(r'\b(?:import|from)\s*"(\.[^"]+)"'),
}


def test_vendored_files_are_those_that_were_checked():
    vendored = json.loads((WEB / "vendor" / "VENDORED.json").read_text(encoding="utf-8"))
    listed = {
        f"{package}/{name}": digest for package, entry in vendored.items() for name, digest in entry["sha256"].items()
    }
    files = [path for path in (WEB / "vendor").rglob("*") if path.is_file() and path.name != "VENDORED.json"]
    present = {str(path.relative_to(WEB / "vendor")): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert present == listed
    assert all(any(name == f"{package}/LICENSE" for name in present) for package in vendored)


def test_vendored_versions_are_those_that_npm_pins():
    vendored = json.loads((WEB / "vendor" / "VENDORED.json").read_text(encoding="utf-8"))
    locked = json.loads((DASHBOARD / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    wanted = json.loads((DASHBOARD / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert {package: entry["version"] for package, entry in vendored.items()} == wanted
    for package, entry in vendored.items():
        assert entry["integrity"] == locked[f"node_modules/{package}"]["integrity"]


def first_loaded(*, steers):
    """Return the files that the browser loads before anything is shown: without those of `import(…)`."""
    waiting, loaded = [WEB / "index.html"], set()
    while waiting:
        path = waiting.pop()
        if path not in loaded and path.suffix in LOADS:
            lines = path.read_text(encoding="utf-8").splitlines()
            names = LOADS[path.suffix].findall("\n".join(line for line in lines if steers or RIGHT not in line))
            waiting += [(path.parent / name).resolve() for name in names]
        loaded.add(path)
    return loaded


def test_the_page_is_light():
    every = {path for path in WEB.rglob("*") if path.suffix in (".js", ".css", ".html", ".svg")}
    first, steering = first_loaded(steers=False), first_loaded(steers=True)
    names = {path.name for path in first}
    assert first < steering < every
    assert {"app.js", "views.css", "lit-html.js", "repeat.js", "icon.svg"} <= names
    assert {path.name for path in steering - first} >= {"controls.js", "killswitch.js", "desk.js", "kill.css"}
    assert not {"steering.js", "steerpanel.js", "steer.css", "export.js", "health.js"} & {one.name for one in steering}
    assert sum(len(gzip.compress(path.read_bytes())) for path in first) <= SENT_MAX
    assert sum(path.stat().st_size for path in first) <= WEIGHT_MAX
    assert sum(path.stat().st_size for path in steering) <= STEERING_WEIGHT_MAX
    assert sum(path.stat().st_size for path in every) <= WHOLE_WEIGHT_MAX


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_each_file_is_checked_says_what_it_owns_and_writes_no_markup(path):
    text = path.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 120
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|unsafe|eval\(| style=\W| on\w+=\"", text
    )
    if path.suffix == ".js":
        assert re.match(r"// @ts-check\n// [A-Z][a-z]+: ", text)


@pytest.mark.browser  # needs what `make system` installs
def test_the_pure_modules_do_what_their_tests_say():
    node = shutil.which("node")
    if node is None:
        pytest.fail("node is not there and the page's modules cannot be tested: run `make system`")
    tests = sorted(str(path) for path in Path(__file__).with_name("web").glob("*.test.js"))
    ran = subprocess.run([node, "--test", *tests], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_help_names_every_key():
    keys = re.search(r"const KEYS = \{\n(.*?)\n\};", (WEB / "app.js").read_text(encoding="utf-8"), re.DOTALL)[1]
    handled = {quoted or plain for quoted, plain in re.findall(r'^  (?:"(.+?)"|(\w+)):', keys, re.MULTILINE)}
    sheet = re.search(r"const KEYS = \[\n(.*?)\n\];", (WEB / "help.js").read_text(encoding="utf-8"), re.DOTALL)[1]
    named = {key for line in re.findall(r"\[\[(.+?)\], ", sheet) for key in re.findall(r'"(.+?)"', line)}
    arrows = {"←": "ArrowLeft", "→": "ArrowRight", "↑": "ArrowUp", "↓": "ArrowDown", "\N{MINUS SIGN}": "-"}
    # `=` is `+` without Shift; the kill switch and Escape are handled elsewhere.
    assert {arrows.get(key, key) for key in named} - {"Shift", "K", "Esc"} == handled - {"="}
