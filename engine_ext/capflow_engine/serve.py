"""`capflow serve MODEL …`: vLLM's own OpenAI-compatible server, its engine tapped.

Takes every flag that `vllm serve` takes, and `--hub`, `--sites`, `--policy`, `--capture-wait-s` and `--insecure`. Requests that want
their own capture or steering say so in fields of their body, which `capflow_engine.http` adds to the server.
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from capflow import limits
from capflow.address import check_address, default_address
from capflow.errors import CapflowError, UsageError, explain
from capflow_engine import compat, compat_model
from capflow_engine.settings import SITES_DEFAULT, Settings, engine_arguments


def parse(arguments: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """Return vLLM's `serve` command and its parsed arguments, with capflow's put in."""
    own = argparse.ArgumentParser(prog="capflow serve", add_help=False, allow_abbrev=False)
    own.add_argument("--hub", default=None)
    own.add_argument("--sites", action="append", default=None)
    own.add_argument("--policy", choices=("block", "drop"), default="block")
    own.add_argument("--insecure", action="store_true")
    own.add_argument("--capture-wait-s", type=_seconds, default=limits.CAPTURE_WAIT_S_DEFAULT)
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
    hub = mine.hub or default_address()
    check_address(hub, insecure=mine.insecure)
    from vllm.engine.arg_utils import AsyncEngineArgs

    if args.model_tag is not None:
        args.model = args.model_tag
    user = dict(args.additional_config or {})
    _, sites = compat_model.check_model(AsyncEngineArgs.from_cli_args(args), mine.sites or SITES_DEFAULT)
    settings = Settings(
        engine=uuid.uuid4().hex,
        hub=hub,
        sites=sites,
        policy=mine.policy,
        hub_wait_s=1.0,
        insecure=mine.insecure,
        capture_wait_s=mine.capture_wait_s,
        user=user,
    )
    for name, value in engine_arguments(settings).items():
        setattr(args, name, value)
    return serve, args


def _seconds(text: str) -> float:
    """Return how long a response may be held; raise UsageError for what is no such time."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= limits.CAPTURE_WAIT_S_MAX:
        expected = f"more than 0 and at most {limits.CAPTURE_WAIT_S_MAX:g} seconds"
        raise UsageError(explain("--capture-wait-s", got=text, expected=expected))
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until it is stopped; return the exit code."""
    try:
        compat.require()
        compat.enable_endpoint_plugin("capflow")
        serve, args = parse(sys.argv[1:] if arguments is None else arguments)
        compat.prepare_environment({"kv_cache_memory_bytes": args.kv_cache_memory_bytes})
        serve.validate(args)
        serve.cmd(args)
    except UsageError as e:
        print(f"capflow: {e}", file=sys.stderr)
        return 2
    except CapflowError as e:
        print(f"capflow: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
