"""`capflow serve MODEL …`: vLLM's own OpenAI-compatible server, its engine tapped.

Takes every flag that `vllm serve` takes, and `--hub` (once for each hub), `--key`, `--sites`, `--policy`, `--spool-dir`, `--spool-bytes`, `--spill-fallback`,
`--capture-wait-s`, `--insecure`, `--steering-modules`, `--steering-api-key`, `--steering-bank-bytes`,
`--steering-body-bytes-max`, `--grpc-port` and `--grpc-host`. Requests that want their
own capture or steering say so in fields of their body, which `capflow_engine.http` adds to the server.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from capflow import limits
from capflow.consumer import POLICY_DEFAULT, Fallback, Policy
from capflow.errors import CapflowError, UsageError, explain
from capflow.message import ModelInfo
from capflow.runtime import private_directory
from capflow.steering import Steering
from capflow_engine import compat, compat_model, keys
from capflow_engine.fit import Fit
from capflow_engine.holdings import Size
from capflow_engine.hubs import hubs_at
from capflow_engine.module import as_written, load_module
from capflow_engine.rpc import port
from capflow_engine.serving import Serving
from capflow_engine.settings import SITES_DEFAULT, STEERING_BANK_BYTES, Outbound, Settings, engine_arguments
from capflow_engine.store import SteeringStore


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(message.removeprefix("argument "))


def parse(arguments: Sequence[str]) -> tuple[Any, argparse.Namespace, dict[str, Steering]]:
    """Return vLLM's `serve` command, its parsed arguments with capflow's put in, and the modules to begin with."""
    own = _Parser(prog="capflow serve", add_help=False, allow_abbrev=False)
    own.add_argument("--hub", action="append", default=[])
    own.add_argument("--key", default=None)
    own.add_argument("--sites", action="append", default=None)
    own.add_argument("--policy", choices=get_args(Policy), default=POLICY_DEFAULT)
    own.add_argument("--spool-dir", default=None)
    own.add_argument("--spool-bytes", type=_bytes(1, limits.SPOOL_BYTES_MAX), default=None)
    own.add_argument("--spill-fallback", choices=get_args(Fallback), default=None)
    own.add_argument("--insecure", action="store_true")
    own.add_argument("--capture-wait-s", type=_seconds, default=limits.CAPTURE_WAIT_S_DEFAULT)
    own.add_argument("--steering-modules", action="extend", nargs="+", default=[], metavar="NAME=PATH")
    own.add_argument(keys.FLAG, action="append", default=[])
    own.add_argument("--steering-bank-bytes", type=_bytes(1, limits.BANK_BYTES_MAX), default=STEERING_BANK_BYTES)
    own.add_argument(
        "--steering-body-bytes-max", type=_bytes(1, limits.BODY_BYTES_MAX), default=limits.BODY_BYTES_DEFAULT
    )
    own.add_argument("--grpc-port", type=port.number, default=None)
    own.add_argument("--grpc-host", default=port.HOST_DEFAULT)
    mine, rest = own.parse_known_args(list(arguments))

    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="capflow")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(required=True))
    args = parser.parse_args(["serve", *rest])
    for name in ("worker_cls", "scheduler_cls"):
        if getattr(args, name, None) not in (None, "auto"):
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                explain(flag, got=str(getattr(args, name)), expected="to be left out; capflow brings its own")
            )
    hubs = hubs_at(mine.hub, mine.key, insecure=mine.insecure, where="--hub")
    from vllm.engine.arg_utils import AsyncEngineArgs

    if args.model_tag is not None:
        args.model = args.model_tag
    user = dict(args.additional_config or {})
    with compat_model.explaining(args.model):
        engine_args = AsyncEngineArgs.from_cli_args(args)
    tapped = compat_model.check_model(engine_args, mine.sites or SITES_DEFAULT)
    settings = Settings(
        engine=uuid.uuid4().hex,
        hubs=hubs,
        sites=tapped.sites,
        fixed=tapped.fixed,
        outbound=Outbound.of(mine.policy, mine.spool_dir, mine.spool_bytes, mine.spill_fallback),
        hub_wait_s=1.0,
        capture_wait_s=mine.capture_wait_s,
        steering_bank_bytes=mine.steering_bank_bytes,
        user=user,
    )
    for name, value in engine_arguments(settings).items():
        setattr(args, name, value)
    secrets = keys.keys_of(mine.steering_api_key, os.environ.pop(keys.ENVIRONMENT_VARIABLE, None))
    within = args.uds is not None or keys.is_loopback(args.host)
    if mine.grpc_port is not None:
        within = within and keys.is_loopback(mine.grpc_host)
    args.capflow = Serving(
        keys=keys.Keys(secrets, open=within or mine.insecure),
        body_bytes_max=mine.steering_body_bytes_max,
        rpc_address=None if mine.grpc_port is None else port.address(mine.grpc_host, mine.grpc_port),
    )
    modules = {}
    if mine.steering_modules:
        width = engine_args.create_model_config().get_hidden_size()
        info = ModelInfo(args.model, tapped.num_layers, width, "", tapped.sites, fixed=tapped.fixed)
        size = Size.of(mine.steering_bank_bytes, width, engine_args.max_num_seqs or 0)
        modules = _modules(mine.steering_modules, Fit(info, size))
    return serve, args, modules


def _modules(given: Sequence[str], fit: Fit) -> dict[str, Steering]:
    """Return the modules in files, `NAME=PATH` each, by name; raise UsageError for one that does not fit the model or the bank."""
    modules: dict[str, Steering] = {}
    for one in given:
        name, equals, path = one.partition("=")
        if not (name and equals and path):
            raise UsageError(explain("--steering-modules", got=one, expected="NAME=PATH"))
        if name in modules:
            raise UsageError(explain("--steering-modules", got=f"{name} twice", expected="each name once"))
        modules[name] = load_module(path)
        try:
            with as_written():
                fit.check(modules[name], modules[name])
        except UsageError as e:
            raise UsageError(f"{path}: {e}") from e
    return modules


def _bytes(low: int, high: int) -> Callable[[str], int]:
    """Return what reads a number of bytes within bounds."""

    def number_of_bytes(text: str) -> int:
        if not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(explain("bytes", got=text, expected=f"{low}..{high}"))
        return int(text)

    return number_of_bytes


def _seconds(text: str) -> float:
    """Return how long a response may be held."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= limits.CAPTURE_WAIT_S_MAX:
        expected = f"more than 0 and at most {limits.CAPTURE_WAIT_S_MAX:g}"
        raise argparse.ArgumentTypeError(explain("seconds", got=text, expected=expected))
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until it is stopped; return the exit code."""
    directory: Path | None = None
    held: socket.socket | None = None
    try:
        compat.require()
        compat.enable_endpoint_plugin("capflow")
        serve, args, modules = parse(sys.argv[1:] if arguments is None else arguments)
        compat.prepare_environment({"kv_cache_memory_bytes": args.kv_cache_memory_bytes})
        serve.validate(args)
        if args.capflow.rpc_address is not None:
            held = port.hold(args.capflow.rpc_address)
        directory = private_directory("steering")
        store = SteeringStore(directory)
        for name, module in modules.items():
            store.register(name, module)
        args.capflow = dataclasses.replace(args.capflow, directory=directory)
        serve.cmd(args)
    except UsageError as e:
        print(f"capflow: {e}", file=sys.stderr)
        return 2
    except CapflowError as e:
        print(f"capflow: {e}", file=sys.stderr)
        return 1
    finally:
        if held is not None:
            held.close()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
