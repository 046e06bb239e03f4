"""Commands that another program does: this process becomes it, so that signals and standard error are its own."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any, NoReturn

import msgspec

from capflow.errors import UsageError, explain


def become(module: str, job: dict[str, Any]) -> NoReturn:
    """Run a module, given a job as JSON, in the place of this process.

    Raises UsageError when the job's back end is not installed.
    """
    backend = job["backend"]
    for package in (backend, "torch"):
        if importlib.util.find_spec(package) is None:
            do = "pip install 'capflow[vllm]' (GPU) or 'capflow[cpu]' to run models"
            raise UsageError(explain(f"--backend {backend}: no package {package}", do=do))
    os.execv(sys.executable, [sys.executable, "-m", module, msgspec.json.encode(job).decode()])  # noqa: S606
