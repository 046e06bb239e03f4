"""`capflow features`: writes the most active features of the rows of a captured data set."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from capflow import limits
from capflow.errors import CapflowError, UsageError, explain
from capflow.extras import require
from capflow.text.examples import examples


@click.command(epilog=examples("capflow features rows --sae my-sae@post_block:12 --out features.parquet"))
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--sae",
    "saes",
    multiple=True,
    required=True,
    metavar="[NAME=]PATH[@SITE]",
    help="An autoencoder or transcoder of SAELens, Gemma Scope or sparsify; repeatable.",
)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The Parquet file to write."
)
@click.option(
    "--top",
    type=click.IntRange(1, limits.TOP_FEATURES_MAX),
    default=32,
    show_default=True,
    metavar="K",
    help="How many features of each token to write, the most active ones.",
)
def features(path: Path, saes: tuple[str, ...], out: Path, top: int) -> None:
    """Write the most active features of each captured token in PATH, a data set of the filesystem consumer.

    The file has a row for each token and active feature. The duckdb consumer records the same while a model runs, so
    that no rows need be stored.
    """
    require("files", "capflow features", "pyarrow")
    from capflow.files import whole_file
    from capflow.saes.named import load_saes
    from capflow_consumers.dataset.reader import open_dataset
    from capflow_consumers.features.file import FeatureWriter
    from capflow_consumers.progress import progress

    if not out.parent.is_dir() or out.is_dir():
        raise UsageError(explain("--out", got=str(out), expected="a file in a directory that exists"))
    loaded = load_saes(saes, "--sae")
    dataset = open_dataset(path)
    if damaged := dataset.damaged():
        raise CapflowError(damaged[0])
    tokens, written = 0, 0
    with (
        progress("captures", len(dataset)) as step,
        whole_file(out) as stream,
        contextlib.closing(FeatureWriter(stream)) as writer,
    ):
        for capture in dataset:
            for name, sae in loaded.items():
                for rows in capture.in_batches(sae.site) if sae.site in capture else ():
                    if rows.rows.shape[1] != sae.width:
                        got = f"rows of width {rows.rows.shape[1]} in request {capture.id}"
                        raise UsageError(explain(sae.where, got=got, expected=f"{sae.width}, the encoder's"))
                    tokens += len(rows.positions)
                    place = (capture.id, capture.prompt_length, rows, name, sae.site)
                    written += writer.add(*place, *sae.top(rows.rows, top))
            step()
        if not tokens:
            sites = ", ".join(sorted({str(sae.site) for sae in loaded.values()}))
            raise UsageError(explain(str(path), got="none", expected=f"rows at {sites}", do="name the site with @SITE"))
    click.echo(f"{out}: {written} features of {tokens} rows, {written / tokens:.1f} each")
