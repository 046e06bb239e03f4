"""`capflow run`: a hub with consumers, alone or for as long as a model's job takes."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.option(
    "--consumer",
    "consumers",
    multiple=True,
    metavar="NAME:KEY=VALUE,…",
    help="A consumer or controller and its options; may be repeated. See `capflow plugins`.",
)
@click.option("--config", type=click.Path(path_type=Path), help="A TOML file with a [[consumer]] table for each.")
@click.option("--address", metavar="ADDRESS", help="Where to listen: ipc:///PATH or tcp://HOST:PORT.")
@click.option("--insecure", is_flag=True, help="Allow an address that other machines can reach.")
@click.option("--drain-s", type=click.FloatRange(min=0), help="How long consumers may take at the end.")
@click.option("--model", metavar="MODEL", help="Run this model over --prompts, and end when it is through.")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="The prompts for --model.")
def run(
    consumers: tuple[str, ...],
    config: Path | None,
    address: str | None,
    insecure: bool,
    drain_s: float | None,
    model: str | None,
    prompts: Path | None,
) -> None:
    """Run a hub with consumers.

    Alone it waits for engines until Ctrl-C; with --model and --prompts it runs that model and ends when all its
    prompts are through. The exit code is 1 when rows were lost.
    """
    from capflow import limits
    from capflow.address import check_address, default_address
    from capflow.cli.hubrun import HubRun
    from capflow.errors import UsageError, explain
    from capflow.plugins import configure_all, load_plugins

    if (model is None) != (prompts is None):
        given, missing = ("--prompts", "--model") if model is None else ("--model", "--prompts")
        raise UsageError(explain(given, got=f"no {missing}", expected="both or neither"))
    address = check_address(address or default_address(), insecure=insecure, where="--address")
    made, controllers = configure_all(consumers, config, load_plugins())
    if not made and not controllers:
        raise UsageError(explain("--consumer", got="none", expected="at least one", do="see `capflow plugins`"))
    drain_s = limits.DRAIN_S_MAX if drain_s is None else drain_s
    running = HubRun(address, made, controllers, insecure=insecure, drain_s=drain_s)
    if model is not None and prompts is not None:
        from capflow.cli.job import run_job

        sys.exit(run_job(running, model=model, prompts=prompts))
    with running:
        running.wait()
    sys.exit(running.exit_code)
