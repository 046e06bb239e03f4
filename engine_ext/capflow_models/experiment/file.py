"""The file of an experiment: TOML, as structs. Unknown keys, arms and metrics are refused with their line.

Paths are relative to the file. `Sweep` has the default points of every arm; an arm's own lists replace them.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from capflow.capture.site import HOOKS
from capflow.errors import UsageError, explain
from capflow_models.experiment.places import Key, line_of, lines_of

ArmKind = Literal[
    "baseline", "always_on", "shadow", "gated_sync", "gated_async", "in_graph", "random", "prompt_only"
]  # fmt: skip
ARM_KINDS: tuple[str, ...] = get_args(ArmKind)

MetricName = Literal[
    "gate_rate", "first_firing", "duty", "score_max", "held_out", "judge", "kl", "perplexity", "distinct_1",
    "distinct_2", "length", "tokens_per_s", "ttft_ms", "tpot_ms", "cached_tokens",
]  # fmt: skip
METRICS: tuple[str, ...] = get_args(MetricName)

AXES: Mapping[str, tuple[str, ...]] = {
    "baseline": (),
    "prompt_only": (),
    "always_on": ("layer", "scale"),
    "random": ("layer", "scale"),
    "shadow": ("threshold",),
    "gated_sync": ("layer", "threshold", "scale"),
    "gated_async": ("layer", "threshold", "scale"),
    "in_graph": ("layer", "threshold", "sharpness", "scale"),
}
"""The axes that matter for each kind of arm."""

HARMS = ("kl", "perplexity", "duty")
"""The metrics that harm may be: more of it is worse, and each answer has its own value."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seed = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Names = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")


class PromptSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where prompts come from.

    path: a .jsonl file, a .csv file, or a directory that Hugging Face's `Dataset.save_to_disk` wrote.
    prompt, label, id: the names of its fields; without the field `id` prompts are numbered.
    target, benign: the labels that count as these two. Rows with other labels are left out.
    split: of a directory with several.
    limit: how many prompts of each label are used at most, the first ones.
    """

    path: str
    prompt: str = "prompt"
    label: str = "label"
    id: str = "id"
    target: Names = ("target",)
    benign: Names = ("benign",)
    split: str = ""
    limit: Positive | None = None


class ProbeSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A linear probe: a file, or texts with labels to fit it on.

    file: a probe file.
    fit: a file of texts with labels, as prompts are.
    prompt, label, positive: the fields' names, and the label for which the probe fires.
    split: of a directory with several.
    hook, layer: the probe's site, for a fit.
    method: `logistic` or `mean`.
    tokens: the rows of a text to fit on: its `last` one, or `all` but the first.
    held_out: the share of the texts that judge the fit and choose the threshold.
    seed: of the split.
    threshold: in place of the file's, or of the one that separates the held-out texts best.
    """

    file: str | None = None
    fit: str | None = None
    prompt: str = "prompt"
    label: str = "label"
    positive: Names = ("target",)
    split: str = ""
    hook: str = "post_block"
    layer: Seed | None = None
    method: Literal["logistic", "mean"] = "logistic"
    tokens: Literal["last", "all"] = "last"
    held_out: Share = 0.25
    seed: Seed = 0
    threshold: float | None = None


class VectorSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A steering vector for each layer of the sweep: a file, pairs of prompts to fit them on, or features of one layer.

    file: a file of vectors by layer.
    sae: an autoencoder, `PATH` or `PATH@SITE`, whose features are added at its layer.
    features: their coefficients, by number, in the words of a request's `steering_features`.
    fit: pairs, as `capflow vectors fit` reads them.
    method: `mean` or `pca`.
    hook: the hook point at which vectors are added.
    held_out: the share of the pairs on which the fit is judged.
    seed: of the split.
    """

    file: str | None = None
    fit: str | None = None
    sae: str | None = None
    features: dict[str, Any] = {}
    method: Literal["mean", "pca"] = "mean"
    hook: str = "post_block"
    held_out: Share = 0.25
    seed: Seed = 0


class GateOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How gates decide, in all gated arms.

    positions: the scored positions.
    latch: whether a gate that fired stays open for the rest of the request.
    """

    positions: Literal["all", "last_prompt", "prompt", "generated"] = "all"
    latch: bool = True


class JudgeCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program that scores answers.

    command: the program and its arguments, run in the file's directory. It reads `{"id", "prompt", "label", "text"}`, a
        line each, and writes `{"id", "score"}`, a line each, in any order.
    timeout_s: how long it may take for all answers.
    """

    command: Names
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0


class Axes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Points of a sweep. An arm runs every combination of the axes that matter for it.

    threshold: of the probe's score; the probe's own by default.
    sharpness: `inf` is a hard gate.
    scale: of the vector.
    layer: of the vector.
    """

    threshold: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)] | None = None
    sharpness: Annotated[tuple[Annotated[float, msgspec.Meta(gt=0)], ...], msgspec.Meta(min_length=1)] | None = None
    scale: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)] | None = None
    layer: Annotated[tuple[Seed, ...], msgspec.Meta(min_length=1)] | None = None


class ArmOptions(Axes, frozen=True, forbid_unknown_fields=True):
    """One arm: its kind, by default its name, and its own points.

    at: the positions at which the vector acts. Gates that run between steps act at generated positions only.
    template: of a `prompt_only` arm: the prompt with `{prompt}` in it.
    vector_seed: of a `random` arm.
    """

    kind: ArmKind | None = None
    at: Literal["generated", "prompt", "all"] = "generated"
    template: str = ""
    vector_seed: Seed = 0


class General(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys above all tables.

    model: a directory or a name, or `demo`.
    seeds: each prompt is answered once for each seed.
    max_tokens, temperature, top_p, ignore_eos: of every answer.
    batch: prompts that one arm answers at a time.
    prefix_cache: `reset` empties vLLM's prefix cache before each batch, so that no arm profits from the one before it;
        `keep` does not.
    metrics: which are measured; all that the file allows by default.
    effect, harm: the metrics that are compared on target and on benign prompts.
    resamples, confidence: of the bootstrap intervals.
    """

    model: str
    seeds: Annotated[tuple[Seed, ...], msgspec.Meta(min_length=1)] = (0,)
    max_tokens: Positive = 32
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    ignore_eos: bool = False
    batch: Positive = 16
    prefix_cache: Literal["reset", "keep"] = "reset"
    metrics: tuple[MetricName, ...] = ()
    effect: MetricName | None = None
    harm: MetricName | None = None
    resamples: Annotated[int, msgspec.Meta(ge=100)] = 2000
    confidence: Share = 0.95


class Experiment(msgspec.Struct, frozen=True):
    """A whole file.

    path: the file.
    text: its content.
    engine: arguments of `capflow.LLM`.
    """

    path: Path
    text: str
    general: General
    prompts: tuple[PromptSource, ...]
    vector: VectorSource | None
    probe: ProbeSource | None
    held_out: ProbeSource | None
    judge: JudgeCommand | None
    gate: GateOptions
    sweep: Axes
    arms: Mapping[str, ArmOptions]
    engine: Mapping[str, Any]

    def wrong(self, key: Key, *, got: Any = None, expected: str = "", do: str = "") -> UsageError:
        """Return the error for a value: the file, its line, and the key."""
        return _Places(self.path, self.text).wrong(key, got=got, expected=expected, do=do)

    def relative(self, path: str) -> Path:
        """Return a path of the file."""
        return self.path.parent / path

    def kind(self, arm: str) -> str:
        """Return the kind of an arm."""
        return self.arms[arm].kind or arm

    def kinds(self) -> set[str]:
        """Return the kinds of all arms."""
        return {self.kind(arm) for arm in self.arms}

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics to measure, in the order of `METRICS`."""
        impossible = set()
        if self.held_out is None:
            impossible.add("held_out")
        if self.judge is None:
            impossible.add("judge")
        if self.probe is None:
            impossible |= {"gate_rate", "first_firing", "duty", "score_max"}
        return tuple(m for m in METRICS if m in (self.general.metrics or METRICS) and m not in impossible)

    @property
    def effect(self) -> str | None:
        """The metric that is compared on target prompts; None if there is none."""
        if self.general.effect:
            return self.general.effect
        return next((metric for metric in ("judge", "held_out") if metric in self.metrics), None)

    @property
    def harm(self) -> str | None:
        """The metric that is compared on benign prompts; None if there is none."""
        if self.general.harm:
            return self.general.harm
        return next((metric for metric in ("kl", "perplexity") if metric in self.metrics), None)

    @classmethod
    def read(cls, path: Path) -> Experiment:
        """Return the experiment of a file. Raises UsageError that names the line and the key."""
        try:
            text = path.read_text(encoding="utf-8-sig")
            tables = tomllib.loads(text)
        except OSError as e:
            raise UsageError(explain(str(path), got=e.strerror or str(e), expected="a readable TOML file")) from e
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise UsageError(explain(str(path), got=str(e), expected="TOML")) from e
        experiment = _read(_Places(path, text), tables)
        _check(experiment)
        return experiment


T = TypeVar("T")
_TABLES = ("prompts", "vector", "probe", "held_out", "judge", "gate", "sweep", "arms", "engine")


class _Places:
    """The lines of a file, for errors."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self._lines = lines_of(text)

    def wrong(self, key: Sequence[str | int], *, got: Any = None, expected: str = "", do: str = "") -> UsageError:
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")
        subject = ": ".join(part for part in (f"{self.path}, line {line_of(self._lines, key)}", name) if part)
        return UsageError(explain(subject, got=got, expected=expected, do=do))

    def convert(self, table: Any, kind: type[T], key: Key) -> T:
        try:
            return msgspec.convert(table, kind)
        except msgspec.ValidationError as e:
            raise self._refusal(str(e), table, kind, key) from e

    def _refusal(self, message: str, table: Any, kind: Any, key: Key) -> UsageError:
        """Return the error for a message of msgspec, which ends with the place of the value."""
        text, _, place = message.partition(" - at `$")
        inner: Key = tuple(int(n) if n else name for name, n in re.findall(r"\.(\w+)|\[(\d+)\]", place))
        if unknown := re.search(r"unknown field `(.*)`", text):
            fields = [field.name for field in msgspec.structs.fields(kind)]
            expected = f"one of {', '.join(fields if key else (*fields, *_TABLES))}"
            return self.wrong((*key, *inner, unknown[1]), got="an unknown key", expected=expected)
        if missing := re.search(r"missing required field `(.*)`", text):
            return self.wrong((*key, *inner), expected=f"the key {missing[1]}", do=f"write {missing[1]} = …")
        value = table
        for part in inner:
            value = value[part]
        if "nvalid enum value" in text:
            return self.wrong((*key, *inner), got=value, expected=f"one of {', '.join(_choices(kind, inner))}")
        expected = text.removeprefix("Expected ").partition(", got ")[0].replace("`", "")
        return self.wrong((*key, *inner), got=value, expected=expected)


def _choices(kind: Any, inner: Key) -> tuple[str, ...]:
    """Return the values that a field of a struct may have."""
    annotation = next(field.type for field in msgspec.structs.fields(kind) if field.name == inner[0])
    while get_args(annotation) and not isinstance(get_args(annotation)[0], str | int):
        annotation = get_args(annotation)[0]
    return tuple(map(str, get_args(annotation)))


def _read(places: _Places, tables: dict[str, Any]) -> Experiment:
    general = places.convert({name: tables[name] for name in tables if name not in _TABLES}, General, ())
    sources = tables.get("prompts", {})
    many = isinstance(sources, list)
    prompts = tuple(
        places.convert(source, PromptSource, ("prompts", number) if many else ("prompts",))
        for number, source in enumerate(sources if many else [sources])
    )

    def one(name: str, kind: type[T]) -> T | None:
        return places.convert(tables[name], kind, (name,)) if name in tables else None

    arms = tables.get("arms", {})
    if not isinstance(arms, dict) or not arms:
        raise places.wrong(("arms",), expected="a table for each arm", do="write [arms.baseline]")
    read = {}
    for name, arm in arms.items():
        kind = arm.get("kind") if isinstance(arm, dict) else None
        if kind is None and name not in ARM_KINDS:
            do = 'or write kind = "…" in it'
            raise places.wrong(("arms", name), got=name, expected=f"one of {', '.join(ARM_KINDS)}", do=do)
        if not _NAME.fullmatch(name):
            raise places.wrong(("arms", name), got=name, expected="a name of letters, digits and _, at most 32")
        read[name] = places.convert(arm, ArmOptions, ("arms", name))
    engine = tables.get("engine", {})
    if not isinstance(engine, dict):
        raise places.wrong(("engine",), got=engine, expected="a table of arguments of capflow.LLM")
    for name in ("model", "consumers", "hub", "logits_processors"):
        if name in engine:
            raise places.wrong(("engine", name), got=name, expected="to be left out; the experiment sets it")
    return Experiment(
        places.path, places.text, general, prompts, one("vector", VectorSource), one("probe", ProbeSource),
        one("held_out", ProbeSource), one("judge", JudgeCommand), one("gate", GateOptions) or GateOptions(),
        one("sweep", Axes) or Axes(), read, engine,
    )  # fmt: skip


GATED = {"shadow", "gated_sync", "gated_async", "in_graph"}
STEERED = {"always_on", "random", "gated_sync", "gated_async", "in_graph"}


def _check(experiment: Experiment) -> None:
    """Raise UsageError for parts that do not fit each other, and for paths without a file."""
    baselines = [arm for arm in experiment.arms if experiment.kind(arm) == "baseline"]
    if len(baselines) != 1:
        got, do = f"{len(baselines)} baselines", "write [arms.baseline]"
        raise experiment.wrong(("arms",), got=got, expected="one, with which the others are compared", do=do)
    for arm, options in experiment.arms.items():
        _check_arm(experiment, arm, options)
        _check_ignored(experiment, arm, options)
        _check_axes(experiment, options, ("arms", arm))
    _check_axes(experiment, experiment.sweep, ("sweep",))
    seeds = experiment.general.seeds
    if len(set(seeds)) < len(seeds):
        raise experiment.wrong(("seeds",), got=str(list(seeds)), expected="each value once")
    _check_sources(experiment)
    _check_metrics(experiment)


def _check_arm(experiment: Experiment, arm: str, options: ArmOptions) -> None:
    kind, key = experiment.kind(arm), ("arms", arm)
    if kind in GATED and experiment.probe is None:
        raise experiment.wrong(key, expected="a probe for its gate", do="write a table [probe]")
    if kind in STEERED and experiment.vector is None:
        raise experiment.wrong(key, expected="a vector to add", do="write a table [vector]")
    if kind in STEERED and not (options.layer or experiment.sweep.layer):
        raise experiment.wrong(key, expected="the layer of its vector", do="write layer = [12] here or in [sweep]")
    if kind == "prompt_only" and "{prompt}" not in options.template:
        raise experiment.wrong((*key, "template"), got=options.template, expected="a text with {prompt} in it")
    if kind != "prompt_only" and options.template:
        raise experiment.wrong((*key, "template"), got=options.template, expected=f"none, as its kind is {kind}")
    if options.at != "generated" and kind in ("gated_sync", "gated_async"):
        raise experiment.wrong((*key, "at"), got=options.at, expected="generated, as it acts between steps")


def _check_ignored(experiment: Experiment, arm: str, options: ArmOptions) -> None:
    """Raise UsageError for keys that do nothing for an arm's kind."""
    kind, key = experiment.kind(arm), ("arms", arm)
    for axis in ("threshold", "sharpness", "scale", "layer"):
        if getattr(options, axis) is not None and axis not in AXES[kind]:
            got, allowed = str(list(getattr(options, axis))), ", ".join(AXES[kind]) or "none"
            raise experiment.wrong((*key, axis), got=got, expected=f"no {axis}; the axes of {kind}: {allowed}")
    if options.vector_seed and kind != "random":
        expected = f"none, as its kind is {kind}"
        raise experiment.wrong((*key, "vector_seed"), got=options.vector_seed, expected=expected)
    if options.at != "generated" and kind not in STEERED:
        raise experiment.wrong((*key, "at"), got=options.at, expected=f"none, as its kind is {kind}")
    gate = experiment.gate
    prompt_only = gate.positions in ("last_prompt", "prompt")
    if kind == "in_graph" and options.at == "generated" and not gate.latch and prompt_only:
        expected = f"true with positions = {gate.positions}, as {arm} would never act on a generated position"
        raise experiment.wrong(("gate", "latch"), got=False, expected=expected, do='or write positions = "all"')


def _check_axes(experiment: Experiment, axes: Axes, key: Key) -> None:
    for name in ("threshold", "scale"):
        values = getattr(axes, name) or ()
        if not all(math.isfinite(value) for value in values):
            raise experiment.wrong((*key, name), got=str(values), expected="finite numbers")
    for name in ("threshold", "sharpness", "scale", "layer"):
        values = getattr(axes, name) or ()
        if len(set(values)) < len(values):
            raise experiment.wrong((*key, name), got=str(values), expected="each value once")


def _check_metrics(experiment: Experiment) -> None:
    general = experiment.general
    named = [("effect", general.effect), ("harm", general.harm), *(("metrics", name) for name in general.metrics)]
    for key, name in named:
        if name is not None and name not in experiment.metrics:
            do = {"judge": "write a table [judge]", "held_out": "write a table [held_out]"}.get(name, "write [probe]")
            if general.metrics and name not in general.metrics:
                do = f"add {name} to metrics"
            raise experiment.wrong((key,), got=name, expected=f"one of {', '.join(experiment.metrics)}", do=do)
    if general.harm is not None and general.harm not in HARMS:
        expected = f"one of {', '.join(HARMS)}, of which more is worse"
        raise experiment.wrong(("harm",), got=general.harm, expected=expected)


def _check_one(experiment: Experiment, name: str, source: ProbeSource | VectorSource) -> None:
    """Raise UsageError unless a probe or a vector has one source."""
    keys = ("file", "fit", "sae") if isinstance(source, VectorSource) else ("file", "fit")
    given = [key for key in keys if getattr(source, key) is not None]
    if len(given) != 1:
        expected = f"one of {', '.join(keys)}"
        raise experiment.wrong((name,), got=" and ".join(given) or "none", expected=expected)
    if isinstance(source, VectorSource) and bool(source.features) != (given == ["sae"]):
        got, expected = ("features", "none without sae") if source.features else ("none", "features beside sae")
        raise experiment.wrong((name,), got=got, expected=expected)


def _check_sources(experiment: Experiment) -> None:
    named: list[tuple[Key, str]] = []
    many = isinstance(tomllib.loads(experiment.text).get("prompts"), list)
    for number, prompts in enumerate(experiment.prompts):
        table: Key = ("prompts", number) if many else ("prompts",)
        named.append(((*table, "path"), prompts.path))
        if both := [label for label in prompts.target if label in prompts.benign]:
            expected = "other labels than those of target"
            raise experiment.wrong((*table, "benign"), got=both[0], expected=expected)
    directions = {"probe": experiment.probe, "held_out": experiment.held_out, "vector": experiment.vector}
    for name, source in directions.items():
        if source is None:
            continue
        _check_one(experiment, name, source)
        if source.hook not in HOOKS:
            raise experiment.wrong((name, "hook"), got=source.hook, expected=f"one of {', '.join(HOOKS)}")
        if isinstance(source, ProbeSource):
            if source.fit and source.layer is None:
                raise experiment.wrong((name,), expected="the layer of the probe", do="write layer = 9")
            if source.threshold is not None and not math.isfinite(source.threshold):
                raise experiment.wrong((name, "threshold"), got=str(source.threshold), expected="a finite number")
        if (path := source.file or source.fit) is not None:
            named.append(((name, "file" if source.file else "fit"), path))
    for key, path in named:
        if not experiment.relative(path).exists():
            raise experiment.wrong(key, got=path, expected="an existing file, relative to this one")
