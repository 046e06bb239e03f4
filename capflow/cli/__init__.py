"""The command line. Each command is a module of its own, imported when it is run.

Every error is one line on standard error, `capflow: MESSAGE`. The exit code is 2 if the user must change the command or
its input, 1 if the command failed, and 130 after an interrupt. `CAPFLOW_TRACEBACK=1` shows where an unexpected error
came from.

Invariant: showing help imports no command, no plugin and neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

import click

from capflow.errors import CapflowError, UsageError
from capflow.text.printable import printable

COMMANDS: dict[str, tuple[str, str, str]] = {
    "abort": ("capflow.cli.hub.act", "abort", "Stop a running request."),
    "act": ("capflow.cli.hub.act", "act", "Send several actions on running requests."),
    "dashboard": ("capflow.cli.hub.dashboard", "dashboard", "Show a hub or stored rows, live in a browser."),
    "doctor": (
        "capflow.cli.model.doctor",
        "doctor",
        "Show versions, what is missing, and whether a capture works here.",
    ),
    "experiment": (
        "capflow.cli.engine.experiment",
        "experiment",
        "Compare ways to steer on the same prompts, from a TOML file.",
    ),
    "export": ("capflow_consumers.export.command", "export", "Write a captured data set in another format."),
    "freeze": ("capflow.cli.hub.act", "freeze", "Take back all steering but the requests' own, until unfreeze."),
    "gain": ("capflow.cli.hub.act", "gain", "Scale what an owner contributes to requests."),
    "inspect": ("capflow_consumers.inspect.command", "inspect", "Show what a captured data set holds; draw its norms."),
    "keys": ("capflow.cli.keys", "keys", "Make keys for TCP, and allow them to connect to a hub."),
    "plugin": ("capflow.cli.plugin", "plugin", "Write a package with a consumer of your own."),
    "plugins": ("capflow.cli.plugins", "plugins", "List the consumers and controllers that are installed."),
    "probe": ("capflow.cli.probe.command", "probe", "Fit a probe on labelled captures, or evaluate one."),
    "query": (
        "capflow_consumers.duckdb.command",
        "query",
        "Run SQL on the duckdb consumer's database, running or not.",
    ),
    "record": ("capflow.cli.engine.record", "record", "Store raw frames, to replay them."),
    "replay": (
        "capflow.cli.hub.replay",
        "replay",
        "Give a recording or a data set to consumers, as if engines were live.",
    ),
    "result": ("capflow.cli.hub.result", "result", "Show the capture results of requests."),
    "rollouts": ("capflow.cli.engine.rollouts", "rollouts", "Answer prompts under vectors and scales, into a file."),
    "run": ("capflow.cli.engine.run", "run", "Run a hub with consumers, alone or with a model."),
    "serve": (
        "capflow.cli.engine.serve",
        "serve",
        "Serve a model with vLLM's OpenAI-compatible server, with capture and steering.",
    ),
    "sites": ("capflow.cli.model.sites", "sites", "Show the sites of a model, and which of them would be tapped."),
    "spool": ("capflow.cli.hub.spool", "spool", "Look into a spool, verify it, or empty it."),
    "status": ("capflow.cli.hub.status", "status", "Show a running hub's counters."),
    "steer": ("capflow.cli.hub.act", "steer", "Add a vector to a running request."),
    "top": ("capflow.cli.hub.top", "top", "Watch a running hub: sessions, queues, credit, drops and rates."),
    "unfreeze": ("capflow.cli.hub.act", "unfreeze", "End `freeze`."),
    "unsteer": ("capflow.cli.hub.act", "unsteer", "Remove the vectors that `steer` added."),
    "vectors": ("capflow.cli.engine.vectors", "vectors", "Make steering vectors from pairs of prompts."),
}
"""Each command's module, its name there and its line of help, so that help imports no command."""

_TRACEBACK_VARIABLE = "CAPFLOW_TRACEBACK"


class LazyGroup(click.Group):
    """The commands of `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        """Return the names of the commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  click's signature
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module, name, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002  click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the commands' lines of help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][2]) for name in sorted(COMMANDS)])


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from capflow import __version__

        click.echo(f"capflow {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def cli() -> None:
    """Capture and steer what a language model computes while vLLM serves it."""


def main() -> NoReturn:
    """Run the command line and exit."""
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as e:
        click.echo(e.ctx.get_help() if e.ctx is not None else str(e))
        code = 2
    except click.ClickException as e:
        code = _fail(e.format_message(), 2)
    except UsageError as e:
        code = _fail(str(e), 2)
    except CapflowError as e:
        code = _fail(str(e), 1)
    except (click.Abort, KeyboardInterrupt):
        code = _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as e:
        if os.environ.get(_TRACEBACK_VARIABLE):
            raise
        code = _fail(f"unexpected {type(e).__name__}: {e}; set {_TRACEBACK_VARIABLE}=1 to see where", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    line = printable(" ".join(message.split()))
    print(f"capflow: {line}", file=sys.stderr)
    return code
