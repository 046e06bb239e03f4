"""`capflow serve MODEL …`: vLLM's OpenAI-compatible server with capflow in it; `--consumer` adds a hub beside it."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

import click

from capflow.cli.completion import complete_consumer
from capflow.extras import require

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from capflow.cli.hub.running import HubRun
    from capflow.cli.logs import Format
    from capflow.cli.signals import Signals


class _Serve(click.Command):
    """The command, whose options two other parsers read."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:  # noqa: ARG002
        """Return the options of capflow that begin with a text; those of vLLM are known to vLLM only."""
        from click.shell_completion import CompletionItem

        from capflow.serve_options import flags

        return [CompletionItem(flag) for flag in (*flags(), "--help") if flag.startswith(incomplete)]


def _complete_value(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return the completions of an argument that is no option: of `--consumer`, else files."""
    from click.shell_completion import CompletionItem

    if (context.params.get("arguments") or [""])[-1] == "--consumer":
        return complete_consumer(context, parameter, incomplete)
    return [CompletionItem(incomplete, type="file")]


@click.command(
    cls=_Serve,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_value)
def serve(arguments: tuple[str, ...]) -> None:
    """Serve MODEL with vLLM's OpenAI-compatible server, tapped: `capflow serve MODEL [options of capflow and vLLM]`."""
    from capflow.errors import UsageError, explain
    from capflow.serve_options import engine_options, help_text, hub_options

    if "--help" in arguments or "-h" in arguments:
        click.echo(help_text().rstrip())
        return
    for argument in arguments:
        if argument.startswith("--help="):
            _help(argument)
            return
    hub, rest = hub_options().parse_known_args(list(arguments))
    engine, others = engine_options().parse_known_args(rest)
    if not others:
        raise UsageError(explain("MODEL", got="none", expected="capflow serve MODEL"))
    require("vllm", "capflow serve")
    sys.exit(_serve(hub, engine, rest))


def _help(argument: str) -> None:
    """Show the help that `--help=NAME` asks for; only vLLM's takes its time to import vLLM."""
    from capflow.serve_options import help_about, help_text

    name = argument.removeprefix("--help=")
    if about := help_about(name):
        click.echo(about)
        return
    if name.casefold() == "all":
        click.echo(f"{help_text()}\nThe options of vLLM:\n")
    require("vllm", "capflow serve")
    os.execv(sys.executable, [sys.executable, "-m", "capflow_engine.serve.server", argument])  # noqa: S606


def _serve(hub: Namespace, engine: Namespace, arguments: list[str]) -> int:
    """Serve until a signal comes; return the exit code."""
    from capflow import limits
    from capflow.cli.engine.server import ServerProcess
    from capflow.cli.signals import Signals

    shutdown_s = limits.SHUTDOWN_S_DEFAULT if engine.shutdown_timeout is None else engine.shutdown_timeout
    with Signals() as signals:
        running = _hub_beside(hub, engine, signals)
        with ServerProcess(arguments, signals, shutdown_s=shutdown_s) as server:
            shape = server.shape()
            if running is None or shape is None:
                server.go_on(None)
                return server.follow()
            running.check_specs(shape.num_layers, shape.sites)
            with running:
                server.go_on(running.hub.address)
                code = server.follow()
        return code or running.exit_code


def _hub_beside(hub: Namespace, engine: Namespace, signals: Signals) -> HubRun | None:
    """Return the hub of the options, not yet started; None without a consumer."""
    from capflow.cli.hub.running import HubRun
    from capflow.errors import UsageError, explain
    from capflow.hub.monitor.endpoint import parse_listen
    from capflow.plugins.configure import configure_all, load_plugins
    from capflow.serve_options import HUB_FLAGS
    from capflow.transport.address import check_address, private_address

    if not hub.consumer and hub.consumer_config is None:
        for flag in HUB_FLAGS[2:]:
            if getattr(hub, flag.removeprefix("--").replace("-", "_")) is not None:
                raise UsageError(explain(flag, got="no --consumer", expected="it beside: it is of the hub inside"))
        return None
    if engine.hub:
        raise UsageError(explain("--hub", got="--consumer with it", expected="one of them"))
    address = hub.address or private_address("serve")
    made, controllers = configure_all(hub.consumer, hub.consumer_config, load_plugins())
    log_format: Format = hub.log_format or "text"
    return HubRun(
        check_address(address, insecure=engine.insecure or engine.key is not None, where="--address"),
        made,
        controllers,
        key=engine.key,
        insecure=engine.insecure,
        drain_s=hub.drain_s,
        memory_bytes_max=hub.memory_bytes_max,
        ends=True,
        metrics=parse_listen(hub.metrics_address, "--metrics-address"),
        log_format=log_format,
        # The server writes its log to the same terminal: a live line cannot be drawn over it.
        live=False,
        signals=signals,
    )
