"""`capflow export`: writes a captured data set in another format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from capflow.capture.site import Site
from capflow.errors import CapflowError, UsageError, explain
from capflow.extras import require
from capflow.text.examples import examples
from capflow_consumers.dataset.objects.address import is_url
from capflow_consumers.dataset.reader import open_dataset

_CONTEXT_SIZE = 128


@click.command(epilog=examples("capflow export rows as-files --to safetensors"))
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("dest", type=click.Path(path_type=Path))
@click.option("--to", "format", type=click.Choice(["saelens", "safetensors"]), required=True, help="The format.")
@click.option("--site", "names", multiple=True, metavar="HOOK:LAYER", help="Export this site only; repeatable.")
@click.option(
    "--context-size", type=click.IntRange(1, 1 << 16), help=f"saelens: rows per context.  [default: {_CONTEXT_SIZE}]"
)
@click.option("--unsteered", is_flag=True, help="Leave out rows at steered positions.")
@click.option("--no-verify", is_flag=True, help="Do not check checksums first.")
def export(
    path: Path,
    dest: Path,
    format: str,
    names: tuple[str, ...],
    context_size: int | None,
    *,
    unsteered: bool,
    no_verify: bool,
) -> None:
    """Write the captured data set in PATH to the directory DEST.

    `saelens` writes the cached activations that SAELens trains on: a Hugging Face data set for each site. `safetensors`
    writes one file for each request. An export that was stopped continues when the same command is started again.
    """
    from capflow_consumers.dataset.contents import Contents
    from capflow_consumers.export.destination import Destination, Export
    from capflow_consumers.export.saelens import check_fits, to_saelens
    from capflow_consumers.export.safetensors import to_safetensors
    from capflow_consumers.export.selection import left_out
    from capflow_consumers.progress import progress

    if format == "safetensors" and context_size is not None:
        raise click.UsageError("--context-size is for --to saelens")
    if format == "saelens":
        require("saelens", "--to saelens")
    dataset = open_dataset(path)
    if not is_url(path):
        _check_apart(path, dest)
    if damaged := dataset.damaged():
        raise CapflowError(damaged[0])
    captures = len(dataset)
    contents = Contents(dataset.path, map(Site.parse, names))
    steered: Counter[Site] = Counter()
    with progress("reading" if no_verify else "checking", captures) as step:
        for capture in dataset:
            if not no_verify:
                capture.verify()
            wanted = contents.add(capture)
            if unsteered:
                steered.update({each: left_out(capture, each) for each in wanted})
            step()
    sites = contents.sites("--site")
    for each, count in steered.items():
        sites[each].rows -= count
    size = context_size or _CONTEXT_SIZE
    options = {"unsteered": 1} if unsteered else {}
    if format == "saelens":
        check_fits(sites, size)
        options |= {"context_size": size, "captures": captures}
    destination = Destination(dest.absolute(), Export(dataset.source, format, list(map(str, sites)), options))
    destination.open()
    if format == "safetensors":
        with progress("captures", captures) as step:
            written = to_safetensors(dataset, list(sites), destination, step, unsteered=unsteered)
        click.echo(f"{dest}: {written} files written, {captures - written} already there")
        return
    with progress("captures of sites", captures * len(sites)) as step:
        for site in to_saelens(dataset, sites, destination, size, step, unsteered=unsteered):
            click.echo(
                f"{dest / site.hook_name}: {site.contexts} contexts, {site.rows_left} rows left over; "
                f"hook_name={site.hook_name} context_size={size} d_in={site.d_in} dtype={site.dtype}"
            )
    click.echo(f"{dest}: {len(sites)} sites exported")


def _check_apart(source: Path, dest: Path) -> None:
    inside, root = dest.resolve(), source.resolve()
    if inside == root or root in inside.parents:
        raise UsageError(explain("DEST", got=str(dest), expected="a directory outside of the data set"))
