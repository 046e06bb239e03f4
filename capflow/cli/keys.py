"""`capflow keys`: makes keys for TCP, and lists which keys may connect to a hub and with which rights."""

from __future__ import annotations

from pathlib import Path

import click

from capflow.text.examples import examples

_directory = click.option(
    "--dir",
    "where",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The directory of keys. Default: ~/.config/capflow/keys.",
)


@click.group()
def keys() -> None:
    """Make keys for TCP, and allow them to connect to a hub."""


@keys.command(epilog=examples("capflow keys new hub"))
@click.argument("name")
@_directory
def new(name: str, where: Path | None) -> None:
    """Make the key NAME, and print its public half.

    The file is secret; the printed public key is not.
    """
    from capflow.transport.keys import directory, key_directory, write_key
    from capflow.transport.zap import new_key

    pair = new_key()
    path = write_key(key_directory(where or directory()), name, pair)
    click.echo(f"capflow: wrote {path}; for --key. The public key:", err=True)
    click.echo(pair.public)


@keys.command(epilog=examples("capflow keys allow PUBLIC-KEY --name gpu-1 --rights capture,read"))
@click.argument("public", metavar="PUBLIC-KEY")
@click.option("--name", metavar="NAME", help="The name of the key's owner. Default: the first digits of the key.")
@click.option(
    "--rights",
    default="read",
    show_default=True,
    metavar="RIGHT,…",
    help="capture: be an engine; read: results and status; steer: act on running requests.",
)
@_directory
def allow(public: str, name: str | None, rights: str, where: Path | None) -> None:
    """Allow the owner of PUBLIC-KEY to connect to the hubs whose key is in the directory.

    A running hub applies the change within a second. Allowing a key again replaces its rights.
    """
    from capflow.transport.keys import AllowList, directory, key_directory, parse_rights

    granted = parse_rights(rights)
    listed = AllowList(key_directory(where or directory()))
    listed.allow(public, granted, name or public[:12])
    click.echo(f"{name or public[:12]} may {', '.join(sorted(granted))}")


@keys.command(epilog=examples("capflow keys revoke gpu-1"))
@click.argument("key", metavar="NAME|PUBLIC-KEY")
@_directory
def revoke(key: str, where: Path | None) -> None:
    """Forbid a key to connect; its connections are closed within a second."""
    from capflow.transport.keys import AllowList, directory, key_directory

    gone = AllowList(key_directory(where or directory())).revoke(key)
    click.echo(f"{gone.name} may no longer connect")


@keys.command("list", epilog=examples("capflow keys list"))
@_directory
def list_keys(where: Path | None) -> None:
    """Show the keys in the directory, and the keys that may connect to their hubs."""
    from capflow.transport.keys import RIGHTS, AllowList, directory, key_directory, read_key

    path = key_directory(where or directory())
    click.echo(f"keys in {path}:")
    _print([(file.stem, read_key(file).public) for file in sorted(path.glob("*.key"))])
    listed = AllowList(path)
    click.echo("allowed to connect:")
    entries = listed.entries() if listed.path.exists() else []
    _print([(e.name, e.public, ",".join(right for right in RIGHTS if right in e.rights)) for e in entries])


def _print(rows: list[tuple[str, ...]]) -> None:
    width = max((len(row[0]) for row in rows), default=0)
    for name, *rest in rows:
        click.echo("  ".join(["", name.ljust(width), *rest]))
    if not rows:
        click.echo("  none")
