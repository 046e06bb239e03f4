"""The program of `capflow lens fit` and `capflow lens import`. Its one argument is a `LensJob` as JSON."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from capflow.capture.site import HOOK_DEFAULT, Site
from capflow.capture.spec import layers_of
from capflow.errors import UsageError, explain
from capflow.lenses.file import save_lens
from capflow.lenses.model_files import open_model
from capflow.lenses.origin import LensOrigin
from capflow.lenses.unembedding import Unembedding
from capflow.version import __version__
from capflow_models.backends import resolved_model
from capflow_models.jobs.ending import run_program
from capflow_models.runs.lines import read_texts

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""In which a model can be computed."""


class LensJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the commands.

    task: what to do.
    model: a directory, a name or `demo`; for `import-tuned`, empty for the model that the lens names.
    source: the file of texts, the directory or the file to import.
    out: the .safetensors file to write.
    layers: those to fit.
    tokens_max: how many tokens of each text are used.
    skipped: how many first positions of each text do not count.
    batch: how many rows of J one backward pass gives.
    dtype, device: in which the model is computed.
    other_weights: accept a lens of another unembedding.
    """

    task: Literal["fit-jacobian", "import-tuned", "import-jacobian"]
    model: str
    source: str
    out: str
    layers: str = "all"
    tokens_max: int = 128
    skipped: int = 16
    batch: int = 8
    dtype: str = "float32"
    device: str = ""
    other_weights: bool = False
    backend: str = "transformers"


def work(job: LensJob) -> None:
    """Do a job."""
    if Path(job.out).suffix != ".safetensors" or not Path(job.out).parent.is_dir():
        expected = "a .safetensors file in a directory that exists"
        raise UsageError(explain("--out", got=job.out, expected=expected))
    if job.task == "fit-jacobian":
        fit_jacobian(job)
    else:
        import_lens(job)


def import_lens(job: LensJob) -> None:
    """Convert a published lens."""
    from capflow_models.lenses.published import read_jacobian, read_tuned, read_tuned_config

    source, model = Path(job.source), job.model
    if job.task == "import-tuned":
        model = model or read_tuned_config(source).base_model_name_or_path
        unembedding = Unembedding(open_model(resolved_model(model)))
        origin, tensors = read_tuned(source, model, unembedding, other_weights=job.other_weights)
    else:
        unembedding = Unembedding(open_model(resolved_model(model)))
        origin, tensors = read_jacobian(source, model, unembedding)
    save_lens(job.out, msgspec.structs.replace(origin, made_by=f"capflow {__version__}"), tensors)
    layers = len({site for site, _ in tensors})
    print(f"capflow: {job.out}, a {origin.kind} lens of {model} with {layers} layers", file=sys.stderr)


def fit_jacobian(job: LensJob) -> None:
    """Fit a Jacobian lens."""
    content, texts = read_texts(Path(job.source))
    import torch
    import transformers

    from capflow_models.lenses.jacobian import DEFINITION, CountedPositions, JacobianFit
    from capflow_models.stream import layers_of

    if job.dtype not in DTYPES:
        raise UsageError(explain("--dtype", got=job.dtype, expected=f"one of {', '.join(DTYPES)}"))
    name = resolved_model(job.model)
    if Path(name).exists():
        # Before the weights load. Files of a name may not be here yet.
        _layers(job.layers, Unembedding(open_model(name)).num_layers)
    model, tokenizer = _load(name, job)
    unembedding = Unembedding(open_model(name))
    ids = [list(tokenizer(text).input_ids)[: job.tokens_max] for text in texts]
    kept = [each for each in ids if CountedPositions.of(len(each), job.skipped) is not None]
    if not kept:
        got = f"texts of at most {max(map(len, ids))} tokens"
        expected = f"one of {job.skipped + 2} tokens or more"
        raise UsageError(explain(job.source, got=got, expected=expected, do="lower --skip-first"))
    wanted = _layers(job.layers, unembedding.num_layers)
    fit = JacobianFit(
        model,
        layers_of(model, unembedding.num_layers, model.dtype),
        wanted,
        skipped=job.skipped,
        batch=job.batch,
    )
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(f"{len(kept)} texts", total=len(kept) * unembedding.hidden_size)
        for each in kept:
            fit.add(each, lambda rows: bar.advance(task, rows))
    origin = LensOrigin(
        "jacobian",
        num_layers=unembedding.num_layers,
        hidden_size=unembedding.hidden_size,
        vocabulary_size=unembedding.vocabulary_size,
        model=job.model,
        revision=str(getattr(model.config, "_commit_hash", None) or ""),
        fingerprint=unembedding.fingerprint,
        definition=DEFINITION,
        texts=fit.texts,
        tokens=fit.tokens,
        positions=fit.positions,
        texts_sha256=hashlib.sha256(content).hexdigest(),
        skipped=job.skipped,
        tokens_max=job.tokens_max,
        dtype=str(model.dtype).removeprefix("torch."),
        made_by=f"capflow {__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
    )
    matrices = fit.jacobians()
    save_lens(
        job.out,
        origin,
        {(Site(layer, HOOK_DEFAULT), "weight"): matrix.astype("float32") for layer, matrix in matrices.items()},
    )
    if len(kept) < len(ids):
        print(f"capflow: {len(ids) - len(kept)} of {len(ids)} texts are too short and do not count", file=sys.stderr)
    count = f"{fit.texts} texts, {fit.positions} positions"
    print(f"capflow: {job.out}, a Jacobian lens of {len(matrices)} layers, fitted on {count}", file=sys.stderr)


def _load(name: str, job: LensJob) -> tuple[Any, Any]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=job.dtype)
    except (OSError, ValueError) as e:
        expected = "a model with a tokenizer that Transformers loads"
        raise UsageError(explain("--model", got=f"{name}: {e}", expected=expected)) from e
    device = job.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(device).eval(), tokenizer
    except RuntimeError as e:
        raise UsageError(explain("--device", got=f"{device}: {e}", expected="a device of torch")) from e


def _layers(text: str, count: int) -> Sequence[int]:
    """Return the layers to fit. Raises UsageError for one that does not exist, and for the last one."""
    layers = layers_of(text, count, "--layers")
    if text == "all":
        layers = layers[:-1]
    elif layers[-1] == count - 1:
        got = f"layer {count - 1}, the last one"
        raise UsageError(explain("--layers", got=got, expected="layers below it: its lens is the model's prediction"))
    if not layers:
        raise UsageError(explain("--layers", got=f"{count} layer", expected="a model of two layers or more"))
    return layers


def main() -> int:
    """Run the job; return the exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return run_program(lambda: work(msgspec.json.decode(sys.argv[1], type=LensJob)))


if __name__ == "__main__":
    sys.exit(main())
