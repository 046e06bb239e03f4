"""Activation patching: `sweep_patch`, and the steps that it shares with `capflow sweep patch`.

Rows of one prompt's stream are put into the run of another that differs in one fact. Where the answer changes, the fact
is (Vig et al. 2020, arXiv:2004.12265; Meng et al. 2022, arXiv:2202.05262).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.extras import require
from capflow_models.experiment.records import OutputLines
from capflow_models.jobs.bar import notebook_bar
from capflow_models.runs.output import make_output, remove_leftovers
from capflow_models.sweep.metrics import METRICS_DEFAULT, SweepRun, check_metrics, digests
from capflow_models.sweep.model import inspected
from capflow_models.sweep.pairs import PairReader, PairSource, PromptPair, TokenPair, read_pairs
from capflow_models.sweep.parts import (
    FREEZABLE,
    GROUP_DEFAULT,
    Chosen,
    Frozen,
    RowPart,
    check_receivers,
    check_senders,
    read_receivers,
)
from capflow_models.sweep.plan import (
    ABLATIONS,
    BASELINES,
    DIRECTIONS,
    DONORS,
    PatchPositions,
    RunKey,
    SweepPlan,
    SweptPlaces,
    batches,
    check_directions,
)
from capflow_models.sweep.records import RUNS, encoded, settle
from capflow_models.sweep.results.result import SweepResult
from capflow_models.sweep.results.tables import (
    ALIGNS,
    CONFIDENCE_DEFAULT,
    RESAMPLES_DEFAULT,
    align_of,
    pairs_table,
    patches_table,
    summary_table,
)

if TYPE_CHECKING:
    from capflow_models.sweep.session import SweepSession

BATCH_DEFAULT = 512

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PatchOptions:
    """What to patch, and how to compare it. `sweep_patch` explains the fields.

    receivers: of paths; None without paths.
    frozen: what is frozen behind the senders of paths.
    dashes: whether errors name options as on the command line.
    allowed: the directions to choose from: `DIRECTIONS`, or `ABLATIONS`, whose option is `by`.
    """

    hooks: str | Sequence[str] = ("post_block",)
    layers: Any = "all"
    positions: Any = "all"
    direction: str | Sequence[str] = "denoise"
    metrics: str | Iterable[str] = METRICS_DEFAULT
    align: str | None = None
    batch: int = BATCH_DEFAULT
    resamples: int = RESAMPLES_DEFAULT
    confidence: float = CONFIDENCE_DEFAULT
    engine: Mapping[str, Any] | None = None
    index: Any = "all"
    group: int = GROUP_DEFAULT
    receivers: Any = None
    frozen: Any = FREEZABLE
    dashes: bool = False
    allowed: Sequence[str] = DIRECTIONS

    def named(self, name: str) -> str:
        """Return the name of an option for errors."""
        return f"--{name}" if self.dashes else name

    def check(self) -> None:
        """Raise UsageError for a value that no model and no pairs can make valid."""
        if self.align is not None and self.align not in ALIGNS:
            raise UsageError(explain(self.named("align"), got=self.align, expected=f"one of {', '.join(ALIGNS)}"))
        for name in ("batch", "resamples", "group"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(explain(self.named(name), got=repr(value), expected="1 or more"))
        if self.group > limits.ENTRIES_MAX:
            expected = f"1..{limits.ENTRIES_MAX}"
            raise UsageError(explain(self.named("group"), got=self.group, expected=expected))
        if not isinstance(self.engine, Mapping | None):
            expected = "arguments of capflow.LLM by name"
            raise UsageError(explain("engine", got=repr(self.engine), expected=expected))
        if not isinstance(self.confidence, int | float) or not 0 < self.confidence < 1:
            raise UsageError(explain(self.named("confidence"), got=repr(self.confidence), expected="between 0 and 1"))


def sweep_patch(
    model: str,
    pairs: str | Path | Iterable[PromptPair | Mapping[str, Any]],
    *,
    hooks: str | Sequence[str] = ("post_block",),
    layers: Any = "all",
    positions: Any = "all",
    direction: str | Sequence[str] = "denoise",
    metrics: str | Iterable[str] = METRICS_DEFAULT,
    out: str | Path | None = None,
    align: str | None = None,
    batch: int = BATCH_DEFAULT,
    resamples: int = RESAMPLES_DEFAULT,
    confidence: float = CONFIDENCE_DEFAULT,
    engine: Mapping[str, Any] | None = None,
    index: Any = "all",
    group: int = GROUP_DEFAULT,
    progress: Progress | None = None,
) -> SweepResult:
    """Patch every chosen hook, layer and position of pairs of prompts on one engine; return the results.

    Each patch is one request, and requests run in batches. Raises UsageError before the engine starts for pairs,
    places and names that do not fit the model, and for a directory with runs of other settings.

    model: a directory, a name, or `demo` for the demo model.
    pairs: a file of JSON Lines, or objects: `clean`, `corrupted`, `answer`, `wrong_answer` and optionally `id`. The
        prompts of a pair have equally many tokens, each answer is one token.
    hooks: the hook points to patch; or sites, such as `"heads:3,mlp_out:4"`, also by names of TransformerLens. At
        `heads`, `q`, `k` and `v` one head is patched at a time, at `router` one expert, at `neurons` a group.
    layers: of hooks, as in a capture spec: `all`, `"4-11"`, `[3, 7]`.
    positions: `all`, `changed` (where the prompts differ), `last`, numbers, ranges such as `"2-5"`, or several, one at
        a time; `together` for all of them in one run.
    direction: `denoise` (clean rows in the corrupted run), `noise` (the reverse), or `both`.
    metrics: of `logit_diff`, `probability`, `logprob`, `kl`, and functions as `module:function`.
    out: a directory for runs and tables, from which a stopped sweep continues; None keeps nothing.
    align: how positions of several pairs are joined: `position`, `end` or `role`. By default `position` if all prompts
        are equally long, else `role`.
    batch: requests asked for at a time; a kill loses at most one batch.
    resamples, confidence: of the bootstrap intervals over pairs.
    engine: further arguments of `capflow.LLM`.
    index: the heads, experts or neurons: `all`, numbers, ranges such as `"2-5"`, or several; `whole` for entire rows.
    group: how many neurons are patched at once.
    progress: called with the numbers of finished and of all runs. In a notebook a bar shows them by default.
    """
    options = PatchOptions(
        hooks, layers, positions, direction, metrics, align, batch, resamples, confidence, engine, index, group
    )
    return _swept(model, pairs, options, out, progress)


def sweep_ablate(
    model: str,
    pairs: str | Path | Iterable[PromptPair | Mapping[str, Any]],
    *,
    by: str | Sequence[str] = "mean",
    hooks: str | Sequence[str] = ("mlp_out",),
    out: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> SweepResult:
    """Ablate every chosen hook, layer and position of the clean prompts of pairs, one at a time; return the results.

    A recovery of 1 leaves the clean run unchanged. Raises as `sweep_patch` does.

    by: `zero` puts zeros in a row's place, `mean` the site's mean row over all prompts, without their first positions,
        `resample` the corrupted prompt's row; `both` is zero and mean, `all` each of them.
    options: further ones of `sweep_patch`.
    """
    _check_names(options, {"direction", "dashes", "allowed", "receivers", "frozen"})
    chosen = PatchOptions(hooks=hooks, direction=by, allowed=ABLATIONS, **options)
    return _swept(model, pairs, chosen, out, progress)


def sweep_path(
    model: str,
    pairs: str | Path | Iterable[PromptPair | Mapping[str, Any]],
    receivers: str | Sequence[str],
    *,
    hooks: str | Sequence[str] = ("heads",),
    frozen: str | Sequence[str] = FREEZABLE,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> SweepResult:
    """Patch the direct path from every chosen head, or MLP, to each receiver; return the results.

    All positions are patched together. A run changes the rows of the receiver to what they are when only the sender has
    the other prompt's rows, and what is frozen adds to the stream what it adds in the unchanged run. The cells have the
    receiver in the column `receiver`. Raises as `sweep_patch` does.

    receivers: places behind the senders that read the stream, such as `"q:12[3],k:12,final"`.
    hooks: the senders' hook points: `heads`, `attn_out`, `neurons`, `mlp_out`.
    frozen: `attn_out` and `mlp_out`, or one of them: `attn_out` lets paths through MLPs (Wang et al. 2023).
    options: further ones of `sweep_patch`.
    """
    own = {"dashes", "allowed", "positions", "receivers", "frozen"}
    _check_names(options, own)
    chosen = PatchOptions(hooks=hooks, positions="together", receivers=receivers, frozen=frozen, **options)
    return _swept(model, pairs, chosen, out, progress)


def _check_names(options: Mapping[str, Any], own: Collection[str]) -> None:
    """Raise UsageError for an option that a sweep does not have, or that its function sets."""
    names = {each.name for each in dataclasses.fields(PatchOptions)} - set(own)
    for name in options:
        if name not in names:
            raise UsageError(explain(name, got="an unknown option", expected=f"one of {', '.join(sorted(names))}"))


def _swept(
    model: str,
    pairs: str | Path | Iterable[PromptPair | Mapping[str, Any]],
    options: PatchOptions,
    out: str | Path | None,
    progress: Progress | None,
) -> SweepResult:
    require("files", "a sweep", "pyarrow")
    require("vllm", "a sweep")
    # An iterator of names can be read once.
    options = dataclasses.replace(options, metrics=check_metrics(options.metrics, options.named("metrics")))
    plan = plan_of(model, Path(pairs) if isinstance(pairs, str | Path) else pairs, options)
    with notebook_bar("runs") as shown:
        if out is None:
            with tempfile.TemporaryDirectory(prefix="capflow-sweep-") as directory:
                return computed(plan, options, Path(directory), progress or shown)
        return computed(plan, options, Path(out), progress or shown)


def plan_of(model: str, source: PairSource, options: PatchOptions) -> SweepPlan:
    """Return the plan of a sweep. Raises UsageError for everything that can be wrong before an engine starts."""
    from capflow_models.sweep.session import check_engine
    from capflow_models.sweep.shapes import shaped

    options.check()
    engine = options.engine or {}
    check_engine(engine, "--engine-arg" if options.dashes else "engine")
    at_sites = SweptPlaces.parse(options.hooks, options.layers, (options.named("hooks"), options.named("layers")))
    hooks = at_sites.hooks
    name = "direction" if options.allowed == DIRECTIONS else "by"
    directions = check_directions(options.direction, options.named(name), options.allowed)
    at = PatchPositions.parse(options.positions, options.named("positions"))
    chosen = Chosen.parse(options.index, options.named("index"))
    chosen.check(hooks, options.named("index"))
    given, places = read_pairs(source)
    functions = digests(check_metrics(options.metrics, options.named("metrics")), options.named("metrics"))
    described = inspected(model, engine)
    sites = at_sites.of(described.layers)
    pairs = PairReader(described.tokenizer, described.vocabulary).tokens(given, places)
    for pair, place in zip(pairs, places, strict=True):
        if described.length_max is not None and len(pair.clean) >= described.length_max:
            expected = f"at most {described.length_max - 1}, as one more token follows"
            raise UsageError(explain(f"{place}: clean", got=f"{len(pair.clean)} tokens", expected=expected))
    positions = [
        at.of(pair, f"{place}: {options.named('positions')}") for pair, place in zip(pairs, places, strict=True)
    ]
    receivers, frozen = _receivers(options, hooks, described.layers)
    behind = [part.site for part in receivers]
    every, named = list(dict.fromkeys([*sites, *behind])), options.named("hooks")
    try:
        present, shapes = shaped(model, engine, every, strict=at_sites.strict, where=named)
    except UsageError:
        # The error names the hooks also if a receiver is to blame.
        shaped(model, engine, sites, strict=at_sites.strict, where=named)
        shaped(model, engine, behind, strict=True, where=options.named("receivers"))
        raise
    check_receivers(receivers, present, shapes, options.named("receivers"))
    chosen_sites = [site for site in present if site in sites]
    parts = list(chosen.parts(chosen_sites, shapes, options.group, options.named("index")))
    origin = dict(described.origin) | ({"frozen hooks": ",".join(frozen.hooks)} if frozen else {})
    plan = SweepPlan(model, pairs, parts, positions, directions, functions, dict(engine), origin, receivers, frozen)
    if not plan.places:
        raise UsageError(
            explain(options.named("receivers"), got="none behind a sender", expected="one in a later layer")
        )
    return plan


def _receivers(options: PatchOptions, hooks: Sequence[str], layers: int) -> tuple[list[RowPart], Frozen | None]:
    """Return the receivers of a sweep of paths, and what is frozen; none without paths."""
    if options.receivers is None:
        return [], None
    check_senders(hooks, options.named("hooks"))
    frozen = Frozen.parse(options.frozen, layers, options.named("frozen"))
    return read_receivers(options.receivers, layers, options.named("receivers")), frozen


def computed(plan: SweepPlan, options: PatchOptions, out: Path, progress: Progress | None = None) -> SweepResult:
    """Compute the missing runs of a plan into a directory; return the results of all."""
    make_output(out, options.named("out"))
    with OutputLines(out / RUNS) as file:
        done = settle(plan, out, file)
        if len(done) < plan.run_count:
            # An exception stops the engine here, whoever else holds the generator.
            with contextlib.closing(_missing(plan, options, out, done)) as computing:
                for runs in computing:
                    file.add(encoded(run for run in runs if run.key not in done))
                    for run in runs:
                        done.setdefault(run.key, run)
                    if progress is not None:
                        progress(len(done), plan.run_count)
    return result_of(plan, options, done)


def result_of(plan: SweepPlan, options: PatchOptions, runs: Mapping[RunKey, SweepRun]) -> SweepResult:
    """Return the results of finished runs."""
    metrics = check_metrics(options.metrics)
    patches = patches_table(plan, runs, metrics)
    align = options.align or align_of(plan.pairs)
    lengths = {pair.id: len(pair.clean) for pair in plan.pairs}
    summary = summary_table(patches, lengths, align, options.resamples, options.confidence)
    return SweepResult(patches, summary, pairs_table(plan, runs, metrics))


def session_of(plan: SweepPlan, out: Path) -> SweepSession:
    """Return the session that computes the runs of a plan."""
    from capflow_models.sweep.paths import PathSession
    from capflow_models.sweep.session import SweepSession

    if plan.frozen is None:
        return SweepSession(plan.model, plan.sites, out, plan.functions, plan.engine)
    sites = sorted({*plan.sites, *plan.frozen.sites, *(part.site for part in plan.receivers)})
    return PathSession(plan.frozen, plan.model, sites, out, plan.functions, plan.engine)


def _missing(
    plan: SweepPlan, options: PatchOptions, out: Path, done: Mapping[RunKey, SweepRun]
) -> Generator[list[SweepRun], None, None]:
    """Compute the missing runs, group by group, and yield them in batches."""
    from capflow_models.sweep.session import ROWS

    remove_leftovers(out, ROWS)
    todo = {
        pair: keys
        for number, pair in enumerate(plan.pairs)
        if (keys := [key for key in plan.keys(number) if key not in done])
    }
    with session_of(plan, out) as session:
        session.check_room(plan.pairs)
        if any(key.direction == "mean" for keys in todo.values() for key in keys):
            session.learn_means(plan.pairs)
        pairs = list(todo)
        largest = max(map(len, todo.values()))
        donors = (
            set(BASELINES)
            if plan.receivers
            else {DONORS[key.direction] for keys in todo.values() for key in keys if key.direction in DONORS}
        )
        size = min(session.group_size(pairs, donors), max(1, math.ceil(options.batch / largest)))
        for start in range(0, len(pairs), size):
            group = pairs[start : start + size]
            yield session.begin(group, donors)
            named: dict[str, TokenPair] = {pair.id: pair for pair in group}
            for keys in batches((key for pair in group for key in todo[pair] if key.site), options.batch):
                yield session.patched(keys, named)
