"""The program of `capflow sweep patch`, `ablate` and `path`. Its one argument is a `SweepJob` as JSON."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from capflow.errors import UsageError, explain
from capflow.extras import require
from capflow.files import write_whole
from capflow_models.experiment.results.manifest import versions
from capflow_models.jobs.bar import counting_bar
from capflow_models.jobs.ending import check_interrupted, run_program
from capflow_models.sweep.origin import described
from capflow_models.sweep.pairs import PairFile
from capflow_models.sweep.parts import FREEZABLE, GROUP_DEFAULT
from capflow_models.sweep.patch import PatchOptions, computed, plan_of
from capflow_models.sweep.plan import ABLATIONS, DIRECTIONS, SweepPlan
from capflow_models.sweep.records import done_count
from capflow_models.sweep.results.report import REPORT, weak_lines, write_report

MANIFEST = "run.json"


class SweepJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a sweep.

    kind: `patch`, `path`, which has receivers, or `ablate`, whose directions are `zero`, `mean` and `resample`.
    backend: always `vllm`.
    metrics: comma separated, as `hooks`, `positions` and `index`.
    align: empty for the default.
    command: the command line, for the report.
    """

    model: str
    pairs: str
    out: str
    hooks: str
    layers: str
    positions: str
    direction: str
    metrics: str
    batch: int
    resamples: int
    confidence: float
    align: str = ""
    engine: dict[str, Any] = {}
    dry_run: bool = False
    command: list[str] = []
    kind: Literal["patch", "ablate", "path"] = "patch"
    backend: str = "vllm"
    index: str = "all"
    group: int = GROUP_DEFAULT
    receivers: str = ""
    frozen: str = ",".join(FREEZABLE)

    def options(self) -> PatchOptions:
        """Return the options as `sweep_patch` takes them."""
        return PatchOptions(
            self.hooks,
            self.layers,
            self.positions,
            self.direction,
            self.metrics,
            self.align or None,
            self.batch,
            self.resamples,
            self.confidence,
            self.engine,
            self.index,
            self.group,
            self.receivers if self.kind == "path" else None,
            self.frozen,
            dashes=True,
            allowed=ABLATIONS if self.kind == "ablate" else DIRECTIONS,
        )


def run(job: SweepJob) -> None:
    """Compute the missing runs, then write tables, pictures and report."""
    console = Console(highlight=False, stderr=True, soft_wrap=True)
    for extra in ("duckdb", "plot"):
        require(extra, "capflow sweep")
    out, options = Path(job.out), job.options()
    if out.exists() and not out.is_dir():
        raise UsageError(explain("--out", got=f"{out}, a file", expected="a directory"))
    pairs = PairFile.read(Path(job.pairs))
    plan = plan_of(job.model, pairs, options)
    done = done_count(plan, out)
    if job.dry_run:
        show_plan(plan, done)
        return
    start = time.monotonic()
    if done:
        console.print(f"capflow: {done} of {plan.run_count} runs already exist")
    with counting_bar(console) as bar:
        task = bar.add_task("runs", total=plan.run_count, completed=done)

        def progress(count: int, total: int) -> None:
            check_interrupted()
            bar.update(task, completed=count)
            if bar.disable:
                console.print(f"capflow: {count} of {total} runs, {time.monotonic() - start:.0f} s")

        result = computed(plan, options, out, progress)
    result.save(out)
    manifest = manifest_of(job, plan, pairs.sha256, time.monotonic() - start)
    write_whole(out / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    write_report(result, manifest, out)
    for line in weak_lines(result):
        console.print(f"capflow: {line}")
    console.print(f"capflow: {plan.run_count} runs; see {out / REPORT}")


def show_plan(plan: SweepPlan, done: int) -> None:
    """Print how many runs a sweep has, and how many exist."""
    console = Console(highlight=False, soft_wrap=True)
    lengths = sorted({len(pair.clean) for pair in plan.pairs})
    counts = sorted({len(at) for at in plan.positions})
    console.print(
        f"{len(plan.pairs)} pairs of {_span(lengths)} tokens, {_places(plan)}, {_span(counts)} positions, "
        f"{' and '.join(plan.directions)}"
    )
    console.print(f"{plan.run_count} runs of one token, {plan.token_count} prompt tokens at most")
    if done:
        console.print(f"{done} of {plan.run_count} runs already exist")


def manifest_of(job: SweepJob, plan: SweepPlan, sha256: str, seconds: float) -> dict[str, Any]:
    """Return how a sweep was made.

    sha256: of the file of pairs.
    seconds: of this run only.
    """
    return (
        {
            "kind": job.kind,
            "model": plan.model,
            "engine": {name: described(value) for name, value in plan.engine.items()},
            "pairs": f"{job.pairs}, SHA-256 {sha256}",
            "hooks": job.hooks,
            "layers": job.layers,
            "positions": job.positions,
            "index": job.index,
            "group": job.group,
            "direction": job.direction,
        }
        | ({"receivers": job.receivers, "frozen": job.frozen} if job.kind == "path" else {})
        | {
            "metrics": job.metrics,
            "confidence": f"{100 * job.confidence:.10g}%",
            "resamples": job.resamples,
            "runs": plan.run_count,
            "seconds": round(seconds, 1),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join(job.command),
            "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        }
    )


def _places(plan: SweepPlan) -> str:
    """Return how many sites a plan changes, and how many parts of their rows if it changes parts."""
    sites, parts = len(plan.sites), len(plan.parts)
    if plan.receivers:
        return f"{parts} senders, {len(plan.places)} paths"
    return f"{sites} sites" + f" with {parts} heads, experts or groups" * any(part.entries for part in plan.parts)


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def main() -> int:
    """Run the job; return the exit code."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return run_program(lambda: run(msgspec.json.decode(sys.argv[1], type=SweepJob)))


if __name__ == "__main__":
    sys.exit(main())
