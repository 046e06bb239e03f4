"""The wheel and the source distribution, built from the checkout as a release would be."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(directory: Path) -> Path:
    """Build the wheel into an empty directory and return it."""
    return _built("wheel", "*.whl", directory)


def build_sdist(directory: Path) -> Path:
    """Build the source distribution into an empty directory and return it."""
    return _built("sdist", "*.tar.gz", directory)


def _built(kind: str, pattern: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = directory.glob(pattern)
    return built
