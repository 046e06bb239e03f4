"""`capflow run`: a hub with consumers, alone or for as long as a model's job takes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capflow import limits
from capflow.buffers.policy import FALLBACKS, POLICIES_OF_WORKERS
from capflow.cli.completion import complete_consumer
from capflow.cli.hub.address import METRICS_OPTION
from capflow.divergence import ON_DIVERGENCE
from capflow.text.examples import examples

if TYPE_CHECKING:
    from capflow.cli.hub.running import HubRun
    from capflow.cli.logs import Format


def _failures_in_its_log(command: Callable[..., None]) -> Callable[..., None]:
    """Have a command say what it fails with in the format of its log."""

    @functools.wraps(command)
    def run_it(*, log_format: Format, **options: Any) -> None:
        if log_format == "text":
            command(log_format=log_format, **options)
            return
        from capflow.cli.logs import failures_as_json

        with failures_as_json():
            command(log_format=log_format, **options)

    return run_it


@click.command(
    epilog=examples(
        "capflow run --consumer filesystem:root=rows",
        "capflow run --consumer filesystem:root=rows --model demo --prompts prompts.jsonl",
        "capflow run --consumer duckdb:path=scores.duckdb,probes=happy.safetensors --metrics-address 9400",
    )
)
@click.option(
    "--consumer",
    "consumers",
    multiple=True,
    metavar="NAME[@INSTANCE]:KEY=VALUE,…",
    shell_complete=complete_consumer,
    help="A consumer or controller and its options; repeatable, the same one as NAME@INSTANCE. See `capflow plugins`.",
)
@click.option("--config", type=click.Path(path_type=Path), help="A TOML file with a [[consumer]] table for each.")
@click.option("--address", metavar="ADDRESS", help="Where to listen: ipc:///PATH or tcp://HOST:PORT.")
@click.option(
    "--key", metavar="NAME|PATH", help="The hub's key, for TCP: then only peers with a key get in. See `keys`."
)
@click.option("--insecure", is_flag=True, help="Allow an address that other machines can reach, without a key.")
@click.option(
    "--tap",
    "taps",
    multiple=True,
    metavar="ADDRESS",
    help="Watch the hub at this address, live, with consumers of policy drop or skip. It never waits for this hub. "
    "Repeat it for the hubs of an engine with several.",
)
@click.option("--tap-key", metavar="NAME|PATH", help="This side's key for --tap. Default: that of CAPFLOW_KEY.")
@click.option(
    "--drain-s",
    type=click.FloatRange(min=0),
    help="How long consumers that make progress may take at the end. Default: 20; with --model 60.",
)
@click.option(
    "--handover-s",
    type=click.FloatRange(min=0),
    help="How long running requests may go on at the end, while engines send new ones to their other hubs. Default: 0.",
)
@click.option("--model", metavar="MODEL", help="Run this model over --prompts, then end.")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="The prompts for --model, JSON Lines.")
@click.option(
    "--stay", is_flag=True, help="Run until Ctrl-C after the last prompt of --model: for consumers that show something."
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens for each answer.")
@click.option("--sites", multiple=True, metavar="HOOK:LAYER", help="Sites that carry a tap, with *; post_block:*.")
@click.option(
    "--steer-sites",
    multiple=True,
    metavar="HOOK:LAYER",
    help="Of these, those that can be steered; none. Default: all.",
)
@click.option("--steering", metavar="FILE", help="Steer every prompt of --model by this module: JSON, or vectors.")
@click.option(
    "--steering-modules", multiple=True, metavar="NAME=FILE", help="A module that prompts may name; repeatable."
)
@click.option(
    "--sae",
    "saes",
    multiple=True,
    metavar="[NAME=]PATH[@SITE]",
    help="An autoencoder by whose features prompts may be steered; repeatable.",
)
@click.option(
    "--steering-bank-bytes",
    type=click.IntRange(1, limits.BANK_BYTES_MAX),
    help="The memory for what steers. Default: 256 MiB.",
)
@click.option(
    "--on-divergence",
    type=click.Choice(ON_DIVERGENCE),
    help="The reaction to ranks that steer differently. Default: warn.",
)
@click.option(
    "--engine-name", metavar="NAME", help="What the engine of --model is called. Default: another name each time."
)
@click.option("--engine-arg", multiple=True, metavar="NAME=VALUE", help="An engine argument of vLLM; repeatable.")
@click.option("--sampling", multiple=True, metavar="NAME=VALUE", help="A sampling parameter of vLLM; repeatable.")
@click.option(
    "--policy",
    type=click.Choice([*map(str, POLICIES_OF_WORKERS)]),
    help="What a worker of --model does when its queue is full. Default: block.",
)
@click.option("--spool-dir", metavar="DIR", help="Where a worker with policy spill has its spool.")
@click.option("--spool-bytes", type=click.IntRange(min=1), help="How much it may hold. Default: 2 GiB.")
@click.option(
    "--spill-fallback", type=click.Choice([*map(str, FALLBACKS)]), help="What holds when it is full. Default: block."
)
@click.option(
    "--memory-bytes-max",
    type=click.IntRange(limits.MEMORY_BYTES_MIN, limits.MEMORY_BYTES_MAX),
    help="The memory for what peers send. Default: a quarter of the machine's.",
)
@METRICS_OPTION
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of standard error."
)
@click.option("--until-eof", is_flag=True, hidden=True, help="End when standard input does: with the parent process.")
@_failures_in_its_log
def run(
    consumers: tuple[str, ...],
    config: Path | None,
    address: str | None,
    key: str | None,
    insecure: bool,
    taps: tuple[str, ...],
    tap_key: str | None,
    drain_s: float | None,
    handover_s: float | None,
    model: str | None,
    prompts: Path | None,
    stay: bool,
    max_tokens: int,
    sites: tuple[str, ...],
    steer_sites: tuple[str, ...],
    steering: str | None,
    steering_modules: tuple[str, ...],
    saes: tuple[str, ...],
    steering_bank_bytes: int | None,
    on_divergence: str | None,
    engine_name: str | None,
    engine_arg: tuple[str, ...],
    sampling: tuple[str, ...],
    policy: str | None,
    spool_dir: str | None,
    spool_bytes: int | None,
    spill_fallback: str | None,
    memory_bytes_max: int | None,
    metrics_address: str | None,
    log_format: Format,
    until_eof: bool,
) -> None:
    """Run a hub with consumers.

    Alone it waits for engines until Ctrl-C; with --model and --prompts it runs that model and ends when all its
    prompts are through. The exit code is 1 when rows were lost or a consumer failed.
    """
    from capflow.cli.hub.running import HubRun
    from capflow.errors import UsageError, explain
    from capflow.hub.monitor.endpoint import parse_listen
    from capflow.plugins.configure import configure_all, load_plugins
    from capflow.transport.address import check_address, default_address, private_address

    if (model is None) != (prompts is None):
        given, missing = ("--prompts", "--model") if model is None else ("--model", "--prompts")
        raise UsageError(explain(given, got=f"no {missing}", expected="both or neither"))
    spill = {"spool_dir": spool_dir, "spool_bytes": spool_bytes, "spill_fallback": spill_fallback}
    outbound = {name: value for name, value in {"policy": policy, **spill}.items() if value is not None}
    _check_beside(outbound, model, policy, stay=stay)
    steers = {"steering": steering, "steering_modules": steering_modules, "steering_bank_bytes": steering_bank_bytes}
    steers |= {"steer_sites": steer_sites, "on_divergence": on_divergence, "saes": saes}
    steers = {name: value for name, value in steers.items() if value not in (None, ())}
    if model is None and (steers or engine_name is not None):
        option = "--" + next(iter(steers), "engine_name").replace("_", "-").replace("saes", "sae")
        raise UsageError(explain(option, got="no --model", expected="it beside", do="see `capflow serve` for a server"))
    _check_apart(model, taps, tap_key, handover_s)
    if taps and address is None:
        address = private_address("tap")
    address = check_address(address or default_address(), insecure=insecure or key is not None, where="--address")
    metrics = parse_listen(metrics_address, "--metrics-address")
    made, controllers = configure_all(consumers, config, load_plugins())
    if not made and not controllers:
        raise UsageError(explain("--consumer", got="none", expected="at least one", do="see `capflow plugins`"))
    if taps:
        from capflow.hub.watch import check_live

        check_live(made, controllers)
    job = None
    if model is not None and prompts is not None:
        from capflow.cli.engine.job import ModelJob, parse_pairs
        from capflow.cli.engine.prompts import read_prompts

        job = ModelJob(
            model=model,
            prompts=read_prompts(prompts),
            prompts_file=str(prompts),
            sites=sites or ("post_block:*",),
            max_tokens=max_tokens,
            engine=parse_pairs(engine_arg, "--engine-arg"),
            sampling=parse_pairs(sampling, "--sampling"),
            key=key,
            outbound=outbound,
            engine_name=engine_name,
            steering=steers,
        )
        job.check()
    running = HubRun(
        address,
        made,
        controllers,
        key=key,
        insecure=insecure,
        drain_s=drain_s,
        handover_s=handover_s or 0.0,
        memory_bytes_max=memory_bytes_max,
        ends=job is not None or until_eof,
        metrics=metrics,
        log_format=log_format,
    )
    if job is not None:
        from capflow.cli.engine.job import run_job

        sys.exit(run_job(running, job, stay=stay))
    with running, contextlib.ExitStack() as stack:
        if taps:
            from capflow.hub.watch import tap_all

            tap_all(stack, taps, running.hub, key=tap_key, insecure=insecure, own_key=key)
        if until_eof:
            threading.Thread(target=_stop_at_eof, args=(running,), name="capflow-stdin", daemon=True).start()
        running.wait()
    sys.exit(running.exit_code)


def _check_beside(outbound: dict[str, Any], model: str | None, policy: str | None, *, stay: bool) -> None:
    """Raise UsageError for an option without the model or the policy that it is for."""
    from capflow.errors import UsageError, explain

    if stay and model is None:
        do = "without a model the hub stays anyway"
        raise UsageError(explain("--stay", got="no --model", expected="it beside", do=do))
    for name in outbound:
        if model is None or (name != "policy" and policy != "spill"):
            missing = "no --model" if model is None else "no --policy spill"
            do = "say the policy where the engine is started" if model is None else ""
            raise UsageError(explain("--" + name.replace("_", "-"), got=missing, expected="it beside", do=do))


def _check_apart(model: str | None, taps: tuple[str, ...], tap_key: str | None, handover_s: float | None) -> None:
    """Raise UsageError for options that exclude each other."""
    from capflow.errors import UsageError, explain

    if handover_s and (model is not None or taps):
        got = "--model with it" if model is not None else "--tap with it"
        do = "it is for a hub of engines that have several"
        raise UsageError(explain("--handover-s", got=got, expected="neither --model nor --tap", do=do))
    if taps and model is not None:
        raise UsageError(explain("--tap", got="--model with it", expected="one of them"))
    if not taps and tap_key is not None:
        raise UsageError(explain("--tap-key", got="no --tap", expected="both or neither"))


def _stop_at_eof(running: HubRun) -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not by `sys.stdin`, whose lock the interpreter takes when it ends
        pass
    running.stopped.set()
