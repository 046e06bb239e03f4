"""The server of `capflow serve MODEL …`: vLLM's own OpenAI-compatible server, its engine tapped.

It takes every option of `vllm serve` and those of `capflow.serve_options`. Requests ask for capture and steering in
fields of their bodies, which `capflow_engine.serve.plugin` adds to the server.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from capflow import limits
from capflow.errors import CapflowError, UsageError, explain
from capflow.saes.named import digest_of
from capflow.serve_options import GRPC_PORT, SAE, engine_options, flags
from capflow.steering.request import Steering
from capflow.system.runtime import private_directory
from capflow.text.engine_name import new_engine
from capflow.text.printable import printable
from capflow.text.suggestion import did_you_mean
from capflow_engine.compat import engine as compat
from capflow_engine.compat import model as compat_model
from capflow_engine.compat import processor
from capflow_engine.compat.launch import Launch, end_workers
from capflow_engine.compat.versions.surface import GRPC, HTTP
from capflow_engine.hubs import hubs_at
from capflow_engine.jobs import demo
from capflow_engine.serve import api_keys
from capflow_engine.serve.command import Command
from capflow_engine.serve.ending import Ending
from capflow_engine.serve.rpc import port
from capflow_engine.serve.serving import Serving
from capflow_engine.settings import SITES_DEFAULT, STEERING_BANK_BYTES, Outbound, Settings, engine_arguments
from capflow_engine.steering.budget import Size
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.module import load_modules
from capflow_engine.steering.saes import load_for
from capflow_engine.steering.store import SteeringStore

logger = logging.getLogger("vllm.capflow")


def parse(arguments: Sequence[str]) -> tuple[Any, argparse.Namespace, dict[str, Steering]]:
    """Return vLLM's `serve` command, its parsed arguments with capflow's added, and the modules to begin with."""
    mine, rest = engine_options().parse_known_args(list(arguments))
    ending = Ending()
    command = Command(mine.command_fd, ending)
    outbound = Outbound.of(mine.policy, mine.spool_dir, mine.spool_bytes, mine.spill_fallback)
    serve, args = _vllm_arguments(rest)
    hubs = hubs_at(mine.hub, mine.key, spares=mine.spare_hub, insecure=mine.insecure, where="--hub")
    from vllm.engine.arg_utils import AsyncEngineArgs

    user = dict(args.additional_config or {})
    with compat_model.explaining(args.model):
        engine_args = AsyncEngineArgs.from_cli_args(args)
    if args.headless and mine.grpc_port is not None:
        raise UsageError(explain(GRPC_PORT, got="--headless with it", expected="one of them"))
    if mine.grpc_port is not None:
        compat.need(GRPC)
    tapped = compat_model.check_model(engine_args, mine.sites or SITES_DEFAULT, mine.steer_sites)
    if slow := processor.advice(engine_args, "--dtype float32"):
        logger.warning("capflow: %s", slow)
    _check_free(args)
    inside = command.checked(tapped)
    if inside is not None:
        if mine.spare_hub:
            raise UsageError(explain("--spare-hub", got="with --consumer", expected="hubs that run by themselves"))
        hubs = hubs_at([inside], mine.key, insecure=True)  # the command checked its own hub
    hub_from = "--hub" if inside is None else "--address"
    launched = Launch.of(engine_args, headless=args.headless)
    launched.check(hubs, mine.engine_id, hub_from=hub_from, id_from="--engine-id")
    bank_bytes = STEERING_BANK_BYTES if mine.steering_bank_bytes is None else mine.steering_bank_bytes
    settings = Settings(
        engine=new_engine(mine.engine_name, mine.engine_id, where="--engine-name", where_start="--engine-id"),
        hubs=hubs,
        spares=len(mine.spare_hub),
        **tapped.settings,
        outbound=outbound,
        hub_wait_s=1.0,
        capture_wait_s=mine.capture_wait_s,
        steering_bank_bytes=bank_bytes,
        on_divergence=mine.on_divergence,
        shared=mine.engine_id is not None,
        user=user,
    )
    for name, value in engine_arguments(settings).items():
        setattr(args, name, value)
    secrets = api_keys.keys_of(mine.steering_api_key, os.environ.pop(api_keys.ENVIRONMENT_VARIABLE, None))
    within = args.uds is not None or api_keys.is_loopback(args.host)
    if mine.grpc_port is not None:
        within = within and api_keys.is_loopback(mine.grpc_host)
    running_s = mine.shutdown_timeout
    if running_s is None:  # vLLM's own option may be in its --config
        running_s = float(args.shutdown_timeout) or limits.SHUTDOWN_S_DEFAULT
    # vLLM's timeout is for the whole end; then it kills. capflow ends the requests before.
    args.shutdown_timeout = math.ceil(running_s + limits.ANSWERS_S + limits.GIVE_UP_S + limits.ENGINE_END_S_MAX)
    ending.running_s = running_s
    described = functools.cache(functools.partial(compat_model.info_of, engine_args, tapped))
    saes = load_for(mine.sae, described, SAE)
    args.capflow = Serving(
        keys=api_keys.Keys(secrets, open=within or mine.insecure),
        body_bytes_max=mine.steering_body_bytes_max,
        rpc_address=None if mine.grpc_port is None else port.address(mine.grpc_host, mine.grpc_port),
        ending=ending,
        saes=tuple(mine.sae),
        saes_digest=digest_of(saes) if saes else "",
    )
    modules = {}
    if mine.steering_modules:
        size = Size.of(bank_bytes, described().steered_width, engine_args.max_num_seqs or 0)
        modules = load_modules(mine.steering_modules, Fit(described(), size, saes))
    return serve, args, modules


def _vllm_arguments(arguments: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """Return vLLM's `serve` command and its parsed arguments. Raises UsageError for wrong ones."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class VLLMParser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            do = f"{_meant(message, options)} see `capflow serve --help=all`".lstrip()
            raise UsageError(explain(message.removeprefix("argument "), do=do))

    parser = VLLMParser(prog="capflow")
    serve = ServeSubcommand()
    options = serve.subparser_init(parser.add_subparsers(required=True))
    try:
        args = parser.parse_args(["serve", *arguments])
    except UsageError:
        raise
    except (ValueError, OSError) as e:
        raise UsageError(str(e)) from e
    if args.model_tag is None:
        raise UsageError(explain("MODEL", got="none", expected="capflow serve MODEL"))
    args.model = demo.resolved(args.model_tag, progress=lambda stage: logger.info("capflow: %s", stage))
    if args.model != args.model_tag:
        args.served_model_name = args.served_model_name or [args.model_tag]
        args.model_tag = args.model
    for name in ("worker_cls", "scheduler_cls"):
        if getattr(args, name, None) not in (None, "auto"):
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                explain(flag, got=str(getattr(args, name)), expected="to be left out; capflow brings its own")
            )
    return serve, args


def _meant(message: str, parser: argparse.ArgumentParser) -> str:
    """Return a question for the closest options, if the error message of a parser is about an unknown option."""
    unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
    if unknown is None:
        return ""
    theirs = (flag for action in parser._actions for flag in action.option_strings)  # noqa: SLF001  no other way
    return did_you_mean(unknown[1], [*flags(), *theirs])


def _check_free(args: argparse.Namespace) -> None:
    """Raise UsageError if the server cannot listen on its address."""
    if args.headless or getattr(args, "data_parallel_multi_port_external_lb", False):  # not in every vLLM
        return
    where, got = ("--port", f"{args.host or ''}:{args.port}") if args.uds is None else ("--uds", args.uds)
    try:
        if args.uds is not None:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(args.uds)
            Path(args.uds).unlink()
            return
        (family, kind, _, _, place), *_ = socket.getaddrinfo(args.host or "0.0.0.0", args.port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            # Earlier connections may still be closing.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen()
    except OSError as e:
        raise UsageError(explain(where, got=f"{got}, {(e.strerror or str(e)).lower()}", expected="a free one")) from e


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until it is stopped. Returns the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until vLLM takes the signals
    try:
        with contextlib.ExitStack() as stack:
            return _serve(sys.argv[1:] if arguments is None else arguments, stack)
    except UsageError as e:
        print(printable(f"capflow: {e}"), file=sys.stderr)
        return 2
    except CapflowError as e:
        print(printable(f"capflow: {e}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _serve(arguments: Sequence[str], stack: contextlib.ExitStack) -> int:
    """Serve. Returns the exit code.

    stack: closed when the server has ended.
    """
    compat.require()
    compat.need(HTTP)
    compat.enable_endpoint_plugin("capflow")
    # As vLLM's own command does: a process that has threads is not forked for an engine on a GPU.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    serve, args, modules = parse(arguments)
    compat.prepare_environment({"kv_cache_memory_bytes": args.kv_cache_memory_bytes})
    ending: Ending = args.capflow.ending
    if args.headless:  # the workers may be children of this process
        compat.let_workers_end()
        ending.before = end_workers
    serve.validate(args)
    if args.capflow.rpc_address is not None:
        stack.enter_context(contextlib.closing(port.hold(args.capflow.rpc_address)))
    directory = private_directory("steering")
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    store = SteeringStore(directory)
    for name, module in modules.items():
        store.register(name, module)
    args.capflow = dataclasses.replace(args.capflow, directory=directory)
    alone = args.api_server_count in (None, 1) and not args.headless
    serve.cmd(args)
    # With a count, the API servers are processes of their own.
    if alone and args.api_server_count is None and not ending.begun:
        raise CapflowError(explain("the server ended on its own", do="see its log"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
