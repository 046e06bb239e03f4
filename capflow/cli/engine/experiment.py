"""`capflow experiment`: arms that steer in different ways, compared on the same prompts."""

from __future__ import annotations

from pathlib import Path

import click

from capflow.text.examples import examples


@click.group()
def experiment() -> None:
    """Compare ways to steer on the same prompts."""


@experiment.command(
    epilog=examples(
        "capflow experiment run experiment.toml --dry-run", "capflow experiment run experiment.toml --out results"
    )
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", metavar="DIR", help="The output directory; by default FILE without .toml.")
@click.option("--dry-run", is_flag=True, help="Check the file; show its cells and what they cost.")
@click.option("--calibrate", is_flag=True, help="With --dry-run: start the engine and time a batch.")
def run(file: Path, out: str | None, dry_run: bool, calibrate: bool) -> None:
    """Run the experiment that a TOML file describes, and write its tables and report.

    A run that was stopped continues when it is started again.
    """
    from capflow.cli.engine.become import become

    job = {"file": str(file), "out": out or "", "dry_run": dry_run, "calibrate": calibrate}
    become("capflow_models.experiment.program", {"backend": "vllm", **job})
