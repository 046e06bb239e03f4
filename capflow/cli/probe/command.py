"""`capflow probe`: fits probes on labelled captures, evaluates them, and converts features of an autoencoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capflow.text.examples import examples

if TYPE_CHECKING:
    from capflow.cli.probe.fitting import Judgement
    from capflow.probes.linear import Method
    from capflow.probes.probe import Pool

_PATH = click.Path(path_type=Path)

_pool = click.option(
    "--pool",
    type=click.Choice(["token", "mean", "max", "last"]),
    default="token",
    show_default=True,
    help="`token` gives each token a score; the others give each request one.",
)


def _labelled(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each probe."),
        click.option(
            "--positions",
            default="all",
            show_default=True,
            metavar="SET",
            help="The captured rows to use, as in a capture.",
        ),
        click.option(
            "--positive",
            metavar="LABEL",
            help="The label to fire on; all others are negative. Default: 1, true, yes or positive.",
        ),
        click.option(
            "--labels",
            required=True,
            type=_PATH,
            metavar="FILE",
            help='CSV or JSON Lines: {"request": "…", "label": "…"}.',
        ),
        click.argument("data", type=_PATH),
    ):
        command = option(command)
    return command


@click.group()
def probe() -> None:
    """Fit a probe on labelled captures, evaluate one, or convert one from SAELens."""


@probe.command(
    epilog=examples(
        "capflow probe fit rows --labels labels.csv --positive glad --site post_block:12 --out glad.safetensors"
    )
)
@_labelled
@click.option("--site", required=True, metavar="HOOK:LAYER", help="The site to fit on, such as post_block:12.")
@click.option("--out", required=True, type=_PATH, metavar="FILE", help="The .safetensors file to write.")
@click.option("--method", type=click.Choice(["logistic", "mean"]), default="logistic", show_default=True)
@_pool
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.25,
    show_default=True,
    metavar="SHARE",
    help="The share of requests on which the probe is evaluated.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="The seed of the choice of held-out requests.",
)
@click.option("--name", metavar="NAME", help="The probe's name. Default: the name of the file.")
def fit(
    data: Path,
    labels: Path,
    positive: str | None,
    positions: str,
    as_json: bool,
    site: str,
    out: Path,
    method: Method,
    pool: Pool,
    held_out: float,
    seed: int,
    name: str | None,
) -> None:
    """Fit a linear probe on the rows of labelled requests in DATA, a data set of the filesystem consumer.

    Whole requests are held out, and the probe's accuracy on them is printed. The duckdb consumer, the gate and the
    dashboard read the file. The gate and the dashboard score tokens, whatever the pool.
    """
    from capflow.extras import require

    require("probe", "capflow probe fit")
    from capflow.capture.site import Site
    from capflow.cli.probe import fitting

    _check_out(out)
    place = Site.parse(site)
    rows = _read(data, labels, positive, place, positions)
    fitted, unseen = fitting.split(rows, held_out, seed)
    linear = fitting.fit(fitted, place, name=name or out.stem, method=method, pool=pool)
    judged = fitting.judge(unseen, linear)
    linear.save(out)
    _print(judged, "held out", as_json)
    click.echo(f"capflow: wrote {out}, fitted on {len(fitted.requests)} requests", err=True)


@probe.command(
    "eval", epilog=examples("capflow probe eval rows glad.safetensors --labels others.jsonl --positive glad")
)
@_labelled
@click.argument("file", type=_PATH, metavar="PROBE")
def evaluate(data: Path, labels: Path, positive: str | None, positions: str, as_json: bool, file: Path) -> None:
    """Evaluate the probes in the file PROBE on labelled requests in DATA: accuracy at the thresholds, and AUROC."""
    from capflow.extras import require

    require("probe", "capflow probe eval")
    from capflow.cli.probe import fitting
    from capflow.errors import UsageError, explain
    from capflow.probes.kinds import load_probe

    scorer = load_probe(file)
    rows = _read(data, labels, positive, scorer.site, positions)
    width = rows.rows[0].shape[1]
    if scorer.hidden_size != width:
        raise UsageError(
            explain(f"{file}: weight", got=f"{scorer.hidden_size} numbers", expected=f"{width}, as {data}")
        )
    _print(fitting.judge(rows, scorer), "labelled", as_json)


@probe.command(epilog=examples("capflow probe sae my-sae --features 17,2048 --pool max --out emotions.safetensors"))
@click.argument("directory", type=_PATH, metavar="DIRECTORY")
@click.option("--out", required=True, type=_PATH, metavar="FILE", help="The .safetensors file to write.")
@click.option("--features", metavar="NUMBERS", help="The features to convert, such as 17,2048. Default: all.")
@click.option("--site", metavar="HOOK:LAYER", help="The site that the features read. Default: the one in cfg.json.")
@_pool
def sae(directory: Path, out: Path, features: str | None, site: str | None, pool: Pool) -> None:
    """Write features of a SAELens autoencoder as probes.

    DIRECTORY is where SAELens saved the autoencoder. A probe's score is the activation of its feature.
    """
    from capflow.capture.site import Site
    from capflow.errors import UsageError, explain
    from capflow.probes.file import write_file
    from capflow.probes.kinds import load_probe
    from capflow.probes.saelens import read_saelens

    _check_out(out)
    numbers = None
    if features is not None:
        parts = [part.strip() for part in features.split(",")]
        if not all(part.isdecimal() and len(part) < 10 for part in parts):
            raise UsageError(explain("--features", got=features, expected="numbers of features, comma separated"))
        numbers = [int(part) for part in parts]
    place = None if site is None else Site.parse(site)
    tensors, about = read_saelens(directory, out.stem, features=numbers, site=place)
    write_file(out, tensors, about | {"pool": pool}, load_probe)
    click.echo(f"{len(about['names'].split(','))} features at {about['site']}: {out}")


def _check_out(out: Path) -> None:
    from capflow.errors import UsageError, explain

    if out.suffix != ".safetensors" or not out.parent.is_dir():
        raise UsageError(explain("--out", got=str(out), expected="a .safetensors file in a directory that exists"))


def _read(data: Path, labels: Path, positive: str | None, site: Any, positions: str) -> Any:
    from capflow.capture.positions import Positions
    from capflow.cli.probe.labelled import LabelledRows
    from capflow.probes.labels import read_labels

    wanted = read_labels(labels, positive)
    rows = LabelledRows.read(data, wanted, site, Positions.parse(positions, where="--positions"))
    if missing := len(wanted) - len(rows.requests):
        click.echo(f"capflow: {missing} of {len(wanted)} labelled requests have no such rows in {data}", err=True)
    return rows


def _print(judged: Sequence[Judgement], which: str, as_json: bool) -> None:
    for judgement in judged:
        if as_json:
            click.echo(json.dumps(judgement._asdict()))
            continue
        count = f"{judgement.judged} tokens of " if judgement.pool == "token" else ""
        figures = f"accuracy {judgement.accuracy:.3f}, AUROC {judgement.auroc:.3f}"
        examples = f"{count}{judgement.requests} requests, {judgement.positive} positive"
        click.echo(f"{judgement.probe}: {figures}; {which}: {examples}")
