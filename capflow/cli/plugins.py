"""`capflow plugins`: lists the installed consumers and controllers, or shows one in full."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import click

from capflow.cli.completion import complete_plugin
from capflow.extras import install, missing
from capflow.text.examples import examples

if TYPE_CHECKING:
    from rich.console import Console

    from capflow.plugins.configure import Plugin


@click.command(epilog=examples("capflow plugins", "capflow plugins filesystem"))
@click.argument("name", required=False, shell_complete=complete_plugin)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list, or with NAME one object.")
def plugins(name: str | None, as_json: bool) -> None:
    """List the consumers and controllers that are installed, with their options; with NAME, show one in full.

    One hub may run several instances of a plugin: `--consumer NAME@INSTANCE:KEY=VALUE`, with an instance name of your
    own.
    """
    from capflow.errors import UsageError, explain
    from capflow.plugins.configure import load_plugins
    from capflow.text.suggestion import did_you_mean

    installed = load_plugins()
    if name is not None and name not in installed:
        do = f"{did_you_mean(name, installed)} `capflow plugins` lists them".lstrip()
        expected = f"one of {', '.join(sorted(installed)) or 'none installed'}"
        raise UsageError(explain("NAME", got=name, expected=expected, do=do))
    described = [_described(plugin) for _, plugin in sorted(installed.items()) if name in (None, plugin.name)]
    if as_json:
        import json

        click.echo(json.dumps(described if name is None else described[0], indent=2))
    elif name is None:
        _print_list(described)
    else:
        _print_one(described[0])


def _described(plugin: Plugin) -> dict[str, Any]:
    """Return a plugin as plain JSON values."""
    from capflow.plugins.configure import UNIVERSAL_OPTIONS, kind_of, options_of

    kind = kind_of(plugin)
    return {
        "name": plugin.name,
        "kind": kind,
        "module": plugin.__module__,
        "package": _package(plugin),
        "missing": missing(plugin.extra) if plugin.extra else [],
        "install": install(plugin.extra) if plugin.extra else "",
        "doc": _description(plugin),
        "config_doc": inspect.getdoc(plugin.Config) or "",
        "options": [
            {
                "name": option.name,
                "type": option.type,
                "required": option.required,
                "default": option.default,
                "meaning": option.meaning,
                "of_every_consumer": kind == "consumer" and option.name in UNIVERSAL_OPTIONS,
            }
            for option in options_of(plugin)
        ],
    }


def _package(plugin: Plugin) -> str:
    """Return the package that brings a plugin, and its version."""
    import importlib.metadata

    from capflow.plugins.configure import load_plugins
    from capflow.plugins.consumer import ENTRY_POINT_GROUP

    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry_point.dist is not None and plugin.name in load_plugins([entry_point]):
            return f"{entry_point.dist.name} {entry_point.dist.version}"
    return ""


def _print_list(described: list[dict[str, Any]]) -> None:
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
        cells = (
            plugin["name"],
            plugin["kind"],
            "\n\n".join(filter(None, (doc, _lacks(plugin), details))),
            "\n".join(options),
        )
        table.add_row(*map(Text, cells))
    console = Console()
    console.print(table)
    console.print("`capflow plugins NAME` shows one in full.")


def _lacks(plugin: dict[str, Any]) -> str:
    return f"missing: {', '.join(plugin['missing'])}; {plugin['install']}" if plugin["missing"] else ""


def _print_one(plugin: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text.assemble((plugin["name"], "bold"), f"  {plugin['kind']}  {plugin['package']}".rstrip()))
    console.print(Text(plugin["module"], "dim"), soft_wrap=True)
    console.print(Text(f"\n{plugin['doc']}"))
    if lacks := _lacks(plugin):
        console.print(Text(f"\n{lacks}", "red"), soft_wrap=True)
    for title, common in (("Options", False), ("Options of every consumer", True)):
        options = [option for option in plugin["options"] if option["of_every_consumer"] is common]
        if options:
            console.print(Text(f"\n{title}:", "bold"))
            _print_options(options, console)
    required = [f"{option['name']}={option['name'].upper()}" for option in plugin["options"] if option["required"]]
    text = f"{plugin['name']}{':' if required else ''}{','.join(required)}"
    console.print(Text.assemble(("\nExample:", "bold"), f"\n  capflow run --consumer {text}"), soft_wrap=True)


def _print_options(options: list[dict[str, Any]], console: Console) -> None:
    """Print each option with its meaning below it; options in a row with one meaning share it."""
    import textwrap

    from rich.text import Text

    indent = " " * 6
    for option, after in zip(options, [*options[1:], None], strict=True):
        default = ", required" if option["required"] else _default(option["default"])
        console.print(Text.assemble("  ", (option["name"], "cyan"), f": {option['type']}{default}"), soft_wrap=True)
        if after is None or after["meaning"] != option["meaning"]:
            meaning = textwrap.wrap(option["meaning"], console.width, initial_indent=indent, subsequent_indent=indent)
            console.print(Text("\n".join(meaning)), soft_wrap=True)


def _default(value: Any) -> str:
    """Return ` = DEFAULT` as the value of an option is written; nothing without a default."""
    text = "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return "" if value is None or not text else f" = {text.lower() if isinstance(value, bool) else text}"


def _description(plugin: type) -> str:
    """Return a class's docstring without its attributes, which are for programs."""
    return re.split(r"\n\n(?=[a-z0-9_, ]+: )", inspect.getdoc(plugin) or "")[0]
