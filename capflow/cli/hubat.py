"""The options by which commands find a running hub, the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

KEY_HELP = "This side's key: its name in the directory of keys, or a path. Default: that of CAPFLOW_KEY."


def hub_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--address`, `--key` and `--insecure`, named as `capflow.client.Client` takes them."""
    for option in (
        click.option("--insecure", is_flag=True, help="Allow TCP to another machine without keys."),
        click.option("--key", metavar="NAME|PATH", help=KEY_HELP),
        click.option("--address", metavar="ADDRESS", help="The hub's address, as the hub prints it."),
    ):
        command = option(command)
    return command
