"""`--dry-run`: the settings, cells and tokens of an experiment, and how long they take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from capflow_models.experiment import arms
from capflow_models.experiment.arms import Directions, Setting
from capflow_models.experiment.file import Experiment
from capflow_models.experiment.prompts import LabelledPrompt
from capflow_models.experiment.records import CELLS, Cell
from capflow_models.experiment.schedule import key_of

_CALIBRATION_TURNS = 2


def show_plan(
    experiment: Experiment,
    settings: Sequence[Setting],
    prompts: Sequence[LabelledPrompt],
    out: Path,
    *,
    calibrate: bool,
) -> None:
    """Print the plan.

    calibrate: start the engine and time a batch of the baseline; otherwise the time is known from earlier cells only.
    """
    console = Console(highlight=False, soft_wrap=True)
    general = experiment.general
    each = len(prompts) * len(general.seeds)
    table = Table("arm", "kind", "settings", "answers", "tokens at most", box=None)
    for arm in experiment.arms:
        mine = [setting for setting in settings if setting.arm == arm]
        count = len(mine) * each
        table.add_row(arm, experiment.kind(arm), str(len(mine)), str(count), str(count * general.max_tokens))
    console.print(table)
    cells = len(settings) * each
    passes = ["answer", *(["forced"] if "kl" in experiment.metrics else [])]
    text = "perplexity" in experiment.metrics or "held_out" in experiment.metrics
    tokens = cells * general.max_tokens * len(passes)
    console.print(
        f"{cells} answers to {len(prompts)} prompts; at most {tokens} generated tokens in {len(passes)} "
        f"pass{'es' * (len(passes) > 1)} ({', '.join(passes)})" + (", and one reading of every answer" if text else "")
    )
    done = _done(out)
    rates = [cell.tokens_per_s for cell in done if cell.tokens_per_s]
    keys = {key_of(setting, prompt.id, seed) for setting in settings for prompt in prompts for seed in general.seeds}
    left = len(keys - {cell.key for cell in done})
    if left < cells:
        console.print(f"{cells - left} of {cells} answers already exist in {out}")
    if left == 0:
        console.print("nothing is left to answer")
    elif calibrate:
        seconds = _calibrated(experiment, settings, prompts)
        console.print(f"about {_minutes(seconds * left / min(len(prompts), general.batch))}, after the start")
    elif rates:
        rate = sum(rates) / len(rates)
        console.print(f"about {_minutes(tokens * left / cells / rate)} at the {rate:.0f} tokens/s of the answers there")
    else:
        console.print("the time is unknown: --calibrate starts the engine and times a batch")


def _done(out: Path) -> list[Cell]:
    """Return the cells that a directory has."""
    try:
        lines = (out / CELLS).read_bytes().splitlines()
    except OSError:
        return []
    cells = []
    for line in lines:
        try:
            cells.append(msgspec.json.decode(line, type=Cell, strict=False))
        except msgspec.MsgspecError:
            continue
    return cells


def _calibrated(experiment: Experiment, settings: Sequence[Setting], prompts: Sequence[LabelledPrompt]) -> float:
    """Return the seconds that one batch of the baseline takes with its measurements; the first one warms up."""
    from capflow_models.experiment.session import Session

    nothing = Directions(None, None, {}, "post_block", None)
    baseline = next(setting for setting in settings if setting.kind == "baseline")
    batch = list(prompts[: experiment.general.batch])
    took = 0.0
    with (
        tempfile.TemporaryDirectory(prefix="capflow-calibration-") as rows,
        Session(experiment, Path(rows), arms.sites_of([], nothing), (), nothing) as one,
    ):
        for seed in range(_CALIBRATION_TURNS):
            start = time.monotonic()
            answers = one.answers(baseline, batch, seed)
            if "kl" in experiment.metrics:
                tokens = {p.id: answer.tokens for p, answer in zip(batch, answers, strict=True)}
                one.forced(baseline, batch, tokens, [(baseline, prompt) for prompt in batch], seed)
            if "perplexity" in experiment.metrics:
                one.texts([(prompt, answer.tokens) for prompt, answer in zip(batch, answers, strict=True)])
            took = time.monotonic() - start
    return took


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
