"""The program of `capflow rollouts`. Its one argument is a `RolloutJob` as JSON.

Rows are written as JSON Lines after each batch. For a Parquet file they are collected in `FILE.jsonl` beside it, which
is converted once it is complete.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console

from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.extras import require
from capflow.files import whole_file
from capflow.saes.named import digest_of, load_saes
from capflow.saes.resolve import resolved
from capflow.saes.sae import Sae
from capflow.steering.feature import FeatureUse, parse_features
from capflow.steering.request import Steering
from capflow.text import jsontext
from capflow_models.backends import Backend, check_directions, open_model
from capflow_models.jobs.bar import counting_bar
from capflow_models.jobs.ending import check_interrupted, run_program
from capflow_models.jobs.table import print_table
from capflow_models.model import Sampling, SteerableModel
from capflow_models.rollouts.judges import Judge, parse_judges
from capflow_models.rollouts.plan import (
    PLAIN,
    Rollout,
    RolloutPlan,
    RolloutPrompt,
    WantedAnswer,
    check_judges,
    judged,
    missing,
    roll_out,
)
from capflow_models.runs.lines import LineFile, read_lines
from capflow_models.vectors.file import load_sites

BATCH = {"vllm": 64, "transformers": 1}
"""Answers per batch of a back end, by default. A kill loses at most one batch."""


class RolloutJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `capflow rollouts`.

    prompts: the file of prompts.
    out: the .jsonl or .parquet file to write.
    vectors: files of vectors by name.
    features: features of autoencoders by name, in the words of a request's `steering_features`.
    saes: the autoencoders, each `[NAME=]PATH[@SITE]`.
    samples: answers for each prompt, vector and scale.
    stride, offset: every stride-th answer, from the offset on.
    batch: answers per batch; 0 for the back end's default.
    judges: in the form of `--judge`.
    relative: whether scales are relative to the stream's norm.
    arguments: further arguments of the back end.
    """

    model: str
    backend: Backend
    prompts: str
    out: str
    scales: list[float]
    vectors: dict[str, str] = {}
    features: dict[str, Any] = {}
    saes: list[str] = []
    samples: int = 1
    seed: int = 0
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    stride: int = 1
    offset: int = 0
    batch: int = 0
    judges: list[str] = []
    relative: bool = False
    arguments: dict[str, Any] = {}


def plan_of(job: RolloutJob) -> RolloutPlan:
    """Return the plan of a job. Raises UsageError that names the invalid option."""
    prompts = read_lines(Path(job.prompts), "--prompts", RolloutPrompt)
    _each_once("--prompts: ids", [prompt.id for prompt in prompts])
    _each_once("--scales", job.scales)
    names = [*job.vectors, *job.features]
    _each_once("--vector, --features: names", names)
    if PLAIN in names:
        option, expected = "--vector" if PLAIN in job.vectors else "--features", "another name"
        raise UsageError(explain(option, got=PLAIN, expected=f"{expected}; this one is for answers without steering"))
    if not job.scales or (not names and 0.0 not in job.scales):
        raise UsageError(explain("--vector: none", expected="a vector, or scale 0 for answers without steering"))
    saes = load_saes(job.saes, "--sae") if job.saes else {}
    return RolloutPlan(
        job.model,
        job.backend,
        prompts,
        {name: load_sites(path) for name, path in job.vectors.items()},
        [float(scale) + 0.0 for scale in job.scales],
        job.samples,
        job.seed,
        Sampling(job.max_new_tokens, job.temperature, job.top_p, job.seed),
        job.arguments,
        job.relative,
        features_of(job, saes),
        digest_of(saes) if job.features else "",
        sorted({sae.target.hook for sae in saes.values()}),
    )


def features_of(job: RolloutJob, saes: Mapping[str, Sae]) -> dict[str, tuple[FeatureUse, ...]]:
    """Return the features of a job by name.

    Raises UsageError, as for a request, for features that there are not or that cannot be set, and for scales that are
    relative to the stream's norm.
    """
    if job.features and job.relative:
        do = "a coefficient is in the stream's units"
        raise UsageError(explain("--normalize-steering", got="given with --features", expected="vectors only", do=do))
    features = {}
    for name, value in job.features.items():
        features[name] = parse_features(value, where=f"--features {name}")
        for scale in filter(None, job.scales):
            steering = Steering(features=tuple(use.scaled(scale) for use in features[name]))
            steering.check_gates()
            resolved(steering, saes)
    return features


def _each_once(option: str, values: Iterable[Any]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise UsageError(explain(option, got=f"{value} twice", expected="each once"))


def shared_out(job: RolloutJob) -> Path:
    """Return the file that this process writes: `out`, or a part of it if several processes share the work."""
    out = Path(job.out)
    if out.suffix not in (".jsonl", ".parquet"):
        raise UsageError(explain("--out", got=job.out, expected="a .jsonl or a .parquet file"))
    if out.suffix == ".parquet":
        require("files", f"--out {job.out}", "pyarrow")
    if not 0 <= job.offset < job.stride:
        raise UsageError(explain("--offset", got=job.offset, expected=f"0..{job.stride - 1}, below --stride"))
    if job.stride == 1:
        return out
    return out.with_name(f"{out.stem}.{job.offset}-of-{job.stride}{out.suffix}")


def run(job: RolloutJob) -> None:
    """Compute the missing rollouts and scores; show a progress bar on a terminal, else progress lines."""
    out = shared_out(job)
    plan = plan_of(job)
    judges = parse_judges(job.judges)
    check_directions(job.model, job.arguments, _directions(job, plan, judges))
    items = plan.items(job.stride, job.offset)
    console = Console(highlight=False, markup=False, stderr=True)
    parquet = out.suffix == ".parquet"
    with LineFile(out.with_name(f"{out.name}.jsonl") if parquet else out) as file:
        rows = list(_rows(file))
        finished = read_parquet(out) if parquet and out.exists() and not rows else []
        where, rows = str(out if finished else file.path), rows or finished
        todo = missing(plan, items, rows, where)
        check_judges(rows, judges, where)
        file.add([msgspec.json.encode(row) for row in finished])
        unjudged = _unjudged(rows, items, judges)
        if done := len(items) - len(todo):
            console.print(f"capflow: {done} of {len(items)} rollouts already exist", soft_wrap=True)
        with ExitStack() as stack:
            model = None
            if todo or any(judge.reads and judge.name not in rows[n].judges for judge in judges for n in unjudged):
                model = stack.enter_context(open_model(job.backend, job.model, _arguments(job, plan, judges)))
                for judge in judges:
                    judge.check(model)
            batch = job.batch or BATCH[job.backend]
            if unjudged:
                _judge_again(file, rows, unjudged, judges, model, batch, console)
            if todo:
                assert model is not None
                _counted("rollouts", len(items), done, roll_out(model, plan, todo, file, batch, judges), console)
        rows = list(_rows(file))
        if parquet:
            write_parquet(out, rows)
            file.path.unlink()
    _show(rows, items, judges)
    console.print(f"capflow: {len(items)} rollouts in {out}", soft_wrap=True)


def _directions(job: RolloutJob, plan: RolloutPlan, judges: Sequence[Judge]) -> Iterator[tuple[str, Site, int]]:
    for name, vectors in plan.vectors.items():
        for site, vector in vectors.items():
            yield f"--vector {name}, {job.vectors[name]}", site, vector.size
    for judge in judges:
        yield from judge.directions


def _arguments(job: RolloutJob, plan: RolloutPlan, judges: Sequence[Judge]) -> dict[str, Any]:
    arguments = dict(job.arguments)
    if job.saes:
        arguments["saes"] = job.saes
    if job.backend == "vllm":
        sites = {f"{site.hook}:*" for sites in plan.vectors.values() for site in sites}
        sites |= {f"{hook}:*" for hook in plan.hooks}
        sites |= {str(judge.site) for judge in judges if judge.site is not None and f"{judge.site.hook}:*" not in sites}
        arguments.setdefault("sites", sorted(sites) or ["post_block:*"])
    return arguments


def _counted(noun: str, total: int, done: int, counts: Iterator[int], console: Console) -> None:
    """Show how much is done while the work runs. `counts` yields how much each step does."""
    with counting_bar(console) as bar:
        task = bar.add_task(noun, total=total, completed=done)
        for count in counts:
            check_interrupted()
            done += count
            bar.update(task, completed=done)
            if bar.disable:
                console.print(f"capflow: {done} of {total} {noun}", soft_wrap=True)


def _unjudged(rows: Sequence[Rollout], items: Sequence[WantedAnswer], judges: Sequence[Judge]) -> list[int]:
    """Return the numbers of the rows of this run that lack the scores of a judge."""
    wanted, names = {item.key for item in items}, {judge.name for judge in judges}
    return [number for number, row in enumerate(rows) if row.key in wanted and not names <= row.judges.keys()]


def _judge_again(
    file: LineFile,
    rows: Sequence[Rollout],
    unjudged: Sequence[int],
    judges: Sequence[Judge],
    model: SteerableModel | None,
    batch: int,
    console: Console,
) -> None:
    """Judge rows that exist, and write the file anew, also after Ctrl-C."""
    written = list(rows)

    def score() -> Iterator[int]:
        for start in range(0, len(unjudged), batch):
            chunk = unjudged[start : start + batch]
            for number, row in zip(chunk, judged([rows[number] for number in chunk], judges, model), strict=True):
                written[number] = row
            yield len(chunk)

    try:
        _counted("answers judged", len(unjudged), 0, score(), console)
    finally:
        file.replace([msgspec.json.encode(row) for row in written])


def _show(rows: Sequence[Rollout], items: Sequence[WantedAnswer], judges: Sequence[Judge]) -> None:
    """Print the mean of each score by vector and scale."""
    names = [name for judge in judges for name in judge.columns]
    if not names:
        return
    by_key = {row.key: row for row in rows}
    groups: dict[tuple[str, float], list[Rollout]] = {}
    for item in items:
        groups.setdefault((item.vector, item.scale), []).append(by_key[item.key])
    lines = []
    for (vector, scale), group in groups.items():
        means = []
        for name in names:
            scores = [score for row in group if (score := row.scores[name]) is not None]
            means.append(fmean(scores) if scores else None)
        lines.append([vector, f"{scale:g}", len(group), *means])
    print_table(["vector", "scale", "answers", *names], lines)


def read_parquet(path: Path) -> list[Rollout]:
    """Return the rows of a Parquet file of `write_parquet`. Raises UsageError for any other file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return [_of_parquet(row) for row in pq.read_table(path).to_pylist()]
    except (pa.ArrowException, OSError, msgspec.ValidationError) as e:
        raise UsageError(explain(f"--out {path}", got=str(e), expected="a file of rollouts, or a new file")) from e


def _of_parquet(row: dict[str, Any]) -> Rollout:
    """Return a row; a judge that did not score it is null in the file."""
    judges = {name: digest for name, digest in (row.pop("judges", None) or {}).items() if digest is not None}
    scores = row.pop("scores", None) or {}
    scores = {name: score for name, score in scores.items() if {name, name.partition(".")[0]} & judges.keys()}
    return msgspec.convert({**row, "scores": scores, "judges": judges}, Rollout)


def write_parquet(path: Path, rows: Sequence[Rollout]) -> None:
    """Write rows to a Parquet file; the file appears once it is whole.

    Scores and judges are structs, with a field for each that a row has.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    fields = [(each.name, types[each.type]) for each in msgspec.structs.fields(Rollout) if each.type in types]
    for name, kind in (("scores", pa.float64()), ("judges", pa.string())):
        if keys := sorted({key for row in rows for key in getattr(row, name)}):
            fields.append((name, pa.struct([(key, kind) for key in keys])))
    schema = pa.schema(fields)
    with whole_file(path) as file:
        pq.write_table(pa.Table.from_pylist([msgspec.to_builtins(row) for row in rows], schema), file)


def _rows(file: LineFile) -> Iterator[Rollout]:
    for number, line in enumerate(file.lines(), 1):
        try:
            yield jsontext.decode(line, Rollout)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            do = "write to another file"
            raise UsageError(explain(f"{file.path}, line {number}", got=str(e), expected="a rollout", do=do)) from e


def main() -> int:
    """Run the job; return the exit code."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return run_program(lambda: run(msgspec.json.decode(sys.argv[1], type=RolloutJob)))


if __name__ == "__main__":
    sys.exit(main())
