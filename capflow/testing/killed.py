"""A process with the consumer under test that is killed in the middle of its work; `python -m capflow.testing.killed MODULE CLASS OPTIONS MODEL`.

It answers request r1, takes the prompt of r2, prints the last frame's number and what became of r1, and kills itself.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path

import msgspec

from capflow.message import ModelInfo
from capflow.testing.trial import Subject, trial


def main(module: str, name: str, options: str, model: str) -> None:
    """Run, and end by SIGKILL."""
    consumer = getattr(importlib.import_module(module), name)
    subject = Subject(consumer, json.loads(options), msgspec.json.decode(model, type=ModelInfo))
    with trial(subject, Path.cwd()) as run:
        engine = run.engine()
        engine.step([("r1", 4, 0, 4)], texts=True)
        engine.step([("r1", 4, 4, 1)], texts=True)
        engine.step([("r1", 4, 5, 1)], texts=True)
        engine.finish("r1")
        status = run.result("r1").status
        engine.step([("r2", 4, 0, 4)], texts=True)
        engine.settle()
        print(json.dumps({"seq": engine.worker.seq, "status": status}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
