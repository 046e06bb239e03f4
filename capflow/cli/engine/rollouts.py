"""`capflow rollouts`: the answers to many prompts under many vectors and scales, in a file."""

from __future__ import annotations

from typing import Any

import click

from capflow.cli.features import read_features
from capflow.errors import UsageError, explain
from capflow.text.examples import examples


@click.command(
    epilog=examples(
        "capflow rollouts --model demo --prompts prompts.jsonl --vector glad=glad.safetensors --out answers.jsonl",
        "capflow rollouts --model demo --prompts prompts.jsonl --judge perplexity --judge sorry=regex:(?i)sorry "
        "--out answers.jsonl",
        "capflow rollouts --model demo --prompts prompts.jsonl --sae mood=my-sae@post_block:9 "
        """--features 'glad={"sae": "mood", "features": {"123": 4.0}}' --out answers.jsonl""",
    )
)
@click.option("--model", required=True, metavar="MODEL", help="A model's directory or name, or `demo`.")
@click.option("--prompts", required=True, metavar="FILE", help='JSON Lines: {"id": "…", "prompt": "…"}.')
@click.option("--out", required=True, metavar="FILE", help="A .jsonl or .parquet file; what it has is not done again.")
@click.option("--vector", "vectors", multiple=True, metavar="NAME=FILE", help="A file of vectors; repeatable.")
@click.option("--sae", "saes", multiple=True, metavar="[NAME=]PATH[@SITE]", help="An autoencoder; repeatable.")
@click.option(
    "--features",
    multiple=True,
    metavar="NAME=JSON",
    help="Its features, as in a request's steering_features; repeatable.",
)
@click.option("--scales", default="0,1", show_default=True, metavar="X,Y,…", help="Scales of each; 0 steers nothing.")
@click.option(
    "--normalize-steering", is_flag=True, help="Scales are of the stream's norm at each token; vectors have length 1."
)
@click.option("--samples", type=click.IntRange(1), default=1, show_default=True, help="Answers for each.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of sample 0; the next has the next."
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option(
    "--judge",
    "judges",
    multiple=True,
    metavar="[NAME=]JUDGE",
    help="probe:FILE, regex:PATTERN, perplexity or function:MODULE:FUNCTION; repeatable.",
)
@click.option("--backend", type=click.Choice(["vllm", "transformers"]), default="vllm", show_default=True)
@click.option("--batch", type=click.IntRange(1), help="Answers asked for at once: 64 with vllm, 1 with transformers.")
@click.option("--stride", type=click.IntRange(1), default=1, show_default=True, help="How many workers share the work.")
@click.option("--offset", type=click.IntRange(0), default=0, show_default=True, help="Which of them this is, from 0.")
@click.option("--model-arg", multiple=True, metavar="NAME=VALUE", help="An argument of the back end; repeatable.")
def rollouts(
    model: str,
    prompts: str,
    out: str,
    vectors: tuple[str, ...],
    saes: tuple[str, ...],
    features: tuple[str, ...],
    scales: str,
    normalize_steering: bool,
    samples: int,
    seed: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    judges: tuple[str, ...],
    backend: str,
    batch: int | None,
    stride: int,
    offset: int,
    model_arg: tuple[str, ...],
) -> None:
    """Answer every prompt under every vector at every scale.

    --features NAME=JSON stands beside the vectors: a scale multiplies coefficients, and the strengths of what is set.

    A run that was stopped continues when it is started again. With --stride N each worker writes a file of its own,
    FILE.K-of-N.

    Judges score each answer: the row gets `scores`, and their means are printed. Rows that exist are judged, too.
    """
    from capflow.cli.engine.become import become
    from capflow.cli.engine.job import parse_pairs

    become(
        "capflow_models.jobs.rolloutjob",
        {
            "model": model,
            "backend": backend,
            "prompts": prompts,
            "out": out,
            "vectors": _files(vectors),
            "saes": saes,
            "features": _features(features),
            "scales": _numbers(scales),
            "samples": samples,
            "seed": seed,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "batch": batch or 0,
            "judges": judges,
            "relative": normalize_steering,
            "stride": stride,
            "offset": offset,
            "arguments": parse_pairs(model_arg, "--model-arg"),
        },
    )


def _files(vectors: tuple[str, ...]) -> dict[str, str]:
    files: dict[str, str] = {}
    for each in vectors:
        name, equals, path = each.partition("=")
        if not equals or not name or not path or name in files:
            raise UsageError(explain("--vector", got=each, expected="NAME=FILE, each name once"))
        files[name] = path
    return files


def _features(given: tuple[str, ...]) -> dict[str, Any]:
    features: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or not name or name in features:
            raise UsageError(explain("--features", got=each, expected="NAME=JSON, each name once"))
        features[name] = read_features(text, f"--features {name}")
    return features


def _numbers(text: str) -> list[float]:
    from capflow.steering.plain import number

    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as e:
        raise UsageError(explain("--scales", got=text, expected="numbers, comma separated")) from e
    return [number(each, "--scales") for each in numbers]
