"""`capflow plugins`: lists the installed consumers and controllers with their options."""

from __future__ import annotations

import inspect
from typing import Any

import click

from capflow.extras import install, missing


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins(as_json: bool) -> None:
    """List the consumers and controllers that are installed, with their options.

    One hub may run several instances of a plugin: `--consumer NAME@INSTANCE:KEY=VALUE`, with an instance name of your
    own.
    """
    from capflow.plugins.configure import Plugin, kind_of, load_plugins, options_of

    def describe(name: str, plugin: Plugin) -> dict[str, Any]:
        return {
            "name": name,
            "kind": kind_of(plugin),
            "module": plugin.__module__,
            "missing": missing(plugin.extra) if plugin.extra else [],
            "install": install(plugin.extra) if plugin.extra else "",
            "doc": inspect.getdoc(plugin) or "",
            "config_doc": inspect.getdoc(plugin.Config) or "",
            "options": [
                {"name": o.name, "type": o.type, "required": o.required, "default": o.default}
                for o in options_of(plugin)
            ],
        }

    described = [describe(name, plugin) for name, plugin in sorted(load_plugins().items())]
    if as_json:
        import json

        click.echo(json.dumps(described, indent=2))
        return
    _print(described)


def _print(described: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("kind")
    table.add_column("description")
    table.add_column("options (* required)")
    for plugin in described:
        options = [
            f"{option['name']}*: {option['type']}"
            if option["required"]
            else f"{option['name']}: {option['type']} = {option['default']}"
            for option in plugin["options"]
        ]
        doc = plugin["doc"].partition("\n")[0]
        details = " ".join(plugin["config_doc"].partition("\n\n")[2].split())
        lacks = f"missing: {', '.join(plugin['missing'])}; {plugin['install']}" if plugin["missing"] else ""
        cells = (
            plugin["name"],
            plugin["kind"],
            "\n\n".join(filter(None, (doc, lacks, details))),
            "\n".join(options),
        )
        table.add_row(*map(Text, cells))
    Console().print(table)
