"""The output of a sweep: its runs, one JSON object a line, and the settings that made them.

`settings.json` has all that values depend on. A sweep refuses a directory with other settings, and names the first that
differs. More pairs, sites, positions and directions may be added later: the runs that are there are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from capflow.errors import UsageError, explain
from capflow.files import write_whole
from capflow.text import jsontext
from capflow_models.runs.lines import LineFile
from capflow_models.runs.output import as_json
from capflow_models.sweep.metrics import SweepRun
from capflow_models.sweep.plan import RunKey, SweepPlan

RUNS = "runs.jsonl"
SETTINGS = "settings.json"
_DO = "choose another directory, or remove this one"


def settle(plan: SweepPlan, out: Path, file: LineFile) -> dict[RunKey, SweepRun]:
    """Return the runs of a plan that a directory has, and write the settings into it.

    file: the directory's open file of runs.

    Raises UsageError for a directory with runs of other settings, and for a file that has no runs.
    """
    settings = plan.settings()
    lines = file.lines()
    if lines:
        check_settings(settings, out)
    kept = _read(out / SETTINGS) if lines else {"pairs": {}}
    merged = {"pairs": kept["pairs"] | settings["pairs"], "mean": settings["mean"] or kept.get("mean")}
    write_whole(out / SETTINGS, msgspec.json.format(msgspec.json.encode({**settings, **merged})))
    return runs_of(plan, lines, file.path)


def runs_of(plan: SweepPlan, lines: Iterable[bytes], path: Path) -> dict[RunKey, SweepRun]:
    """Return the runs of a plan among the lines of a file. Raises UsageError for a line that is no run."""
    wanted = {key for number in range(len(plan.pairs)) for key in plan.keys(number)}
    runs: dict[RunKey, SweepRun] = {}
    for number, line in enumerate(lines, 1):
        try:
            run = msgspec.json.decode(line, type=SweepRun, strict=False)
        except msgspec.MsgspecError as e:
            raise UsageError(explain(f"{path}, line {number}", got=str(e), expected="a run", do=_DO)) from e
        if run.key in wanted and plan.functions.keys() <= run.values.keys():
            runs.setdefault(run.key, run)
    return runs


def check_settings(settings: Mapping[str, Any], out: Path) -> None:
    """Raise UsageError, which names the first difference, if a directory has runs of other settings."""
    there = _read(out / SETTINGS)
    if there.get("model") != settings["model"]:
        raise _refused(out, "the model", str(there.get("model")), settings["model"])
    for kind, noun in (("origin", "the"), ("engine", "the engine's"), ("functions", "the metric")):
        one, other = there.get(kind, {}), settings[kind]
        for name in sorted({*one, *other}):
            if one.get(name) != other.get(name):
                shown = [each.get(name, "nothing") for each in (one, other)]
                raise _refused(out, f"{noun} {name}", *shown)
    if len({there.get("mean"), settings["mean"]} - {None}) > 1:
        raise _refused(out, "the mean", "means over other prompts", "means over those of this sweep")
    for name, digest in settings["pairs"].items():
        if there["pairs"].get(name, digest) != digest:
            raise _refused(out, f"pair {name}", "other prompts or answers", "those of this sweep")


def done_count(plan: SweepPlan, out: Path) -> int:
    """Return how many runs of a plan a directory has. Raises UsageError as `settle` does; writes nothing."""
    try:
        content = (out / RUNS).read_bytes()
    except OSError:
        return 0
    if content:
        check_settings(plan.settings(), out)
    return len(runs_of(plan, content[: content.rfind(b"\n") + 1].splitlines(), out / RUNS))


def encoded(runs: Iterable[SweepRun]) -> list[bytes]:
    """Return runs as lines. JSON has no NaN and no infinity, so they are written as text."""
    return [msgspec.json.encode(as_json(msgspec.to_builtins(run))) for run in runs]


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = jsontext.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as e:
        raise UsageError(explain(f"{path}", got=str(e), expected="the settings of a sweep", do=_DO)) from e
    if not isinstance(settings, dict) or not isinstance(settings.get("pairs"), dict):
        raise UsageError(explain(f"{path}", got="another object", expected="the settings of a sweep", do=_DO))
    return settings


def _refused(out: Path, subject: str, got: str, expected: str) -> UsageError:
    return UsageError(explain(f"{out}, {subject}", got=f"{got} there", expected=expected, do=_DO))
