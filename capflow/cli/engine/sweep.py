"""`capflow sweep`: one change of the model at each chosen place, each measured at the next token."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from capflow.text.examples import examples

_METRICS = "Of logit_diff, probability, logprob, kl, MODULE:FUNCTION."
_POSITIONS = "all, changed, last, 3, -1, 2-5, comma separated; together: all in one run."
_INDEX = "Heads, experts or neurons: all, 3, 2-5, comma separated; whole: entire rows."


_AT = click.option("--positions", default="all", show_default=True, metavar="P,P,…", help=_POSITIONS)
_DIRECTION = click.option(
    "--direction",
    type=click.Choice(["denoise", "noise", "both"]),
    default="denoise",
    show_default=True,
    help="denoise puts clean rows into the corrupted run, noise the reverse.",
)


def _common(hook: str) -> Callable[[Any], Any]:
    """Return a decorator that gives a command the options of every sweep.

    hook: the default of `--hooks`.
    """
    options = [
        click.option("--model", required=True, metavar="MODEL", help="A model's directory or name, or `demo`."),
        click.option(
            "--pairs", required=True, metavar="FILE", help="JSON Lines: clean, corrupted, answer, wrong_answer, id."
        ),
        click.option(
            "--out", required=True, metavar="DIR", help="Where all is written; what it has is not done again."
        ),
        click.option(
            "--hooks", default=hook, show_default=True, metavar="H,H,…", help="Hooks or sites; see `capflow sites`."
        ),
        click.option(
            "--layers", default="all", show_default=True, metavar="LAYERS", help="As in a capture: 4-11, 3+7."
        ),
        click.option("--index", default="all", show_default=True, metavar="N,N,…", help=_INDEX),
        click.option(
            "--group", type=click.IntRange(1), default=64, show_default=True, help="Neurons that are changed at once."
        ),
        click.option(
            "--metrics", default="logit_diff,probability,kl", show_default=True, metavar="M,M,…", help=_METRICS
        ),
        click.option(
            "--align",
            type=click.Choice(["position", "end", "role"]),
            help="How positions of several pairs are joined; position if all are equally long, else role.",
        ),
        click.option(
            "--batch", type=click.IntRange(1), default=512, show_default=True, help="Requests asked for at once."
        ),
        click.option("--resamples", type=click.IntRange(1), default=1000, show_default=True, help="Of the intervals."),
        click.option(
            "--confidence",
            type=click.FloatRange(0, 1, min_open=True, max_open=True),
            default=0.95,
            show_default=True,
            help="Of the intervals.",
        ),
        click.option(
            "--engine-arg", multiple=True, metavar="NAME=VALUE", help="An argument of capflow.LLM; repeatable."
        ),
        click.option("--dry-run", is_flag=True, help="Check everything; show how many runs there are."),
    ]

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group()
def sweep() -> None:
    """Change every chosen place of a model, one at a time, and measure the answer."""


@sweep.command(
    short_help="Put rows of one run into another.",
    epilog=examples(
        "capflow sweep patch --model demo --pairs pairs.jsonl --dry-run --out sweep",
        "capflow sweep patch --model demo --pairs pairs.jsonl --hooks post_block,mlp_out --direction both --out sweep",
    ),
)
@_common("post_block")
@_AT
@_DIRECTION
def patch(direction: str, **options: Any) -> None:
    """Put rows of one prompt's run into another's, at each hook, layer and position; heads and experts one by one.

    Writes tables (Parquet and DuckDB), heatmaps and a report. A sweep that was stopped continues when it is started
    again.
    """
    _become("patch", direction, options)


@sweep.command(
    short_help="Replace rows by zeros, a mean or another prompt's.",
    epilog=examples(
        "capflow sweep ablate --model demo --pairs pairs.jsonl --by zero --out ablated",
        "capflow sweep ablate --model demo --pairs pairs.jsonl --hooks heads --positions together --out heads",
    ),
)
@_common("mlp_out")
@_AT
@click.option(
    "--by",
    type=click.Choice(["zero", "mean", "resample", "both", "all"]),
    default="mean",
    show_default=True,
    help="In a row's place: zeros, the mean over all prompts, the corrupted prompt's row; both: the first two.",
)
def ablate(by: str, **options: Any) -> None:
    """Replace rows of the clean prompts by zeros, a mean or the corrupted prompt's, at each hook, layer and position.

    Writes and continues as `capflow sweep patch` does.
    """
    _become("ablate", by, options)


@sweep.command(
    short_help="Follow the direct path from heads to receivers.",
    epilog=examples(
        "capflow sweep path --model demo --pairs pairs.jsonl --receivers final --out paths",
        "capflow sweep path --model demo --pairs pairs.jsonl --layers 0-11 --receivers q:12[3],k:12 --out paths",
    ),
)
@_common("heads")
@_DIRECTION
@click.option(
    "--receivers", required=True, metavar="R,R,…", help="What reads the stream: q:12, k:12[0], v:12, mlp_in:3, final."
)
@click.option(
    "--frozen",
    default="attn_out,mlp_out",
    show_default=True,
    metavar="H,H",
    help="What adds to the stream behind a sender as in the unchanged run; attn_out alone leaves MLPs free.",
)
def path(direction: str, **options: Any) -> None:
    """Change what a receiver reads from one head, or MLP, on the direct path, with what lies between frozen.

    All positions are changed together. Writes and continues as `capflow sweep patch` does.
    """
    _become("path", direction, {**options, "positions": "together"})


def _become(kind: str, direction: str, options: dict[str, Any]) -> NoReturn:
    from capflow.cli.engine.become import become
    from capflow.cli.engine.job import parse_pairs

    arguments = options.pop("engine_arg")
    job = {
        **options,
        "kind": kind,
        "direction": direction,
        "align": options["align"] or "",
        "engine": parse_pairs(arguments, "--engine-arg"),
        "command": ["capflow", *sys.argv[1:]],
    }
    become("capflow_models.sweep.program", {"backend": "vllm", **job})
