"""`capflow lens`: fits lenses, converts published ones, and reads data sets with them."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from capflow.text.examples import examples

if TYPE_CHECKING:
    from capflow.cli.lens.reading import DatasetLens

_PATH = click.Path(path_type=Path)
# Tables that are printed, and the width of a line if the output is no terminal.
_TABLES_MAX = 8
_WIDTH = 120

_out = click.option("--out", required=True, metavar="FILE", help="The .safetensors file to write.")
_other_weights = click.option(
    "--other-weights", is_flag=True, help="Accept a lens of other weights of the model's sizes."
)


@click.group()
def lens() -> None:
    """See what each layer would predict: read captures, fit a lens, import one."""


@lens.group("fit")
def fit() -> None:
    """Fit a lens."""


@fit.command(epilog=examples("capflow lens fit jacobian --model demo --texts texts.txt --out jacobian.safetensors"))
@click.option("--model", required=True, metavar="MODEL", help="A model's directory or name, or `demo`.")
@click.option("--texts", required=True, metavar="FILE", help='Lines of a .txt file, or JSON Lines: {"text": "…"}.')
@_out
@click.option("--layers", default="all", show_default=True, metavar="LAYERS", help="As in a capture: 4-11, or 3+7.")
@click.option(
    "--tokens", type=click.IntRange(2, 1 << 20), default=128, show_default=True, help="Tokens of each text at most."
)
@click.option(
    "--skip-first", type=click.IntRange(0, 1 << 20), default=16, show_default=True, help="First positions left out."
)
@click.option("--batch", type=click.IntRange(1, 4096), default=8, show_default=True, help="Rows of J at once.")
@click.option("--dtype", default="float32", show_default=True, metavar="DTYPE", help="The dtype to compute in.")
@click.option("--device", default="", metavar="DEVICE", help="As torch names it. Default: the GPU, or else the CPU.")
def jacobian(
    model: str,
    texts: str,
    out: str,
    layers: str,
    tokens: int,
    skip_first: int,
    batch: int,
    dtype: str,
    device: str,
) -> None:
    """Fit a Jacobian lens on texts, with Transformers.

    A text costs as many backward passes as the model is wide. The texts should be like those that the model was trained
    on; published lenses were fitted on a hundred or more.
    """
    from capflow.cli.engine.become import become

    become(
        "capflow_models.jobs.lensjob",
        {
            "task": "fit-jacobian",
            "backend": "transformers",
            "model": model,
            "source": texts,
            "out": out,
            "layers": layers,
            "tokens_max": tokens,
            "skipped": skip_first,
            "batch": batch,
            "dtype": dtype,
            "device": device,
        },
    )


@lens.group("import")
def import_() -> None:
    """Convert a published lens."""


@import_.command("tuned", epilog=examples("capflow lens import tuned my-lens --model gpt2 --out tuned.safetensors"))
@click.argument("directory", metavar="DIR")
@_out
@click.option("--model", default="", metavar="MODEL", help="A directory or name. Default: that in config.json.")
@_other_weights
def import_tuned(directory: str, out: str, model: str, *, other_weights: bool) -> None:
    """Convert a lens of the package `tuned-lens`: DIR has config.json and params.pt."""
    from capflow.cli.engine.become import become

    job = {"task": "import-tuned", "model": model, "source": directory, "out": out, "other_weights": other_weights}
    become("capflow_models.jobs.lensjob", {"backend": "transformers", **job})


@import_.command(
    "jacobian", epilog=examples("capflow lens import jacobian lens.pt --model gpt2 --out jacobian.safetensors")
)
@click.argument("file", metavar="FILE")
@click.option("--model", required=True, metavar="MODEL", help="A model's directory or name, or `demo`.")
@_out
def import_jacobian(file: str, model: str, out: str) -> None:
    """Convert a lens of the package `jacobian-lens`, a .pt file."""
    from capflow.cli.engine.become import become

    job = {"task": "import-jacobian", "model": model, "source": file, "out": out}
    become("capflow_models.jobs.lensjob", {"backend": "transformers", **job})


@lens.command(epilog=examples("capflow lens info jacobian.safetensors"))
@click.argument("file", type=_PATH, metavar="LENS")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(file: Path, *, as_json: bool) -> None:
    """Show what a lens file has, and how it was made."""
    import json

    from capflow.lenses.file import LensFile
    from capflow.text.printable import printable

    opened = LensFile(file)
    about = {**opened.origin.metadata(), "translators": [str(site) for site in opened.sites]}
    if as_json:
        click.echo(json.dumps(about))
        return
    about["translators"] = f"{len(opened.sites)}: {opened.sites[0]} … {opened.sites[-1]}"
    width = max(map(len, about))
    for name, value in about.items():
        click.echo(f"{name:{width}}  {printable(str(value))}")


@lens.command(
    short_help="Show the most likely tokens of each layer.",
    epilog=examples(
        "capflow lens read rows --request fox",
        "capflow lens read rows --lens jacobian.safetensors --positions last_prompt --token next",
        "capflow lens read rows --lens jacobian.safetensors --duckdb lens.duckdb",
    ),
)
@click.argument("path", type=_PATH, metavar="DATASET")
@click.option("--lens", "file", type=_PATH, metavar="FILE", help="A lens file. Default: the logit lens.")
@click.option("--model", metavar="MODEL", help="A directory or name, or `demo`. Default: that of the data set.")
@click.option("--request", metavar="ID", help="The request to read. Default: all.")
@click.option("--layers", metavar="LAYERS", help="As in a capture: 4-11, or 3+7. Default: all captured ones.")
@click.option(
    "--hook",
    type=click.Choice(["post_block", "pre_attn"]),
    default="post_block",
    show_default=True,
    help="Of --layers.",
)
@click.option("--positions", default="all", show_default=True, metavar="SET", help="The captured rows to read.")
@click.option("--k", type=click.IntRange(1, 1024), default=5, show_default=True, help="Most likely tokens of a row.")
@click.option("--token", metavar="TEXT|#ID|next", help="A token whose rank is shown; `next` is the one that follows.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each captured row.")
@click.option("--parquet", type=_PATH, metavar="FILE", help="Write a Parquet file in place of a table.")
@click.option("--duckdb", type=_PATH, metavar="FILE", help="Write the table `lens` of a DuckDB file.")
@_other_weights
def read(
    path: Path,
    file: Path | None,
    model: str | None,
    request: str | None,
    layers: str | None,
    hook: str,
    positions: str,
    k: int,
    token: str | None,
    parquet: Path | None,
    duckdb: Path | None,
    *,
    as_json: bool,
    other_weights: bool,
) -> None:
    """Read the captured data set DATASET with a lens: the most likely tokens at each layer and position.

    The table has the most likely token of each layer and position with its probability, or with the rank of --token.
    Of one position it has the K most likely ones. KL is the divergence from the last layer's prediction.
    """
    from capflow.cli.lens.output import check_output
    from capflow.cli.lens.reading import DatasetLens

    if parquet is not None:
        check_output(parquet, "--parquet", "files")
    if duckdb is not None:
        check_output(duckdb, "--duckdb", "duckdb")
    data = DatasetLens(
        path,
        model=model,
        file=file,
        request=request,
        layers=layers,
        hook=hook,
        positions=positions,
        token=token,
        k=k,
        other_weights=other_weights,
    )
    if parquet is not None or duckdb is not None:
        _write(data, parquet, duckdb)
    if as_json:
        _print_json(data)
    elif parquet is None and duckdb is None:
        _print_tables(data)


def _write(data: DatasetLens, parquet: Path | None, duckdb: Path | None) -> None:
    from capflow.cli.lens.output import duckdb_output, parquet_output, table_of

    rows = 0
    with contextlib.ExitStack() as stack:
        outputs = [] if parquet is None else [stack.enter_context(parquet_output(parquet))]
        if duckdb is not None:
            outputs.append(stack.enter_context(duckdb_output(duckdb)))
        for capture, readings in data.requests():
            for each in readings:
                table = table_of(data.lens.name, capture, each)
                rows += table.num_rows
                for add in outputs:
                    add(table)
    names = " and ".join(str(path) for path in (parquet, duckdb) if path is not None)
    click.echo(f"capflow: {rows} rows of {len(data)} requests in {names}", err=True)


def _print_json(data: DatasetLens) -> None:
    from capflow.cli.lens.output import json_lines

    for capture, readings in data.requests():
        for each in readings:
            for line in json_lines(capture, each):
                click.echo(line)


def _print_tables(data: DatasetLens) -> None:
    from capflow.cli.lens.table import table_lines
    from capflow.text.printable import printable

    width = shutil.get_terminal_size()[0] if sys.stdout.isatty() else _WIDTH
    for capture, readings in itertools.islice(data.requests(), _TABLES_MAX):
        click.echo(printable(f"{capture.id}: {data.lens.title.lower()} of {data.lens.directory.name}"))
        for line in table_lines(readings, capture.texts, width):
            click.echo(line)
    if len(data) > _TABLES_MAX:
        click.echo(f"capflow: {len(data) - _TABLES_MAX} more requests; --request ID shows one", err=True)
