"""The program of `capflow vectors fit`. Its one argument is a `FitJob` as JSON."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from capflow.capture.site import HOOK_DEFAULT
from capflow.capture.spec import CaptureSpec, layers_of, read_layers
from capflow_models.backends import Backend, layer_count, open_model
from capflow_models.jobs.ending import run_program
from capflow_models.model import Prompt
from capflow_models.vectors.file import check_out, origin_of, save_vectors
from capflow_models.vectors.fit import Method, fit_vectors
from capflow_models.vectors.sets import as_prompts, read_caa, read_pairs, read_reading
from capflow_models.vectors.sources import of_length


class FitJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `capflow vectors fit`. One of `pairs`, `caa` and `texts` is there.

    pairs, caa, texts: the file of pairs, of a set of CAA, or of texts for two templates.
    positive_template, negative_template: for `texts`.
    chat: whether prompts are messages in the model's chat template.
    out: the .safetensors file to write.
    layers: `all`, or layers as in a capture spec, such as `4-11`.
    length: that of each vector; 0 for the fitted one.
    arguments: further arguments of the back end.
    """

    model: str
    backend: Backend
    out: str
    pairs: str = ""
    caa: str = ""
    texts: str = ""
    positive_template: str = ""
    negative_template: str = ""
    chat: bool = False
    method: Method = "mean"
    layers: str = "all"
    hook: str = HOOK_DEFAULT
    length: float = 0.0
    arguments: dict[str, Any] = {}

    @property
    def source(self) -> str:
        """The file of contrasts."""
        return self.pairs or self.caa or self.texts


def fit(job: FitJob) -> None:
    """Fit vectors, write them, and print their lengths."""
    pairs = _pairs(job)
    check_out(job.out)
    spec = _checked_layers(job)
    origin = origin_of(job.source, model=job.model, method=job.method)
    arguments = dict(job.arguments)
    if job.backend == "vllm":
        arguments.setdefault("sites", [f"{job.hook}:*"])
    with open_model(job.backend, job.model, arguments) as model:
        sites = spec.resolve(model.info.sites, num_layers=model.info.num_layers, where="--layers")
        layers = sorted(site.layer for site in sites)
        vectors = fit_vectors(model, pairs, job.method, layers, hook=job.hook)
    if job.length:
        vectors = {layer: of_length(vector, job.length, f"layer {layer}") for layer, vector in vectors.items()}
    save_vectors(job.out, vectors, hook=job.hook, origin=origin)
    console = Console(highlight=False, stderr=True, markup=False)
    for layer, vector in vectors.items():
        console.print(f"{job.hook}:{layer}  length {float((vector**2).sum() ** 0.5):.3f}")
    console.print(f"capflow: {len(vectors)} vectors from {len(pairs)} pairs in {job.out}", soft_wrap=True)


def _checked_layers(job: FitJob) -> CaptureSpec:
    """Return the layers to fit; raise UsageError for one that the model's configuration does not have."""
    spec = CaptureSpec({job.hook: read_layers(job.layers, "--layers")})
    try:
        count = layer_count(job.model, job.arguments)
    except (OSError, ValueError):  # the back end says what is wrong with the model
        return spec
    layers_of(job.layers, count, "--layers")
    return spec


def _pairs(job: FitJob) -> list[tuple[Prompt, Prompt]]:
    if job.pairs:
        pairs = read_pairs(Path(job.pairs))
    elif job.caa:
        pairs = read_caa(Path(job.caa))
    else:
        pairs = read_reading(Path(job.texts), job.positive_template, job.negative_template)
    return as_prompts(pairs, job.model if job.chat else None)


def main() -> int:
    """Run the job; return the exit code."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return run_program(lambda: fit(msgspec.json.decode(sys.argv[1], type=FitJob)))


if __name__ == "__main__":
    sys.exit(main())
