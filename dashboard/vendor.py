"""Renew the libraries that the page loads: `python dashboard/vendor.py`, for maintainers.

npm fetches the versions that package-lock.json pins and checks their integrity. This script copies the needed files to
`web/vendor/` and writes their SHA-256 to `VENDORED.json`, which a test compares with the files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENDOR = HERE / "capflow_dashboard" / "web" / "vendor"
FILES = {
    "lit-html": (
        "LICENSE",
        "lit-html.js",
        "directive.js",
        "directive-helpers.js",
        "directives/repeat.js",
    ),
}


def main() -> None:
    """Fetch, copy and hash the files."""
    subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=HERE, check=True)  # noqa: S607
    locked = json.loads((HERE / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    shutil.rmtree(VENDOR, ignore_errors=True)
    vendored = {}
    for package, names in FILES.items():
        hashes = {}
        for name in names:
            content = (HERE / "node_modules" / package / name).read_bytes()
            target = VENDOR / package / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            hashes[name] = hashlib.sha256(content).hexdigest()
        entry = locked[f"node_modules/{package}"]
        vendored[package] = {"version": entry["version"], "integrity": entry["integrity"], "sha256": hashes}
    text = json.dumps(vendored, indent=2) + "\n"
    (VENDOR / "VENDORED.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
