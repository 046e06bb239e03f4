"""The options that commands share: how they find a running hub, and where they serve metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from capflow import limits
from capflow.errors import UsageError, explain

KEY_HELP = "The key of this command: its name in the directory of keys, or a path. Default: CAPFLOW_KEY."

METRICS_OPTION = click.option(
    "--metrics-address",
    metavar="[HOST:]PORT",
    help="Serve /metrics, /healthz and /readyz over HTTP; HOST is 127.0.0.1 unless given, PORT 0 is any free one.",
)


def engine_option(text: str) -> Callable[..., Any]:
    """Return the option `--engine` of a command about a request; `text` is its help."""
    return click.option("--engine", metavar="NAME", default="", callback=_engine, help=text)


def _engine(_: click.Context, __: click.Parameter, engine: str) -> str:
    if len(engine) > limits.REQUEST_ID_LENGTH_MAX:
        expected = f"at most {limits.REQUEST_ID_LENGTH_MAX} characters"
        raise UsageError(explain("--engine", got=engine, expected=expected, do="see `capflow status`"))
    return engine


def hub_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--address`, `--key` and `--insecure`, named as `capflow.transport.client.Client` takes them."""
    return _with(command, click.option("--address", metavar="ADDRESS", help="The hub's address, as the hub prints it."))


def hubs_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """As `hub_options`; `--address` may be repeated, and its argument is `addresses`."""
    text = "The hub's address, as the hub prints it; repeat it for several hubs."
    return _with(command, click.option("--address", "addresses", multiple=True, metavar="ADDRESS", help=text))


def _with(command: Callable[..., Any], address: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--insecure", is_flag=True, help="Allow TCP to another machine without keys."),
        click.option("--key", metavar="NAME|PATH", help=KEY_HELP),
        address,
    ):
        command = option(command)
    return command
