"""`capflow plugins`: lists the installed consumers and controllers with their options."""

from __future__ import annotations

import inspect
from typing import Any

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins(as_json: bool) -> None:
    """List the consumers and controllers that are installed, with their options.

    One hub may run several instances of a plugin: `--consumer NAME@INSTANCE:KEY=VALUE`, with an instance name of your
    own.
    """
    from capflow.plugins.configure import Plugin, load_plugins, options_of
    from capflow.plugins.consumer import Consumer

    def describe(name: str, plugin: Plugin) -> dict[str, Any]:
        return {
            "name": name,
            "kind": "consumer" if issubclass(plugin, Consumer) else "controller",
            "module": plugin.__module__,
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
        details = plugin["config_doc"].partition("\n\n")[2].replace("\n", " ")
        cells = (plugin["name"], plugin["kind"], f"{doc}\n\n{details}".strip(), "\n".join(options))
        table.add_row(*map(Text, cells))
    Console().print(table)
