"""A process with the consumer under test that kills itself in the middle of its work.

    python -m capflow.testing.killed MODULE CLASS OPTIONS MODEL

It finishes request r1, handles the prompt of r2, prints the number of the last frame and the status of r1, and kills
itself.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from capflow.capture.model import ModelInfo
from capflow.testing.trial import Subject, trial

_CHILD_S = 120.0


def killed(subject: Subject, directory: Path) -> dict[str, Any]:
    """Run such a process in a directory and return its report. Raises AssertionError if it did not end by SIGKILL."""
    module, name = subject.consumer.__module__, subject.consumer.__qualname__
    defined = getattr(sys.modules.get(module), name, None)
    assert defined is subject.consumer, f"{module}.{name} cannot be imported: define it at the top of a module"
    words = [module, name, json.dumps(dict(subject.options)), msgspec.json.encode(subject.model).decode()]
    child = subprocess.run(
        [sys.executable, "-m", "capflow.testing.killed", *words],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=_CHILD_S,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, f"the consumer failed in a process of its own: {child.stderr[-2000:]}"
    report: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return report


def main(module: str, name: str, options: str, model: str) -> None:
    """Run the consumer, and end by SIGKILL."""
    consumer = getattr(importlib.import_module(module), name)
    subject = Subject(consumer, json.loads(options), msgspec.json.decode(model, type=ModelInfo))
    with trial(subject, Path.cwd()) as run:
        engine = run.engine()
        for start, length in ((0, 4), (4, 1), (5, 1)):
            engine.step([("r1", 4, start, length)], texts=True)
        engine.finish("r1")
        status = run.result("r1").status
        engine.step([("r2", 4, 0, 4)], texts=True)
        engine.settle()
        print(json.dumps({"seq": engine.worker.seq, "status": status}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
