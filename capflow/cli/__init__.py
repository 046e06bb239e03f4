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
from typing import TYPE_CHECKING, NoReturn

import click

from capflow.errors import CapflowError, UsageError, explain
from capflow.text.printable import printable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Capture and serve": {
        "run": ("capflow.cli.engine.run", "Run a hub with consumers, alone or with a model."),
        "serve": ("capflow.cli.engine.serve", "Serve a model with vLLM, with capture and steering."),
        "record": ("capflow.cli.engine.record", "Store raw frames, to replay them."),
        "replay": ("capflow.cli.hub.replay", "Give a recording or a data set to consumers."),
    },
    "Look at a running hub": {
        "status": ("capflow.cli.hub.status", "Show a hub's counters."),
        "top": ("capflow.cli.hub.top", "Watch a hub: rates, requests, queues, credit and losses."),
        "dashboard": ("capflow.cli.hub.dashboard", "Show a hub or stored rows, live in a browser."),
        "result": ("capflow.cli.hub.result", "Show the capture results of requests."),
    },
    "Look at captured data": {
        "inspect": ("capflow_consumers.inspect.command", "Show what a data set holds; draw its norms."),
        "query": ("capflow_consumers.duckdb.command", "Run SQL on the duckdb consumer's database."),
        "lens": ("capflow.cli.lens.command", "Show what each layer would predict; fit lenses."),
        "features": ("capflow_consumers.features.command", "Write the active SAE features of a data set."),
        "export": ("capflow_consumers.export.command", "Write a data set in another format."),
    },
    "Steer running requests": {
        "steer": ("capflow.cli.hub.act", "Add a vector to a running request."),
        "unsteer": ("capflow.cli.hub.act", "Remove the vectors that `steer` added."),
        "gain": ("capflow.cli.hub.act", "Scale what an owner contributes to requests."),
        "freeze": ("capflow.cli.hub.act", "Take back all steering but the requests' own."),
        "unfreeze": ("capflow.cli.hub.act", "End `freeze`."),
        "abort": ("capflow.cli.hub.act", "Stop a running request."),
        "act": ("capflow.cli.hub.act", "Send several actions on running requests."),
    },
    "Do research": {
        "vectors": ("capflow.cli.engine.vectors", "Make steering vectors, and compare them."),
        "rollouts": ("capflow.cli.engine.rollouts", "Answer prompts under vectors and scales."),
        "experiment": ("capflow.cli.engine.experiment", "Compare ways to steer on the same prompts."),
        "sweep": ("capflow.cli.engine.sweep", "Patch or ablate each chosen place of a model."),
        "probe": ("capflow.cli.probe.command", "Fit a probe on labelled captures, or evaluate one."),
    },
    "Set up and check": {
        "doctor": ("capflow.cli.model.doctor", "Show versions, and whether a capture works here."),
        "sites": ("capflow.cli.model.sites", "Show the sites of a model."),
        "plugins": ("capflow.cli.plugins", "List the consumers and controllers, or show one."),
        "plugin": ("capflow.cli.plugin", "Write a package with a consumer of your own."),
        "keys": ("capflow.cli.keys", "Make keys for TCP, and allow them to connect to a hub."),
        "spool": ("capflow.cli.hub.spool", "Look into a spool, verify it, or empty it."),
        "completion": ("capflow.cli.completion", "Print a script with which a shell completes commands."),
    },
}
"""The commands in groups, as the help shows them. Each has its module, in which it has the same name, and its help."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
"""Each command's module and its line of help, so that help imports no command."""

_EXAMPLES = """
Examples:
  capflow run --consumer filesystem:root=rows --model demo --prompts prompts.jsonl
  capflow inspect rows
  capflow serve demo --consumer filesystem:root=rows
  capflow top

`capflow COMMAND --help` shows the options of a command.
"""

_TRACEBACK_VARIABLE = "CAPFLOW_TRACEBACK"


class LazyGroup(click.Group):
    """The commands of `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  click's signature
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name. Raises UsageError with the closest names if there is none."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from capflow.text.suggestion import did_you_mean

            do = did_you_mean(name, COMMANDS) or "`capflow --help` lists the commands"
            raise UsageError(explain(f"No such command '{name}'", do=do))
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return the commands and options that begin with a text."""
        from click.shell_completion import CompletionItem

        commands = [
            CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002  click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the commands' lines of help, in groups."""
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, (_, text) in group.items()])

    def format_epilog(
        self,
        ctx: click.Context,  # noqa: ARG002  click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the examples. They are never wrapped, so that each can be copied whole."""
        formatter.write(_EXAMPLES)


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
        if "_CAPFLOW_COMPLETE" in os.environ:
            from capflow.cli.completion import register

            register()
        code = cli.main(prog_name="capflow", standalone_mode=False)
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
