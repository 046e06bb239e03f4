"""An environment for each peer, in `build/versus/`, with exactly its file in `requirements/`.

An environment holds the peer and what capflow's own environment lacks. The rest, vLLM, PyTorch and Transformers among
it, it shares with that one: the versions are within what the peer asks for. It is keyed on the hash of its file, as
`.venv` is on that of the lock.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 600


class NotMadeError(Exception):
    """An environment could not be made; the message is one line."""


def python_of(name: str, root: Path) -> Path:
    """Return the Python of a peer's environment, which is made if it is not there; that of this process for no name.

    root: the directory of all environments.

    Raises NotMadeError.
    """
    if not name:
        return Path(sys.executable)
    requirements = HERE / "requirements" / f"{name}.txt"
    directory = root / name
    python = directory / "bin" / "python"
    stamp = directory / f"made-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]}"
    if stamp.exists():
        return python
    print(f"{name}: making {directory}", file=sys.stderr, flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(directory)])
    (packages,) = directory.glob("lib/python3*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # vllm-lens asks for Python 3.12, and runs on 3.11.
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    _run([*pip, "--ignore-requires-python", "--requirement", str(requirements)])
    stamp.touch()
    return python


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as e:
        raise NotMadeError(f"pip took more than {LIMIT_S} s") from e
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines()]
        causes = [line for mark in ("fatal:", "error:", "rror") for line in lines if mark in line.lower()]
        raise NotMadeError(causes[0].removeprefix("ERROR: ") if causes else f"pip ended with {done.returncode}")
