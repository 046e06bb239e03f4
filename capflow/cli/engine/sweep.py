"""`capflow sweep`: one change of the model at each chosen place, each measured at the next token."""

from __future__ import annotations

import sys

import click

from capflow.text.examples import examples


@click.group()
def sweep() -> None:
    """Patch every chosen place of a model, one at a time."""


@sweep.command(
    epilog=examples(
        "capflow sweep patch --model demo --pairs pairs.jsonl --dry-run --out sweep",
        "capflow sweep patch --model demo --pairs pairs.jsonl --hooks post_block,mlp_out --direction both --out sweep",
    )
)
@click.option("--model", required=True, metavar="MODEL", help="A model's directory or name, or `demo`.")
@click.option(
    "--pairs",
    required=True,
    metavar="FILE",
    help="JSON Lines of clean, corrupted, answer, wrong_answer, optionally id.",
)
@click.option("--out", required=True, metavar="DIR", help="The output directory; what it has is not done again.")
@click.option("--hooks", default="post_block", show_default=True, metavar="H,H,…", help="See `capflow sites`.")
@click.option("--layers", default="all", show_default=True, metavar="LAYERS", help="As in a capture: 4-11, or 3+7.")
@click.option(
    "--positions",
    default="all",
    show_default=True,
    metavar="P,P,…",
    help="all, changed, last, 3, -1, 2-5, comma separated.",
)
@click.option(
    "--direction",
    type=click.Choice(["denoise", "noise", "both"]),
    default="denoise",
    show_default=True,
    help="denoise puts clean rows into the corrupted run, noise the reverse.",
)
@click.option(
    "--metrics",
    default="logit_diff,probability,kl",
    show_default=True,
    metavar="M,M,…",
    help="Of logit_diff, probability, logprob, kl, MODULE:FUNCTION.",
)
@click.option(
    "--align",
    type=click.Choice(["position", "end", "role"]),
    help="How positions of several pairs are joined; position if all are equally long, else role.",
)
@click.option("--batch", type=click.IntRange(1), default=512, show_default=True, help="Requests asked for at once.")
@click.option(
    "--resamples", type=click.IntRange(1), default=1000, show_default=True, help="Of the intervals over pairs."
)
@click.option(
    "--confidence",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Of the intervals.",
)
@click.option("--engine-arg", multiple=True, metavar="NAME=VALUE", help="An argument of capflow.LLM; repeatable.")
@click.option("--dry-run", is_flag=True, help="Check everything; show how many runs there are.")
def patch(engine_arg: tuple[str, ...], align: str | None, **options: object) -> None:
    """Put rows of one prompt's run into another's, at each hook, layer and position, and measure the answer.

    Writes tables (Parquet and DuckDB), heatmaps and a report. A sweep that was stopped continues when it is started
    again.
    """
    from capflow.cli.engine.become import become
    from capflow.cli.engine.job import parse_pairs

    job = {
        **options,
        "align": align or "",
        "engine": parse_pairs(engine_arg, "--engine-arg"),
        "command": ["capflow", *sys.argv[1:]],
    }
    become("capflow_models.sweep.program", {"backend": "vllm", **job})
