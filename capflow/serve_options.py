"""capflow's own options of `capflow serve`; every other option is vLLM's.

`hub_options` are for the hub that the command runs beside the server, `engine_options` for the server. Both sides parse
with these parsers. So each option is defined once, and a wrong one is refused before vLLM is imported.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from capflow import limits
from capflow.buffers.policy import FALLBACKS, POLICIES_OF_WORKERS, POLICY_DEFAULT
from capflow.divergence import ON_DIVERGENCE, ON_DIVERGENCE_DEFAULT
from capflow.errors import UsageError
from capflow.text.engine_name import checked

HUB_FLAGS = (
    "--consumer",
    "--consumer-config",
    "--address",
    "--drain-s",
    "--memory-bytes-max",
    "--metrics-address",
    "--log-format",
)
"""The options of the hub inside. It runs only with `--consumer` or `--consumer-config`."""

STEERING_KEY = "--steering-api-key"
SAE = "--sae"
GRPC_PORT = "--grpc-port"

_USAGE = "capflow serve MODEL [options of capflow and of vLLM]"
_DESCRIPTION = """Serve MODEL with vLLM's OpenAI-compatible server, with capture and steering.
With --consumer the command also runs a hub; without it the server connects to
a running one (`capflow run`)."""
_EPILOG = """Examples:
  capflow serve demo --consumer filesystem:root=rows --port 8000
  capflow serve Qwen/Qwen3-8B --hub ipc:///run/hub.sock --max-model-len 8192

Every option of `vllm serve` is an option of this command, too:
  capflow serve --help=all             all options, capflow's first
  capflow serve --help=ModelConfig     the options of a group, such as Frontend
  capflow serve --help=max-model-len   one option"""


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations and without --help, which raises UsageError."""

    def __init__(self, parents: Sequence[argparse.ArgumentParser] = ()) -> None:
        super().__init__(
            prog="capflow serve",
            usage=_USAGE,
            description=_DESCRIPTION,
            epilog=_EPILOG,
            parents=list(parents),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(message.removeprefix("argument "))


def hub_options() -> Parser:
    """Return the parser for the options of the hub inside."""
    parser = Parser()
    hub = parser.add_argument_group("a hub in the same command")
    hub.add_argument(
        "--consumer",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,…",
        help="run a hub with this consumer or controller; repeatable, see `capflow plugins`",
    )
    hub.add_argument(
        "--consumer-config", type=Path, metavar="FILE", help="a TOML file with a [[consumer]] table for each"
    )
    hub.add_argument("--address", help="the hub's address (default: a private socket of this command)")
    hub.add_argument(
        "--drain-s",
        type=_seconds(0.0, limits.SHUTDOWN_S_MAX),
        metavar="SECONDS",
        help=f"time at the end for consumers that make progress (default: {limits.DRAIN_S_MAX:g})",
    )
    hub.add_argument(
        "--memory-bytes-max",
        type=_bytes(limits.MEMORY_BYTES_MAX, limits.MEMORY_BYTES_MIN),
        metavar="BYTES",
        help="the hub's memory for data from peers (default: a quarter of the machine's)",
    )
    hub.add_argument("--metrics-address", metavar="[HOST:]PORT", help="serve the hub's /metrics, /healthz and /readyz")
    hub.add_argument("--log-format", choices=["text", "json"], help="format of the hub's log (default: text)")
    return parser


def engine_options() -> Parser:
    """Return the parser for the options of the server."""
    parser = Parser()
    _add_capture(parser)
    _add_queue(parser)
    _add_steering(parser)
    _add_server(parser)
    # A descriptor of the command that started this process.
    parser.add_argument("--command-fd", type=int, default=None, help=argparse.SUPPRESS)
    return parser


def help_text() -> str:
    """Return the command's help."""
    return Parser([hub_options(), engine_options()]).format_help()


def help_about(name: str) -> str:
    """Return the help of capflow's group or option NAME; empty if capflow has none of this name."""
    flag = f"--{name.lstrip('-').lower().replace('_', '-')}"
    for section in help_text().split("\n\n"):
        title, _, options = section.partition(":\n")
        if title == "Examples":
            break
        if options and title.casefold() == name.casefold():
            return section
        # An option's line, and the lines below it that are indented further.
        option = re.search(rf"^  {re.escape(flag)}(?![\w-]).*(\n {{4,}}.*)*", options, re.MULTILINE)
        if option is not None:
            return f"{title}:\n{option[0]}"
    return ""


def flags() -> list[str]:
    """Return the names of capflow's options."""
    actions = [*hub_options()._actions, *engine_options()._actions]  # noqa: SLF001  argparse has no other way
    return [flag for action in actions if action.help != argparse.SUPPRESS for flag in action.option_strings]


def _add_capture(parser: Parser) -> None:
    group = parser.add_argument_group("capture")
    group.add_argument(
        "--hub",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="address of a hub that rows are sent to; repeatable, in order",
    )
    group.add_argument(
        "--spare-hub",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="address of a hub that may start later; from its first answer on it has its share of new requests; "
        "repeatable, in order, after the hubs",
    )
    group.add_argument("--key", metavar="NAME|PATH", help="this engine's key, for hubs with keys")
    group.add_argument(
        "--engine-name",
        type=_engine_name,
        metavar="NAME",
        help="this engine's name in data and at its hubs (default: a new name at each start)",
    )
    group.add_argument(
        "--engine-id",
        type=_engine_name,
        metavar="ID",
        help="what all commands of one engine are given, new at each start (default: a new one at each command)",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="allow a hub on another machine without keys, and changes to steering from other machines without a key",
    )
    group.add_argument(
        "--sites",
        action="append",
        metavar="HOOK:LAYER",
        help="sites to tap; * means every layer; repeatable (default: post_block:*)",
    )
    group.add_argument(
        "--steer-sites",
        action="append",
        metavar="HOOK:LAYER",
        help="tapped sites that can be steered, or none; others can only be captured; repeatable (default: all)",
    )
    group.add_argument(
        "--capture-wait-s",
        type=_seconds(0.0, limits.CAPTURE_WAIT_S_MAX, above=True),
        default=limits.CAPTURE_WAIT_S_DEFAULT,
        metavar="SECONDS",
        help="how long a request with capture_wait waits for its results (default: %(default)g)",
    )


def _add_queue(parser: Parser) -> None:
    group = parser.add_argument_group("when a worker's queue is full")
    group.add_argument(
        "--policy",
        choices=[*map(str, POLICIES_OF_WORKERS)],
        default=str(POLICY_DEFAULT),
        help="policy for new rows (default: %(default)s)",
    )
    group.add_argument("--spool-dir", metavar="DIR", help="directory for the spool of --policy spill")
    group.add_argument(
        "--spool-bytes", type=_bytes(limits.SPOOL_BYTES_MAX), metavar="BYTES", help="size of the spool (default: 2 GiB)"
    )
    group.add_argument(
        "--spill-fallback", choices=[*map(str, FALLBACKS)], help="policy when the spool is full (default: block)"
    )


def _add_steering(parser: Parser) -> None:
    group = parser.add_argument_group("steering")
    group.add_argument(
        "--steering-modules",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="steering modules that requests may name",
    )
    group.add_argument(
        SAE,
        action="append",
        default=[],
        metavar="[NAME=]PATH[@SITE]",
        help="an autoencoder or transcoder (SAELens, Gemma Scope, sparsify) by whose features requests may be steered; "
        "repeatable",
    )
    group.add_argument(
        STEERING_KEY,
        action="append",
        default=[],
        metavar="KEY",
        help="a key that is required to change the global steering and modules; repeatable",
    )
    group.add_argument(
        "--steering-bank-bytes",
        type=_bytes(limits.BANK_BYTES_MAX),
        metavar="BYTES",
        help="memory for the vectors of running requests (default: 256 MiB)",
    )
    group.add_argument(
        "--on-divergence",
        choices=ON_DIVERGENCE,
        default=ON_DIVERGENCE_DEFAULT,
        help="reaction to ranks that steer differently (default: %(default)s)",
    )
    group.add_argument(
        "--steering-body-bytes-max",
        type=_bytes(limits.BODY_BYTES_MAX),
        default=limits.BODY_BYTES_DEFAULT,
        metavar="BYTES",
        help="largest body of a request (default: 256 MiB)",
    )


def _add_server(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--shutdown-timeout",
        type=_seconds(0.0, limits.SHUTDOWN_S_MAX),
        metavar="SECONDS",
        help="time for running requests after the first SIGINT or SIGTERM; then they are aborted and their answers so "
        f"far are sent (default: {limits.SHUTDOWN_S_DEFAULT:g})",
    )
    group.add_argument(GRPC_PORT, type=_port, metavar="PORT", help="also serve gRPC")
    group.add_argument("--grpc-host", default="127.0.0.1", metavar="HOST", help="gRPC address (default: %(default)s)")


def _bytes(high: int, low: int = 1) -> Callable[[str], int]:
    """Return a function that reads a number of bytes within bounds."""

    def number_of_bytes(text: str) -> int:
        if not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"got {text or repr(text)}, expected {low}..{high} bytes")
        return int(text)

    return number_of_bytes


def _seconds(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """Return a function that reads a number of seconds within bounds.

    above: exclude the lower bound.
    """

    def number_of_seconds(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not low <= seconds <= high or (above and seconds == low):
            begin = f"more than {low:g} and at most" if above else f"{low:g} to"
            raise argparse.ArgumentTypeError(f"got {text or repr(text)}, expected {begin} {high:g} seconds")
        return seconds

    return number_of_seconds


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"got {text or repr(text)}, expected 1..{2**16 - 1}")
    return int(text)


def _engine_name(text: str) -> str:
    try:
        return checked(text, where="")
    except UsageError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
