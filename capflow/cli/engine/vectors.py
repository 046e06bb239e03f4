"""`capflow vectors`: makes steering vectors of prompts, features and probes, and compares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from capflow.capture.site import HOOK_DEFAULT, HOOKS, hook_named
from capflow.errors import UsageError, explain
from capflow.text.examples import examples


class _Hook(click.Choice[str]):
    """A hook by its own name or another; help and completion show its own."""

    def __init__(self) -> None:
        super().__init__(HOOKS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(hook_named(value) or value, param, ctx)


_JOB = "capflow_models.jobs.vectorjob"

_out = click.option("--out", required=True, metavar="FILE", help="The .safetensors file to write.")
_length = click.option(
    "--length", type=click.FloatRange(0, min_open=True), metavar="L", help="Scale vectors to this length."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
_files = click.argument("files", nargs=-1, required=True, metavar="FILE…")


def _back_end(*, required: bool) -> Callable[[Any], Any]:
    """Return a decorator that gives a command the options of a model."""
    options = [
        click.option("--model", required=required, metavar="MODEL", help="A model's directory or name, or `demo`."),
        click.option("--backend", type=click.Choice(["vllm", "transformers"]), default="vllm", show_default=True),
        click.option(
            "--model-arg", multiple=True, metavar="NAME=VALUE", help="An argument of the back end; repeatable."
        ),
    ]

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group()
def vectors() -> None:
    """Make steering vectors, and compare them."""


@vectors.command(
    short_help="Fit vectors from contrasting prompts.",
    epilog=examples(
        "capflow vectors fit --model demo --pairs pairs.jsonl --layers 9 --out glad.safetensors",
        "capflow vectors fit --model chatty --caa sycophancy.json --chat --layers 9-12 --out agrees.safetensors",
    ),
)
@_back_end(required=True)
@click.option("--pairs", metavar="FILE", help='JSON Lines: {"positive": "…", "negative": "…"}.')
@click.option("--caa", metavar="FILE", help="JSON, questions of CAA: question, answer_matching_behavior, …")
@click.option("--texts", metavar="FILE", help="Texts for the two templates: .txt, or JSON Lines of `text`.")
@click.option("--positive-template", default="", metavar="TEXT", help="With {text} in it, for --texts.")
@click.option("--negative-template", default="", metavar="TEXT", help="The same, for the opposite.")
@click.option("--chat", is_flag=True, help="Prompts are messages in the model's chat template.")
@_out
@click.option("--method", type=click.Choice(["mean", "pca"]), default="mean", show_default=True)
@click.option("--layers", default="all", show_default=True, metavar="LAYERS", help="As in a capture: 4-11, or 3+7.")
@click.option("--hook", type=_Hook(), default=HOOK_DEFAULT, show_default=True)
@_length
def fit(model_arg: tuple[str, ...], length: float | None, **options: Any) -> None:
    """Fit a vector for each layer from prompts that show a concept and prompts that show its opposite.

    The prompts come from --pairs, from a set of CAA (--caa), or from --texts in two templates, as in RepE.

    The stream at the prompts' last tokens is compared: `mean` is the difference of the means, `pca` the first principal
    direction of the pairs' differences. A prompt of --caa ends with the letter of its answer.
    """
    from capflow.cli.engine.become import become
    from capflow.cli.engine.job import parse_pairs

    sources = [name for name in ("pairs", "caa", "texts") if options[name]]
    if len(sources) != 1:
        got = " and ".join(f"--{name}" for name in sources) or "none"
        raise UsageError(explain("--pairs, --caa, --texts", got=got, expected="one of them"))
    if options["texts"] is None and (options["positive_template"] or options["negative_template"]):
        raise UsageError(explain("--positive-template, --negative-template", expected="--texts beside them"))
    given = {name: value for name, value in options.items() if value is not None}
    arguments = parse_pairs(model_arg, "--model-arg")
    become("capflow_models.jobs.fitjob", {**given, "length": length or 0.0, "arguments": arguments})


@vectors.command(
    short_help="Make a vector of SAE features.",
    epilog=examples(
        "capflow vectors sae my-sae@post_block:9 --feature 2048 --out glad.safetensors",
        "capflow vectors sae my-sae --feature 17=4 --feature 99=-2 --length 200 --out mixed.safetensors",
    ),
)
@click.argument("sae", metavar="SAE")
@click.option(
    "--feature", "features", multiple=True, required=True, metavar="N[=X]", help="A feature, times X; repeatable."
)
@click.option("--site", default="", metavar="HOOK:LAYER", help="The SAE's site. Default: the one in its files.")
@_out
@_length
def sae(sae: str, features: tuple[str, ...], site: str, out: str, length: float | None) -> None:
    """Write the sum of decoder directions of SAE, a directory or file of SAELens, Gemma Scope or sparsify."""
    from capflow.cli.engine.become import become

    job = {"task": "sae", "files": [sae], "features": _features(features), "site": site}
    become(_JOB, {**job, "out": out, "length": length or 0.0})


def _features(given: tuple[str, ...]) -> dict[int, float]:
    features: dict[int, float] = {}
    for text in given:
        number, equals, coefficient = text.partition("=")
        try:
            key, value = int(number), float(coefficient) if equals else 1.0
        except ValueError:
            key, value = -1, float("nan")
        if key < 0 or not abs(value) < float("inf") or key in features:
            raise UsageError(explain("--feature", got=text, expected="NUMBER or NUMBER=COEFFICIENT, each number once"))
        features[key] = value
    return features


@vectors.command(
    short_help="Make a vector of a probe's weight.",
    epilog=examples("capflow vectors probe glad-probe.safetensors --length 200 --out glad.safetensors"),
)
@click.argument("probe", metavar="PROBE")
@click.option("--name", default="", metavar="NAME", help="Of the probe, where the file has several.")
@_out
@_length
def probe(probe: str, name: str, out: str, length: float | None) -> None:
    """Write the weight of the linear probe in the file PROBE as a vector."""
    from capflow.cli.engine.become import become

    become(_JOB, {"task": "probe", "files": [probe], "name": name, "out": out, "length": length or 0.0})


@vectors.command(
    short_help="Show the lengths of vectors.", epilog=examples("capflow vectors norms glad.safetensors sad.safetensors")
)
@_files
@_json
def norms(files: tuple[str, ...], as_json: bool) -> None:
    """Show the length of each vector in files, by layer."""
    from capflow.cli.engine.become import become

    become(_JOB, {"task": "norms", "files": files, "as_json": as_json})


@vectors.command(
    short_help="Show the angles between vectors.",
    epilog=examples("capflow vectors cosine glad.safetensors sad.safetensors"),
)
@_files
@click.option("--all", "everything", is_flag=True, help="Compare every vector with every other one.")
@_json
def cosine(files: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Show the cosine of each two vectors of one file; of several files, of each two at the same site."""
    from capflow.cli.engine.become import become

    become(_JOB, {"task": "cosine", "files": files, "everything": everything, "as_json": as_json})


@vectors.command(
    short_help="Project rows or prompts on vectors.",
    epilog=examples(
        "capflow vectors project glad.safetensors --data rows --labels labels.csv",
        "capflow vectors project glad.safetensors --model demo --pairs pairs.jsonl",
    ),
)
@_files
@click.option("--data", default="", metavar="DATA", help="A captured data set, whose rows are projected.")
@click.option("--labels", default="", metavar="FILE", help="Groups of its requests: request and label, as in `probe`.")
@click.option("--positions", default="all", show_default=True, metavar="SET", help="Its rows, as in a capture.")
@click.option("--prompts", default="", metavar="FILE", help='JSON Lines: {"prompt": "…", "group": "…"}.')
@click.option("--pairs", default="", metavar="FILE", help="Pairs, as `fit` reads them, in the place of --prompts.")
@_back_end(required=False)
@_json
def project(
    files: tuple[str, ...], model: str | None, backend: str, model_arg: tuple[str, ...], **options: Any
) -> None:
    """Project captured rows, or the rows at prompts' last tokens, on vectors: mean and deviation of each group.

    A projection is in the stream's units, as a clamp's bounds are.
    """
    from capflow.cli.engine.become import become
    from capflow.cli.engine.job import parse_pairs

    sources = [name for name in ("data", "prompts", "pairs") if options[name]]
    if len(sources) != 1:
        got = " and ".join(f"--{name}" for name in sources) or "none"
        raise UsageError(explain("--data, --prompts, --pairs", got=got, expected="one of them"))
    if (sources == ["data"]) != (model is None):
        expected = "a model, which reads the prompts" if model is None else "none beside --data"
        raise UsageError(explain("--model", got=model or "none", expected=expected))
    if sources != ["data"] and options["labels"]:
        raise UsageError(
            explain("--labels", got=options["labels"], expected="--data beside it", do="prompts have groups")
        )
    job: dict[str, Any] = {"task": "project", "files": files, **options}
    if model is not None:
        job |= {"model": model, "backend": backend, "arguments": parse_pairs(model_arg, "--model-arg")}
    become(_JOB, job)
