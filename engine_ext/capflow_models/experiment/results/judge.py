"""The judge: a program that scores answers. Its scores are kept, so that an answer is judged once by each judge."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from capflow.errors import CapflowError, explain
from capflow_models.experiment.file import Experiment
from capflow_models.experiment.prompts import LabelledPrompt
from capflow_models.experiment.records import Cell, OutputLines, digest_of
from capflow_models.experiment.results.manifest import hash_of
from capflow_models.experiment.results.metrics import judge_id

JUDGED = "judged.jsonl"


class JudgedLine(msgspec.Struct, frozen=True):
    """A line that the judge writes."""

    id: str
    score: float


class Judged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kept score, with the text that it is of.

    judge: the digest of the judge that gave it.
    """

    id: str
    text: str
    score: float
    judge: str = ""


def judged_scores(
    experiment: Experiment, cells: Sequence[Cell], prompts: Sequence[LabelledPrompt], out: Path
) -> dict[str, float]:
    """Return the score of each cell, by `judge_id`; run the judge on the cells that have none of this judge.

    Raises CapflowError if the judge fails, takes too long, or leaves an answer out.
    """
    if experiment.judge is None or "judge" not in experiment.metrics:
        return {}
    texts = {prompt.id: prompt.prompt for prompt in prompts}
    judge = judge_digest(experiment)
    with OutputLines(out / JUDGED) as file:
        kept = [msgspec.json.decode(line, type=Judged) for line in file.lines()]
        scores = {(line.id, line.text): line.score for line in kept if line.judge == judge}
        todo = [cell for cell in cells if (judge_id(cell), cell.text) not in scores]
        if todo:
            made = _run(experiment, todo, texts)
            file.add([msgspec.json.encode(Judged(judge_id(c), c.text, made[judge_id(c)], judge)) for c in todo])
            scores |= {(judge_id(cell), cell.text): made[judge_id(cell)] for cell in todo}
    return {judge_id(cell): scores[judge_id(cell), cell.text] for cell in cells}


def judge_digest(experiment: Experiment) -> str:
    """Return a digest of the judge's command and of the files that it names."""
    assert experiment.judge is not None
    files = {}
    for part in experiment.judge.command:
        path = experiment.relative(part)
        if path.is_file():
            files[part] = hash_of(path)
    return digest_of({"command": experiment.judge.command, "files": files})


def _run(experiment: Experiment, cells: Sequence[Cell], texts: dict[str, str]) -> dict[str, float]:
    judge = experiment.judge
    assert judge is not None
    lines = [
        msgspec.json.encode({"id": judge_id(c), "prompt": texts[c.prompt_id], "label": c.label, "text": c.text})
        for c in cells
    ]
    where = f"[judge] {' '.join(judge.command)}"
    try:
        done = subprocess.run(
            list(judge.command), input=b"\n".join(lines) + b"\n", capture_output=True, check=False,
            cwd=experiment.path.absolute().parent, timeout=judge.timeout_s,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CapflowError(explain(where, got=str(e), expected="a program that ends in time")) from e
    if done.returncode != 0:
        got = f"exit code {done.returncode}: {done.stderr.decode(errors='replace').strip()[-200:]}"
        raise CapflowError(explain(where, got=got, expected="exit code 0"))
    try:
        scores = [msgspec.json.decode(line, type=JudgedLine) for line in done.stdout.splitlines() if line.strip()]
    except msgspec.MsgspecError as e:
        raise CapflowError(explain(f"{where}: output", got=str(e), expected='{"id", "score"} a line')) from e
    made = {score.id: score.score for score in scores}
    absent = [judge_id(cell) for cell in cells if judge_id(cell) not in made]
    if absent:
        got = f"no score for {absent[0]} and {len(absent) - 1} others"
        raise CapflowError(explain(f"{where}: output", got=got, expected="a score for each line of the input"))
    return made
