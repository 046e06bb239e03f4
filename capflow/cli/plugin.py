"""`capflow plugin`: writes a package for a consumer of your own."""

from __future__ import annotations

from pathlib import Path

import click

from capflow.text.examples import examples


@click.group()
def plugin() -> None:
    """Write a plugin of your own."""


@plugin.command(epilog=examples("capflow plugin new token-norms"))
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="The directory to make; it must not exist. Default: capflow-NAME.",
)
def new(name: str, directory: Path | None) -> None:
    """Write a package with a working consumer NAME and its tests."""
    from capflow.plugins.configure import load_plugins
    from capflow.plugins.kit import Names, write_plugin

    names = Names.of(name, load_plugins())
    directory = Path(f"capflow-{name}") if directory is None else directory
    for path in write_plugin(names, directory):
        click.echo(path)
    click.echo(f"\ninstall it and test it:  pip install -e '{directory}[test]' && pytest {directory}")
