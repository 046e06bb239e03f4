"""The program of `capflow experiment run`. Its one argument is an `ExperimentJob` as JSON."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from rich.console import Console

from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.extras import require
from capflow_models.backends import config_of, fingerprint, layer_count
from capflow_models.experiment import arms, gating
from capflow_models.experiment.arms import Directions, Setting, check_layers, settings_of
from capflow_models.experiment.directions import check_files, checked_fits, known_threshold, resolve
from capflow_models.experiment.dry import show_plan
from capflow_models.experiment.file import Experiment
from capflow_models.experiment.fits import DirectionFit, Fitter, describe
from capflow_models.experiment.prompts import LabelledPrompt, read_prompts
from capflow_models.experiment.records import (
    CELLS,
    ROWS,
    Cell,
    OutputLines,
    digest_of,
    done_of,
    encoded,
    read_cells,
)
from capflow_models.experiment.results.export import export
from capflow_models.experiment.results.judge import judged_scores
from capflow_models.experiment.results.manifest import Manifest, manifest_of, write_manifest
from capflow_models.experiment.results.metrics import tables_of
from capflow_models.experiment.results.report import broken_lines, verdict, write_report
from capflow_models.experiment.schedule import CellKey, SeedBlock, blocks, key_of
from capflow_models.jobs.ending import check_interrupted, run_program
from capflow_models.runs.output import make_output, remove_leftovers

if TYPE_CHECKING:  # it needs vLLM
    from capflow_models.experiment.session import ArmAnswer, Session


DIRECTIONS = "directions"
"""The directory of probes and vectors in the output directory."""


class ExperimentJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `capflow experiment run`.

    backend: always `vllm`.
    out: the output directory; by default the file's name without its suffix, beside the file.
    dry_run: whether only to show the cells and what they cost.
    calibrate: whether a dry run starts the engine and times a batch.
    """

    file: str
    backend: str = "vllm"
    out: str = ""
    dry_run: bool = False
    calibrate: bool = False


def run(job: ExperimentJob) -> None:
    """Run the missing cells, then write tables and report."""
    console = Console(highlight=False, stderr=True, soft_wrap=True)
    if job.calibrate and not job.dry_run:
        raise UsageError(explain("--calibrate", got="no --dry-run", expected="--dry-run with it"))
    experiment = Experiment.read(Path(job.file))
    for extra in ("duckdb", "plot"):
        require(extra, "capflow experiment")
    out = _directory(job, experiment)
    prompts = read_prompts(experiment)
    threshold = known_threshold(experiment, out / DIRECTIONS)
    settings = settings_of(experiment, 0.0 if threshold is None else threshold)
    layers = sorted({setting.layer for setting in settings if setting.layer is not None})
    hook = "post_block" if experiment.vector is None else experiment.vector.hook
    check_layers(settings, experiment, probe=check_files(experiment, layers), hook=hook, layers=None)
    _check_fitted(experiment, settings)
    if experiment.engine or "kl" in experiment.metrics:
        from capflow_models.experiment.session import check_engine

        check_engine(experiment)
    if job.dry_run:
        checked_fits(experiment, layers, out / DIRECTIONS)
        show_plan(experiment, settings, prompts, out, calibrate=job.calibrate)
        return
    start = time.monotonic()
    make_output(out, "--out")
    with OutputLines(out / CELLS) as file:
        remove_leftovers(out, ROWS)
        directions, files, fits = _directions(experiment, settings, out, console)
        settings = settings_of(experiment, directions.threshold)
        site = None if directions.probe is None else directions.probe.site
        check_layers(settings, experiment, probe=site, hook=directions.hook, layers=directions.vectors.keys())
        digests = _digests(experiment, settings, prompts, directions)
        done = done_of(read_cells(file), digests, out)
        todo = list(blocks(settings, prompts, experiment.general.seeds, experiment.general.batch, done))
        if done:
            console.print(f"capflow: {len(done)} of {len(digests)} answers already exist")
        if todo:
            from capflow_models.experiment.session import Session

            gates = arms.gates_of(settings, experiment, directions, files)
            sites = arms.sites_of(settings, directions)
            with Session(experiment, out, sites, gates, directions) as session:
                session.check_room(settings, prompts)
                for block in todo:
                    cells = _run_block(session, experiment, settings, block, done, digests)
                    session.check_hub()
                    file.add(encoded(cells))
                    done |= {cell.key: cell for cell in cells}
                    check_interrupted()
                    took = time.monotonic() - start
                    console.print(f"capflow: {len(done)} of {len(digests)} answers, {took:.0f} s")
        cells = [done[key] for key in digests]
    used = [path for path in (directions.probe_file, *files.values()) if path is not None and path.is_file()]
    manifest = manifest_of(experiment, out, used, time.monotonic() - start)
    _write_results(experiment, settings, prompts, cells, fits, manifest, out, console)


def _write_results(
    experiment: Experiment,
    settings: Sequence[Setting],
    prompts: Sequence[LabelledPrompt],
    cells: Sequence[Cell],
    fits: Sequence[DirectionFit],
    manifest: Manifest,
    out: Path,
    console: Console,
) -> None:
    """Write tables, manifest and report, and print what they say."""
    judged = judged_scores(experiment, cells, prompts, out)
    tables = tables_of(experiment, settings, prompts, cells, judged)
    export(experiment, cells, judged, tables, fits, out)
    write_manifest(manifest, out)
    write_report(experiment, settings, prompts, cells, tables, fits, manifest, out)
    titles = {setting.name: setting.title for setting in settings}
    for match in tables.matches:
        console.print(f"capflow: {titles[match.setting]}, at equal effect: {verdict(match)}")
    for line in broken_lines(settings, cells):
        console.print(f"capflow: {line}")
    console.print(f"capflow: {len(cells)} answers; see {out / 'report.html'}")


def _directory(job: ExperimentJob, experiment: Experiment) -> Path:
    """Return the output directory. Raises UsageError for a path that is something else."""
    out = Path(job.out) if job.out else experiment.path.with_suffix("")
    if out.exists() and not out.is_dir():
        raise UsageError(explain("--out", got=f"{out}, a file", expected="a directory", do="write --out DIR"))
    return out


def _check_fitted(experiment: Experiment, settings: Sequence[Setting]) -> None:
    """Raise UsageError for a layer that the model does not have, before an engine starts to fit something at it."""
    sources = {"probe": experiment.probe, "held_out": experiment.held_out}
    places: list[tuple[tuple[str, ...], int | None]]
    places = [((name, "layer"), source.layer) for name, source in sources.items() if source and source.fit]
    if experiment.vector is not None and experiment.vector.fit:
        places += [(setting.layer_key(experiment), setting.layer) for setting in settings]
    if not places:
        return
    try:
        count = layer_count(experiment.general.model, experiment.engine)
    except (OSError, ValueError):  # the start of the engine says what is wrong with the model
        return
    for key, layer in places:
        if layer is not None and layer >= count:
            raise experiment.wrong(key, got=layer, expected=f"a layer of the model, 0 .. {count - 1}")


def _directions(
    experiment: Experiment, settings: Sequence[Setting], out: Path, console: Console
) -> tuple[Directions, dict[int, Path], list[DirectionFit]]:
    """Return the probes and vectors; a model is started if they must be fitted."""
    layers = sorted({setting.layer for setting in settings if setting.layer is not None})

    @contextmanager
    def start() -> Iterator[Fitter]:
        from capflow_models.experiment.session import fitting

        console.print("capflow: fitting probes and vectors")
        sites = {f"{s.hook}:{s.layer}" for s in (experiment.probe, experiment.held_out) if s is not None and s.fit}
        if experiment.vector is not None:
            sites |= {str(Site(layer, experiment.vector.hook)) for layer in layers}
        with fitting(experiment, out, sorted(sites)) as fitter:
            yield fitter

    directions, files, fits = resolve(experiment, layers, out / DIRECTIONS, start)
    for fit in fits:
        console.print(f"capflow: {describe(fit)}")
    return directions, files, fits


def _digests(
    experiment: Experiment, settings: Sequence[Setting], prompts: Sequence[LabelledPrompt], directions: Directions
) -> dict[CellKey, str]:
    """Return the digest of each cell, by its key, in the order of the output."""
    general = experiment.general
    probes = [
        None if probe is None else [str(probe.site), probe.weight.tobytes(), probe.bias.tobytes()]
        for probe in (directions.probe, directions.held_out)
    ]
    shared: dict[str, Any] = {
        "model": [general.model, _fingerprint(experiment)],
        "engine": {name: repr(value) for name, value in experiment.engine.items()},
        "sampling": [general.max_tokens, general.temperature, general.top_p, general.ignore_eos, general.prefix_cache],
        "gate": experiment.gate,
        "probes": probes,
        "measured": sorted({"kl", "perplexity"} & set(experiment.metrics)),
    }
    digests = {}
    for setting in settings:
        options = experiment.arms[setting.arm]
        vector = None
        if setting.layer is not None:
            vector = [directions.hook, directions.vectors[setting.layer].tobytes()]
        arm = {**shared, "arm": [setting.kind, options.at, options.template, options.vector_seed], "vector": vector}
        for prompt in prompts:
            digest = digest_of({**arm, "prompt": [prompt.prompt, prompt.label]})
            for seed in general.seeds:
                digests[key_of(setting, prompt.id, seed)] = digest
    return digests


def _fingerprint(experiment: Experiment) -> str:
    """Return what changes with the weights of the experiment's model."""
    model = experiment.general.model
    try:
        config = config_of(model, experiment.engine)
    except (OSError, ValueError):  # the start of the engine says what is wrong with the model
        config = None
    return fingerprint(model, config)


def _run_block(
    session: Session,
    experiment: Experiment,
    settings: Sequence[Setting],
    block: SeedBlock,
    done: Mapping[CellKey, Cell],
    digests: Mapping[CellKey, str],
) -> list[Cell]:
    """Run the missing cells of a block: answers by turns, then what measures them."""
    baseline = next(setting for setting in settings if setting.kind == "baseline")
    answers: dict[tuple[str, str], ArmAnswer] = {}
    for turn in block.turns:
        made = session.answers(turn.setting, turn.prompts, block.seed)
        answers |= {(turn.setting.name, p.id): answer for p, answer in zip(turn.prompts, made, strict=True)}
    pairs = [(turn.setting, prompt) for turn in block.turns for prompt in turn.prompts]
    kl: dict[tuple[str, str], list[float]] = {}
    if "kl" in experiment.metrics:
        tokens = {}
        for prompt in block.prompts:
            own = answers.get((baseline.name, prompt.id)) or done[key_of(baseline, prompt.id, block.seed)]
            tokens[prompt.id] = own.tokens
        kl = session.forced(baseline, block.prompts, tokens, pairs, block.seed)
    texts: list[tuple[list[float], float | None]] = [([], None)] * len(pairs)
    if "perplexity" in experiment.metrics or "held_out" in experiment.metrics:
        texts = session.texts([(prompt, answers[setting.name, prompt.id].tokens) for setting, prompt in pairs])
    numbers = {turn.setting.name: number for number, turn in enumerate(block.turns)}
    return [
        _cell(experiment, setting, prompt, block, numbers[setting.name], answers[setting.name, prompt.id],
              kl.get((setting.name, prompt.id), []), text, digests)
        for (setting, prompt), text in zip(pairs, texts, strict=True)
    ]  # fmt: skip


def _cell(
    experiment: Experiment,
    setting: Setting,
    prompt: LabelledPrompt,
    block: SeedBlock,
    turn: int,
    answer: ArmAnswer,
    kl: list[float],
    text: tuple[list[float], float | None],
    digests: Mapping[CellKey, str],
) -> Cell:
    key = key_of(setting, prompt.id, block.seed)
    scores = np.array(answer.scores, np.float64)
    first = None
    if setting.threshold is not None:
        first = gating.first_firing(answer.positions, scores, setting.threshold, answer.prompt_tokens)
    steered = gating.steered_positions(
        setting, experiment.arms[setting.arm], experiment.gate, answer.positions, scores, answer.prompt_tokens,
        len(answer.tokens) - 1, answer.actions,
    )  # fmt: skip
    return Cell(
        setting.arm, setting.kind, setting.threshold, setting.sharpness, setting.scale, setting.layer, prompt.id,
        prompt.label, block.seed, digests[key], arms.prompt_of(setting, experiment, prompt.prompt), answer.text,
        answer.tokens, answer.prompt_tokens, answer.finish, block.number, turn, answer.positions, answer.scores,
        steered.tolist(), kl, text[0], text[1], first, answer.actions, answer.ttft_ms, answer.tpot_ms,
        answer.tokens_per_s, answer.cached_tokens,
    )  # fmt: skip


def main() -> int:
    """Run the job; return the exit code."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return run_program(lambda: run(msgspec.json.decode(sys.argv[1], type=ExperimentJob)))


if __name__ == "__main__":
    sys.exit(main())
