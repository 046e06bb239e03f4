"""The program of `capflow vectors fit`. Its one argument is a `FitJob` as JSON."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from capflow.capture.site import HOOK_DEFAULT
from capflow.capture.spec import CaptureSpec, read_layers
from capflow.errors import UsageError, explain
from capflow_models.backends import Backend, open_model
from capflow_models.jobs.ending import run_program
from capflow_models.lines import read_lines
from capflow_models.vectors.file import save_vectors
from capflow_models.vectors.fit import Method, Pair, fit_vectors


class FitJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `capflow vectors fit`.

    pairs: the file of pairs.
    out: the .safetensors file to write.
    layers: `all`, or layers as in a capture spec, such as `4-11`.
    arguments: further arguments of the back end.
    """

    model: str
    backend: Backend
    pairs: str
    out: str
    method: Method = "mean"
    layers: str = "all"
    hook: str = HOOK_DEFAULT
    arguments: dict[str, Any] = {}


def fit(job: FitJob) -> None:
    """Fit vectors, write them, and print their lengths."""
    pairs = [(pair.positive, pair.negative) for pair in read_lines(Path(job.pairs), "--pairs", Pair)]
    if Path(job.out).suffix != ".safetensors":
        raise UsageError(explain("--out", got=job.out, expected="a .safetensors file"))
    arguments = dict(job.arguments)
    if job.backend == "vllm":
        arguments.setdefault("sites", [f"{job.hook}:*"])
    with open_model(job.backend, job.model, arguments) as model:
        spec = CaptureSpec({job.hook: read_layers(job.layers, "--layers")})
        sites = spec.resolve(model.info.sites, num_layers=model.info.num_layers, where="--layers")
        layers = sorted(site.layer for site in sites)
        vectors = fit_vectors(model, pairs, job.method, layers, hook=job.hook)
    save_vectors(job.out, vectors, hook=job.hook)
    console = Console(highlight=False, stderr=True)
    for layer, vector in vectors.items():
        console.print(f"{job.hook}:{layer}  length {float((vector**2).sum() ** 0.5):.3f}")
    console.print(f"capflow: {len(vectors)} vectors from {len(pairs)} pairs in {job.out}", soft_wrap=True)


def main() -> int:
    """Run the job; return the exit code."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return run_program(lambda: fit(msgspec.json.decode(sys.argv[1], type=FitJob)))


if __name__ == "__main__":
    sys.exit(main())
