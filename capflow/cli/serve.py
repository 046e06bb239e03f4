"""`capflow serve MODEL …`: vLLM's OpenAI-compatible server with the engine extension."""

from __future__ import annotations

import os
import sys

import click

from capflow.cli.needs import check_vllm


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> None:
    """Serve MODEL with vLLM's OpenAI-compatible server, tapped: `capflow serve MODEL [vLLM's own flags]`.

    Besides vLLM's flags: --hub ADDRESS (repeatable), --key NAME|PATH, --sites HOOK:LAYER (repeatable, with *), --policy block|drop|spill, --spool-dir DIR,
    --spool-bytes N, --spill-fallback block|drop, --insecure.
    """
    check_vllm("to serve models")
    # vLLM takes the process over, its signals too.
    os.execv(sys.executable, [sys.executable, "-m", "capflow_engine.serve", *arguments])  # noqa: S606
