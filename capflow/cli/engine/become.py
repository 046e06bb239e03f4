"""Commands that another program does: this process becomes it, so that signals and standard error are its own."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import msgspec

from capflow.extras import require


def become(module: str, job: dict[str, Any]) -> NoReturn:
    """Run a module, given a job as JSON, in the place of this process.

    Raises UsageError when the job's back end is not installed. A job without one needs none.
    """
    if backend := job.get("backend"):
        require("vllm", f"--backend {backend}", backend, "torch")
    os.execv(sys.executable, [sys.executable, "-m", module, msgspec.json.encode(job).decode()])  # noqa: S606
