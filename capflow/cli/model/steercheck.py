"""`capflow doctor --steering`: runs the steering check in a child process, shows its stage and prints its report."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from capflow.errors import CapflowError, UsageError, explain
from capflow.steering.report import GOALS, RELATIVE_NORM, Apart, Cost, Report


class _Event(msgspec.Struct):
    """One line of the child's output."""

    event: str
    stage: str = ""
    usage: bool = False
    message: str = ""
    report: Report | None = None


def run_check(job: dict[str, Any], *, as_json: bool) -> int:
    """Run a steering check, print its report on standard output, and return the exit code.

    Raises UsageError or CapflowError with the child's message, and CapflowError if the child ends early.
    """
    report = _run(job, Console(stderr=True, highlight=False))
    failures = report.failures()
    if as_json:
        click.echo(
            msgspec.json.encode(
                {**msgspec.to_builtins(report), **_worked_out(report.cost), "failures": failures}
            ).decode()
        )
    else:
        console = Console(highlight=False, soft_wrap=True)
        _show(report, console)
        for line in failures:
            console.print(f"failed: {line}", style="red", markup=False)
        if not failures:
            console.print("\nSteering works here.")
    return 1 if failures else 0


def _run(job: dict[str, Any], console: Console) -> Report:
    """Run the child and return its report."""
    command = [sys.executable, "-m", "capflow_engine.jobs.steercheck"]
    with (
        tempfile.NamedTemporaryFile(prefix="capflow-doctor-", suffix=".log", delete=False) as log,
        tempfile.TemporaryDirectory(prefix="capflow-doctor-") as directory,
    ):
        command.append(msgspec.json.encode({**job, "directory": directory}).decode())
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        try:
            with console.status("starting") as status:
                last = _follow(
                    process, status.update if console.is_terminal else lambda stage: console.print(f"capflow: {stage}")
                )
        except BaseException:
            Path(log.name).unlink()
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):  # the child and every process it started
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    do = f"see {log.name}"
    if last.event == "error" and not last.usage:
        raise CapflowError(explain(last.message, do=do))
    if last.event != "error" and last.report is None:
        raise CapflowError(explain("the check ended before its work was done", got=f"exit code {code}", do=do))
    Path(log.name).unlink()
    if last.report is None:
        raise UsageError(last.message)
    return last.report


def _follow(process: subprocess.Popen[bytes], say: Callable[[str], Any]) -> _Event:
    """Show each stage of the child until it ends; return its last event."""
    assert process.stdout is not None
    event = _Event("nothing")
    for line in process.stdout:
        event = msgspec.json.decode(line, type=_Event)
        if event.event == "stage":
            say(event.stage)
    process.wait()
    return event


def _worked_out(cost: Cost | None) -> dict[str, Any]:
    """Return the ratios and verdicts that follow from the report's seconds."""
    if cost is None:
        return {}
    modes = {
        mode: {
            "ratio": cost.ratio(mode),
            "lowest": min(cost.ratios(mode)),
            "highest": max(cost.ratios(mode)),
            "goal": goal,
            "verdict": cost.verdict(mode),
        }
        for mode, goal in GOALS.items()
    }
    return {"cost": {"turns": cost.turns, "tokens": cost.tokens, "seconds": cost.seconds, "modes": modes}}


def _show(report: Report, console: Console) -> None:
    how = "torch.compile on" if report.compiled else "eager"
    console.print(f"{report.model}: {report.dtype}, {how}, {report.taps} taps\n", markup=False)
    console.print(f"It fires: a vector of {RELATIVE_NORM:g} of the rows' median norm, added at one site")
    table = Table("site", "|Δ logprob|", "of generated", "noise", "rows before", "against a patch", box=None)
    for one in report.fired:
        numbers = (one.moved, one.decode_moved, one.noise, one.changed_before, one.patched_apart)
        table.add_row(one.site, *(_number(number) for number in numbers))
    console.print(table)
    mates = report.mates
    console.print(f"\nMates are untouched: {mates.requests} plain requests, and the same without steered mates")
    table = Table("against the batch with nothing steered", "|Δ logprob|", "equal tokens", box=None)
    rows: dict[str, Apart] = {
        "the same batch again": mates.noise,
        "beside steered requests": mates.beside,
        "after steered requests": mates.after,
        "each request alone": mates.alone,
        "plain vLLM, the same batch": mates.vllm,
    }
    for name, apart in rows.items():
        table.add_row(name, _number(apart.logprob), f"{apart.equal} of {apart.tokens}")
    for kind, moved in mates.mates.items():
        table.add_row(f"the steered ones: {kind}", _number(moved), "")
    console.print(table)
    if report.dtype != "float32" and max(mates.alone.logprob, mates.vllm.logprob) > 0:
        console.print(
            f"In {report.dtype} batches of another shape and another graph round differently; --dtype float32 decides."
        )
    applied = report.applied
    console.print(
        f"\nApplied, by the answers: {len(applied.prefill)} sites for the prompt, "
        f"{len(applied.decode)} for generated tokens, key {applied.key}"
    )
    if report.cost is not None:
        _show_cost(report.cost, console)


def _show_cost(cost: Cost, console: Console) -> None:
    console.print(f"\nWhat it costs: medians of {cost.turns} interleaved turns, {cost.tokens} generated tokens each")
    table = Table("mode", "tok/s", "of plain vLLM", "lowest-highest", "goal", "", box=None)
    for mode, seconds in cost.seconds.items():
        rates = sorted(cost.tokens / one for one in seconds)
        median = f"{rates[len(rates) // 2]:.0f}"
        if mode not in GOALS:
            table.add_row("plain vLLM", median, "1", f"{rates[0]:.0f}-{rates[-1]:.0f} tok/s", "", "")
            continue
        ratios = cost.ratios(mode)
        spread = f"{min(ratios):.3f}-{max(ratios):.3f}"
        name = {"idle": "armed, idle", "steered": "all steered"}[mode]
        table.add_row(name, median, f"{cost.ratio(mode):.3f}", spread, f"{GOALS[mode]:.2f}", cost.verdict(mode))
    console.print(table)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 0.01 else f"{value:.3g}"
