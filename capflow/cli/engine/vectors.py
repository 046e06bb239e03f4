"""`capflow vectors fit`: steering vectors from contrastive pairs of prompts."""

from __future__ import annotations

from typing import Any

import click

from capflow.capture.site import HOOK_DEFAULT, HOOKS, hook_named
from capflow.text.examples import examples


class _Hook(click.Choice[str]):
    """A hook by its own name or another; help and completion show its own."""

    def __init__(self) -> None:
        super().__init__(HOOKS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(hook_named(value) or value, param, ctx)


@click.group()
def vectors() -> None:
    """Make steering vectors."""


@vectors.command(
    epilog=examples("capflow vectors fit --model demo --pairs pairs.jsonl --layers 9 --out glad.safetensors")
)
@click.option("--model", required=True, metavar="MODEL", help="A model's directory or name, or `demo`.")
@click.option("--pairs", required=True, metavar="FILE", help='JSON Lines: {"positive": "…", "negative": "…"}.')
@click.option("--out", required=True, metavar="FILE", help="The .safetensors file to write.")
@click.option("--method", type=click.Choice(["mean", "pca"]), default="mean", show_default=True)
@click.option("--layers", default="all", show_default=True, metavar="LAYERS", help="As in a capture: 4-11, or 3+7.")
@click.option("--hook", type=_Hook(), default=HOOK_DEFAULT, show_default=True)
@click.option("--backend", type=click.Choice(["vllm", "transformers"]), default="vllm", show_default=True)
@click.option("--model-arg", multiple=True, metavar="NAME=VALUE", help="An argument of the back end; repeatable.")
def fit(
    model: str,
    pairs: str,
    out: str,
    method: str,
    layers: str,
    hook: str,
    backend: str,
    model_arg: tuple[str, ...],
) -> None:
    """Fit a vector for each layer from prompts that show a concept and prompts that show its opposite.

    The stream at the prompts' last tokens is compared: `mean` is the difference of the means, `pca` the first principal
    direction of the pairs' differences.
    """
    from capflow.cli.engine.become import become
    from capflow.cli.engine.job import parse_pairs

    become(
        "capflow_models.jobs.fitjob",
        {
            "model": model,
            "backend": backend,
            "pairs": pairs,
            "out": out,
            "method": method,
            "layers": layers,
            "hook": hook,
            "arguments": parse_pairs(model_arg, "--model-arg"),
        },
    )
